"""Ready pipelines: a loaded diffusers pipeline, with attention control around its calls."""

from .base import ReadyPipeline, load
from .cross_image import CrossImageOutput, CrossImagePipeline
from .interpolation import InterpolationOutput, InterpolationPipeline
from .prompt_to_prompt import PromptToPromptOutput, PromptToPromptPipeline
from .style_swap import StyleSwapOutput, StyleSwapPipeline

__all__ = [
    "CrossImageOutput",
    "CrossImagePipeline",
    "InterpolationOutput",
    "InterpolationPipeline",
    "PromptToPromptOutput",
    "PromptToPromptPipeline",
    "ReadyPipeline",
    "StyleSwapOutput",
    "StyleSwapPipeline",
    "load",
]
