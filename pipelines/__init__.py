"""Ready pipelines: a loaded diffusers pipeline, with attention control around its calls."""

from .base import ReadyPipeline, load
from .prompt_to_prompt import PromptToPromptOutput, PromptToPromptPipeline

__all__ = ["PromptToPromptOutput", "PromptToPromptPipeline", "ReadyPipeline", "load"]
