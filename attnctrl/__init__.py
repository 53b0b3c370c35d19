"""Attention control for diffusion models: `attach` a method to any diffusers pipeline, take it off again without a
trace."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import (
        Attend,
        AttentionCall,
        Bias,
        DenoiseCall,
        Level,
        Levels,
        MissingRows,
        ModuleCall,
        Prediction,
        Rope,
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
    "Level",
    "Levels",
    "MissingRows",
    "ModuleCall",
    "Prediction",
    "Rope",
    "Rows",
    "Run",
    "Segment",
    "Site",
    "Step",
    "StepCall",
    "Tokens",
    "attach",
]

_MODULES = {"HeadSet": "sites", "Run": "run", "attach": "run"}  # the others are in `call`


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are asked for: the command line's --help needs neither torch nor diffusers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'call')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# in a checkout the ready pipelines lie beside the package, not in it
if not (Path(__file__).parent / "pipelines").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
