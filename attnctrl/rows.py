"""Rows of a denoiser call: which branch, prompt and image each is, and the latents that went into them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .call import Rows
from .families import Family, Geometry

__all__ = ["branches_of", "fold", "latents_of", "rows_of", "with_latents"]

Scaled = Callable[[Tensor], Tensor]

# rows of a batched guidance call, by pipeline, where they are not the family's
_PIPELINE_BRANCHES: Mapping[str, tuple[str, ...]] = {
    "StableDiffusionInstructPix2PixPipeline": ("cond", "image", "uncond"),
    "StableDiffusionXLInstructPix2PixPipeline": ("cond", "image", "uncond"),
}


def branches_of(pipeline: Any, family: Family) -> tuple[str, ...]:
    """Branches of a batched guidance call of this pipeline, in the order of its rows."""
    return _PIPELINE_BRANCHES.get(type(pipeline).__name__, family.branches)


def rows_of(
    count: int, *, branches: Sequence[str], own: str | None, prompts: int | None, images: int, guided: bool
) -> Rows:
    """The table of a call with `count` rows.

    branches: of a batched guidance call; own: the branch of this call where guidance runs as separate calls, else None;
    prompts and images: as the pipeline's `encode_prompt` was asked, None when it was not called; guided: whether the
    pipeline uses guidance (only asked when prompts is None).
    """
    if own is not None:
        branches = (own,)
    if prompts is None:
        batched = own is None and guided and count % len(branches) == 0
        branches = branches if batched else (own or "cond",)
        return Rows.grid(branches, count // len(branches), 1)
    expected = prompts * images
    if count == expected:
        return Rows.grid((own or "cond",), prompts, images)
    if count == len(branches) * expected:
        return Rows.grid(branches, prompts, images)
    raise ValueError(
        f"the denoiser got {count} rows, but {prompts} prompts with {images} images each make {expected} rows, or "
        f"{len(branches) * expected} with the branches {tuple(branches)}"
    )


@lru_cache(maxsize=256)
def fold(rows: Rows, batch: int) -> Rows:
    """The table for an operation with `batch` entries: frames or pixels of a row lie in the batch, row-major."""
    if batch % len(rows):
        raise ValueError(
            f"an attention operation has {batch} batch entries for the denoiser's {len(rows)} rows: this model does "
            "not keep rows together"
        )
    return dataclasses.replace(rows, fold=batch // len(rows))


def latents_of(fed: Tensor, images: int, family: Family, geometry: Geometry, model: Any) -> Tensor:
    """One row per image of what the pipeline fed the denoiser, without the channels or reference tokens it appended."""
    latents = fed[:images]
    if family.packed and geometry.grid is not None:
        latents = latents[:, : math.prod(geometry.grid)]
    own = getattr(model.config, "out_channels", None)
    own = own * family.packed if own and family.packed else own
    dim = geometry.axis
    return latents if own is None or own >= latents.shape[dim] else latents.narrow(dim, 0, own)


def with_latents(
    inputs: Mapping[str, Any], family: Family, latents: Tensor, rows: Rows, images: int, scaled: Scaled | None
) -> dict[str, Any]:
    """The inputs with `latents` (one row per image) scaled, repeated over the rows, and put in front of what the
    pipeline appended."""
    old = inputs[family.latent_input]
    index = torch.tensor([origin % images for origin in rows.origin], device=old.device)
    new = (latents if scaled is None else scaled(latents)).to(old.dtype)[index]
    return {**inputs, family.latent_input: new if new.shape == old.shape else _in_front(old, new)}


def _in_front(old: Tensor, new: Tensor) -> Tensor:
    """`old` with its first channels, or for packed latents its first tokens, replaced."""
    dims = [d for d in range(1, old.ndim) if old.shape[d] != new.shape[d]]
    if len(dims) != 1 or new.shape[dims[0]] > old.shape[dims[0]]:
        raise ValueError(f"latents of shape {tuple(new.shape)} do not fit the denoiser's input {tuple(old.shape)}")
    rest = old.narrow(dims[0], new.shape[dims[0]], old.shape[dims[0]] - new.shape[dims[0]])
    return torch.cat((new, rest), dim=dims[0])
