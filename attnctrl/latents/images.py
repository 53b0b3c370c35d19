"""A picture as the latents a pipeline of diffusers works on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

__all__ = ["encode", "pack", "pixel_size", "size_for"]


@torch.no_grad()
def encode(
    pipe: Any, image: Image.Image | list[Image.Image], height: int | None = None, width: int | None = None
) -> Float[Tensor, "images ..."]:
    """The mean of the autoencoder's posterior, shifted and scaled; packed into tokens where the pipeline does.

    Pictures of any mode: transparent ones are put on white, 16-bit ones are scaled, and those whose EXIF says so are
    turned.  They are resized to `height` and `width`; without these, each side goes down to a multiple of the pixels of
    a token.

    Raises ValueError when image is no picture, or the pipeline's autoencoder is missing or not of the common kind.
    """
    vae = getattr(pipe, "vae", None)
    scale = getattr(getattr(vae, "config", None), "scaling_factor", None)
    if vae is None or scale is None or not hasattr(pipe, "image_processor"):
        raise ValueError(
            f"{type(pipe).__name__} has no image autoencoder with a scaling_factor; encode the image yourself and pass "
            "latents"
        )
    images = list(image) if isinstance(image, list | tuple) else [image]
    for one in images:
        if not isinstance(one, Image.Image):
            raise ValueError(f"image is a PIL image or a list of them, got {type(one).__name__}")
    images = [ImageOps.exif_transpose(one) for one in images]
    if not images or len({one.size for one in images}) > 1:
        raise ValueError(
            f"image is a PIL image or a list of them of one size, got sizes {[one.size for one in images]}"
        )
    stride, own = _stride(pipe), size_for(pipe, images[0])
    height, width = height or own[0], width or own[1]
    if min(height, width) < stride or height % stride or width % stride:
        raise ValueError(
            f"image sides must be multiples of {stride} pixels for {type(pipe).__name__}, got height {height}, width "
            f"{width} for a picture of {images[0].width}x{images[0].height}"
        )
    pixels = torch.stack([_pixels(one, height, width) for one in images]).to(pipe._execution_device)
    upcast = vae.dtype == torch.float16 and vae.config.get("force_upcast", False)  # SDXL's overflows in half precision
    dtype = torch.float32 if upcast else vae.dtype
    if upcast:
        vae.to(dtype)
    try:
        latents = vae.encode(pixels.to(dtype)).latent_dist.mode()
    finally:
        if upcast:
            vae.to(torch.float16)
    latents = (latents - (vae.config.get("shift_factor") or 0.0)) * scale
    return pack(pipe, latents.to(_dtype(pipe)))


def size_for(pipe: Any, image: Image.Image) -> tuple[int, int]:
    """Height and width a picture is resized to: its own, down to a multiple of the pixels of a token."""
    stride, upright = _stride(pipe), ImageOps.exif_transpose(image)
    return upright.height // stride * stride, upright.width // stride * stride


def _stride(pipe: Any) -> int:
    return pipe.vae_scale_factor * (2 if hasattr(pipe, "_pack_latents") else 1)


def _dtype(pipe: Any) -> torch.dtype:
    return (getattr(pipe, "transformer", None) or pipe.unet).dtype


def pack(pipe: Any, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
    """Latents of an image in the form the pipeline's `latents=` takes: FLUX joins 2x2 of them into a token."""
    return pipe._pack_latents(latents, *latents.shape) if hasattr(pipe, "_pack_latents") else latents


def pixel_size(pipe: Any, latents: Float[Tensor, "b c h w"]) -> tuple[int, int]:
    """Height and width in pixels of unpacked latents."""
    return latents.shape[-2] * pipe.vae_scale_factor, latents.shape[-1] * pipe.vae_scale_factor


def _pixels(image: Image.Image, height: int, width: int) -> Float[Tensor, "3 h w"]:
    """In [-1, 1]."""
    if image.mode == "F":
        raise ValueError("image has the mode 'F', whose range is not known; convert it to 'RGB'")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 127.5 - 1
