"""What the ready pipelines share: how they are made, and how a model's name becomes a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import Self

from .. import demo

__all__ = ["ReadyPipeline", "load"]


def load(model: str | Path = "unet", **kwargs: Any) -> DiffusionPipeline:
    """A diffusers pipeline: "unet" or "mmdit" for the demo models that ship with attnctrl, else a hub id or a folder.

    `kwargs` go to `DiffusionPipeline.from_pretrained`; for a demo model they may hold `dtype`.
    """
    if model in demo.NAMES:
        dtype = kwargs.pop("dtype", torch.float32)
        if kwargs:
            raise ValueError(f"the demo model {model!r} takes dtype only, got {sorted(kwargs)}")
        return demo.load(str(model), dtype=dtype)
    return DiffusionPipeline.from_pretrained(model, **kwargs)


class ReadyPipeline:
    """A loaded diffusers pipeline with attention control around its calls; between calls it is untouched.

    `defaults` are call arguments used where a call does not give its own (the demo models need few steps and small
    pictures).
    """

    def __init__(self, pipe: DiffusionPipeline, defaults: Mapping[str, Any] | None = None) -> None:
        self.pipe = pipe
        self.defaults = dict(defaults or {})

    @classmethod
    def from_pretrained(cls, model: str | Path = "unet", **kwargs: Any) -> Self:
        """Load a model by hub id or folder, or the demo model "unet" or "mmdit"; `kwargs` as for diffusers'
        from_pretrained."""
        return cls(load(model, **kwargs), demo.defaults(str(model)) if model in demo.NAMES else None)

    @classmethod
    def from_pipe(cls, pipe: DiffusionPipeline | ReadyPipeline) -> Self:
        """Around a pipeline that is already loaded; nothing is copied."""
        return cls(pipe.pipe, pipe.defaults) if isinstance(pipe, ReadyPipeline) else cls(pipe)
