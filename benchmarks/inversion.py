"""How well each inversion brings a picture back, and what it costs, on the two demo models.

    python benchmarks/inversion.py [--n 20] [--steps 30] [--model unet|mmdit] [--out FILE]

Scenes of the demo world are rendered (real pictures, not samples), encoded, inverted with their caption and sampled
again with it.  Columns: calls of the denoiser to invert and to sample (a guided UNet call has two rows), root mean
square error of the latents (their own is about 1), and PSNR of the decoded picture against the rendered one in dB,
means over the scenes.  The last row, "autoencoder", is what encoding and decoding alone gives.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attnctrl import attach, demo
from attnctrl.latents import FlowEdit, Inversion, encode, invert

Case = tuple[str, str, dict[str, Any], dict[str, Any]]  # name, method, options of invert, options of controls

CASES: dict[str, list[tuple[Case, float]]] = {  # with the guidance of sampling
    "unet": [
        (("DDIM", "ddim", {}, {"pin": False}), 1.0),
        (("DDIM", "ddim", {}, {"pin": False}), 4.0),
        (("DDIM, source pinned", "ddim", {}, {"pin": True}), 4.0),
        (("negative prompt", "negative_prompt", {}, {}), 4.0),
        (("null text", "null_text", {"guidance_scale": 4.0}, {}), 4.0),
        (("edit-friendly, authors'", "edit_friendly", {"guidance_scale": 4.0, "keep_last": False}, {}), 4.0),
        (("edit-friendly", "edit_friendly", {"guidance_scale": 4.0}, {}), 4.0),
    ],
    "mmdit": [
        (("Euler", "euler", {}, {"pin": False}), 1.0),
        (("midpoint (RF-Solver)", "midpoint", {}, {"pin": False}), 1.0),
        (("FireFlow", "fireflow", {}, {"pin": False}), 1.0),
        (("FireFlow, source pinned", "fireflow", {}, {"pin": True}), 1.0),
        (("RF-Inversion, eta 0.9 in the first quarter", "rf_inversion", {"guidance_scale": 1.0}, {}), 1.0),
        (("RF-Inversion, eta 0.9 throughout", "rf_inversion", {"guidance_scale": 1.0}, {"window": (0.0, 1.0)}), 1.0),
    ],
}


class Calls:
    """Counts the calls of the denoiser."""

    def __init__(self) -> None:
        self.count = 0

    def denoise(self, call: Any, denoise: Callable[[Any], Any]) -> Any:
        self.count += 1
        return denoise(call)


def scenes(n: int, seed: int = 0) -> Iterator[tuple[Image.Image, str]]:
    """Pictures and their captions, of held-out scenes."""
    rng = random.Random(seed)
    for _ in range(n):
        scene, caption = demo.sample_pair(rng, held_out=True)
        yield demo.render(scene), caption.caption()


def psnr(image: Tensor, other: Tensor) -> float:
    """Of pictures in [0, 1], in dB."""
    return float(-10 * torch.log10((image - other).square().mean()))


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1).float() / 255


def decoded(pipe: Any, latents: Tensor, size: dict[str, int]) -> Tensor:
    if latents.ndim == 3:
        latents = pipe._unpack_latents(latents, size["height"], size["width"], pipe.vae_scale_factor)
    latents = latents / pipe.vae.config.scaling_factor + (pipe.vae.config.shift_factor or 0)
    return (pipe.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)[0]


def sample(pipe: Any, name: str, caption: str, controls: tuple[Any, ...], scale: float, arguments: Any) -> Any:
    """The pipeline's latents with the caption alone, and the calls of its denoiser."""
    calls = Calls()
    guidance = {"guidance_scale": scale} if name == "unet" else {"true_cfg_scale": scale}
    with attach(pipe, calls, *controls):
        latents = pipe([caption], output_type="latent", **{**arguments, **guidance}).images
    return latents, calls.count


@torch.no_grad()
def measure(name: str, n: int, steps: int) -> list[tuple[str, str, float, float, float, float]]:
    """(method, guidance, calls to invert, calls to sample, latent RMSE, PSNR) of each case."""
    pipe, rows = demo.load(name), []
    pictures = list(scenes(n))
    for (label, method, options, settings), scale in CASES[name]:
        found = []
        for image, caption in pictures:
            generator = torch.Generator().manual_seed(0)
            inversion: Inversion = invert(
                pipe, image, caption, method=method, num_inference_steps=steps, generator=generator, **options
            )
            latents, calls = sample(
                pipe, name, caption, inversion.controls([[caption]], **settings), scale, inversion.arguments
            )
            error = (latents - inversion.image).square().mean().sqrt()
            found.append(
                (inversion.nfe, calls, error, psnr(decoded(pipe, latents, inversion.arguments), pixels(image)))
            )
        rows.append((label, f"{scale:g}", *torch.tensor(found).double().mean(0).tolist()))
    if name == "mmdit":
        rows.append(("FlowEdit, equal prompts", "1", *flow_edit(pipe, pictures, steps)))
    latents_of = [(encode(pipe, image), pixels(image)) for image, _ in pictures]
    size = {"height": pictures[0][0].height, "width": pictures[0][0].width}
    ceiling = torch.tensor([psnr(decoded(pipe, latents, size), image) for latents, image in latents_of]).mean()
    return [*rows, ("autoencoder", "", 0, 0, 0, float(ceiling))]


def flow_edit(pipe: Any, pictures: list[tuple[Image.Image, str]], steps: int) -> list[float]:
    """The target's error where it has the source's prompt."""
    found = []
    for image, caption in pictures:
        source, prompts = encode(pipe, image), [caption, caption]
        calls, size = Calls(), {"height": image.height, "width": image.width}
        edit = FlowEdit(source, prompts, n_max=round(steps * 24 / 28), generator=torch.Generator().manual_seed(0))
        with attach(pipe, calls, edit):
            latents = pipe(prompts, num_inference_steps=steps, output_type="latent", **size).images[1:]
        error = (latents - source).square().mean().sqrt()
        found.append((0, calls.count, error, psnr(decoded(pipe, latents, size), pixels(image))))
    return torch.tensor(found).double().mean(0).tolist()


def table(name: str, n: int, steps: int, rows: list[Any]) -> str:
    lines = [
        f"### {name}: {n} pictures, {steps} steps",
        "",
        "| method | guidance | calls to invert | calls to sample | latent RMSE | PSNR |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {m} | {w} | {a:g} | {b:g} | {error:.2g} | {db:.1f} |" for m, w, a, b, error, db in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reconstruction error and cost of each inversion.")
    parser.add_argument("--n", type=int, default=20, help="pictures per model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", choices=demo.NAMES, help="one of the demo models; both when left out")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    names = [args.model] if args.model else list(demo.NAMES)
    text = "\n\n".join(table(name, args.n, args.steps, measure(name, args.n, args.steps)) for name in names)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
