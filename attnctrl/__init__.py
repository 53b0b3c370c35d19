"""Attention control for diffusion models: `attach` a method to any diffusers pipeline, take it off again without a
trace."""

from pathlib import Path

from .call import (
    Attend,
    AttentionCall,
    Bias,
    DenoiseCall,
    MissingRows,
    Prediction,
    Rows,
    Segment,
    Site,
    Step,
    StepCall,
    Tokens,
)
from .run import Run, attach
from .sites import HeadSet

__all__ = [
    "Attend",
    "AttentionCall",
    "Bias",
    "DenoiseCall",
    "HeadSet",
    "MissingRows",
    "Prediction",
    "Rows",
    "Run",
    "Segment",
    "Site",
    "Step",
    "StepCall",
    "Tokens",
    "attach",
]

# in a checkout the ready pipelines lie beside the package, not in it
if not (Path(__file__).parent / "pipelines").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
