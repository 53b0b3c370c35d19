"""What the ready pipelines share: how they are made, and how a model's name becomes a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from typing_extensions import Self

from .. import demo
from ..latents import Inversion, invert
from ..latents.images import size_for
from ..latents.invert import guided
from ..latents.schedulers import is_flow

__all__ = ["ReadyPipeline", "check_text", "inverted", "load"]


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

    def for_prompts(self, arguments: Mapping[str, Any], prompts: int) -> dict[str, Any]:
        """`arguments` with the negative prompt, of which diffusers takes one for each prompt, repeated."""
        return {
            name: [value] * prompts if name.startswith("negative_prompt") and isinstance(value, str) else value
            for name, value in arguments.items()
        }


def check_text(name: str, text: Any) -> None:
    """Raises ValueError where `text`, given for the argument `name`, is none or empty."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} is a text and must not be empty, got {text!r}")


_GUIDANCE = ("guidance_scale", "true_cfg_scale", "negative_prompt")


def inverted(
    ready: ReadyPipeline,
    images: Mapping[str, Any],
    prompt: str,
    method: str | None,
    options: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    *,
    default: str = "edit_friendly",
    guide: bool = False,
) -> tuple[Inversion, dict[str, Any]]:
    """The inversion of pictures, by the names of the arguments they were given for, and the arguments for the pipeline
    call that edits them.

    method, options  see `attnctrl.latents.invert`; None: `default`, or midpoint for flow models
    given            what the caller passes to the pipeline
    guide            whether the pipeline's defaults of guidance count; else it runs without, unless `given` says so

    Raises ValueError, naming the argument, for what is no picture.
    """
    for name, image in images.items():
        if not isinstance(image, Image.Image):
            raise ValueError(f"{name} is a PIL image, got {type(image).__name__}")
    first = next(iter(images.values()))
    arguments = dict(ready.defaults)
    if not guide:
        arguments = {name: value for name, value in arguments.items() if name not in _GUIDANCE}
        arguments |= {} if any(name in given for name in _GUIDANCE) else guided(ready.pipe, 1.0)
    arguments = {"num_inference_steps": 50, **arguments, **given}
    height, width = size_for(ready.pipe, first)
    size = {"height": arguments.get("height") or height, "width": arguments.get("width") or width}
    own = dict(options or {})
    method = method or ("midpoint" if is_flow(ready.pipe.scheduler) else default)
    if method == "edit_friendly":
        own.setdefault("guidance_scale", arguments.get("guidance_scale", 7.5))
    generator = arguments.get("generator")
    found = invert(
        ready.pipe,
        list(images.values()),
        prompt,
        method=method,
        num_inference_steps=arguments["num_inference_steps"],
        generator=generator if isinstance(generator, torch.Generator) else None,
        **size,
        **own,
    )
    return found, {**arguments, **found.arguments}
