"""Rows of a denoiser call: which branch, prompt and image each is, and the latents that went into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Rows
from .families import Family

__all__ = ["branches_of", "latents_of", "rows_of", "with_latents"]

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

    branches: of a batched guidance call; own: the branch of this call where guidance runs as separate calls, else None; prompts and images: as the pipeline's
    `encode_prompt` was asked, None when it was not called; guided: whether the pipeline uses guidance (only asked when prompts is None).
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


def latents_of(fed: Tensor, images: int, channels: int | None, tokens: int | None) -> Tensor:
    """One row per image of what the pipeline fed the denoiser, without appended channels (`channels` are the latent's own) or, for packed latents,
    appended reference tokens (`tokens` are the image's own)."""
    latents = fed[:images]
    if tokens is not None:
        latents = latents[:, :tokens]
    dim = 1 if tokens is None else 2
    return latents if channels is None or channels >= latents.shape[dim] else latents.narrow(dim, 0, channels)


def with_latents(inputs: Mapping[str, Any], name: str, latents: Tensor, rows: Rows, images: int, scale: Any) -> dict[str, Any]:
    """The inputs with `latents` (one row per image) scaled, repeated over the rows, and put in front of what the pipeline appended."""
    old = inputs[name]
    scaled = latents if scale is None else scale(latents)
    index = torch.tensor([origin % images for origin in rows.origin], device=old.device)
    new = scaled.to(old.dtype)[index]
    return {**inputs, name: new if new.shape == old.shape else _in_front(old, new)}


def _in_front(old: Tensor, new: Tensor) -> Tensor:
    """`old` with its first channels, or for packed latents its first tokens, replaced."""
    dims = [d for d in range(1, old.ndim) if old.shape[d] != new.shape[d]]
    if len(dims) != 1 or new.shape[dims[0]] > old.shape[dims[0]]:
        raise ValueError(f"latents of shape {tuple(new.shape)} do not fit the denoiser's input {tuple(old.shape)}")
    rest = old.narrow(dims[0], new.shape[dims[0]], old.shape[dims[0]] - new.shape[dims[0]])
    return torch.cat((new, rest), dim=dims[0])
