"""Train a demo model from scratch:  python -m attnctrl.demo.train unet --minutes 100 --out runs/unet

The text encoders learn to read captions first (`reading.py`); then they and the denoiser are trained together on scenes
rendered beforehand. Each checkpoint also writes a
grid of samples from fixed noise (`grid.png`) and the moving average of the weights as a pipeline folder (`pipeline/`),
in half precision; --resume goes on from the last one.

    mmdit   flow matching; in the last part half of each batch learns the guidance embedding (--distil-from)
    unet    v-prediction on Stable Diffusion's schedule with zero terminal SNR (arXiv:2305.08891)

On a CPU, MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 in the environment keep large buffers
from being given back to the system after each use (steps are 1.3 times as fast), and so does --compile (1.4 times).
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .dataset import CAPTIONS, as_latents, make_data, tokenize
from .models import NAMES, assemble, defaults, load_folder, new_parts
from .muon import Muon
from .objectives import MAX_GUIDANCE, Batch, explicit_attention, mmdit_loss, unet_loss
from .reading import learn_to_read
from .scene import prompts
from .tokenizers import clip_tokenizer, t5_tokenizer

OBJECT_WEIGHT = 2.0  # extra loss weight of latent pixels that show an object: shapes are what is learned last
DROPOUT = 0.1  # captions replaced by the empty one, for guidance


@dataclass(frozen=True)
class Settings:
    """Length of the training, in steps or in minutes, and the rest of what decides the result."""

    name: str
    steps: int | None = None
    minutes: float | None = None
    batch: int = 64
    scenes: int = 24_000
    seed: int = 0
    device: str = "cpu"
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    warmup: int = 100
    decay_from: float = 0.6  # fraction of the training after which the rates fall linearly to zero
    distil_from: float = 0.86  # mmdit: fraction after which the guidance embedding is learned
    average: float = 0.995
    compile: bool = False
    reading: int = 500  # steps in which the text encoders learn to read before the rest
    start: Path | None = None  # pipeline folder whose weights are the first ones, instead of random ones


class Trainer:
    """One training run on the data of `make_data`; everything that a resumed run needs is in `state()`."""

    def __init__(self, settings: Settings, data: dict[str, Tensor]):
        self.settings, self.device = settings, torch.device(settings.device)
        self.parts = new_parts(settings.name, settings.seed)
        vae: Any = self.parts["vae"]
        if settings.start is None:
            vae.fit(data["images"][:2000].float() / 127.5 - 1)
        else:
            pipe: Any = load_folder(settings.name, settings.start)
            for name, part in self.parts.items():
                part.load_state_dict(getattr(pipe, name).state_dict())
        vae.requires_grad_(False)
        self.latents = as_latents(vae, data["images"]).to(self.device)
        self.weights = (1 + OBJECT_WEIGHT * data["masks"]).to(self.device)
        self.weights /= self.weights.mean()
        self.tokens = {key: data[key].to(self.device) for key in ("clip", "t5")}
        self.empty = {
            "clip": tokenize(clip_tokenizer(), [""]).to(self.device),
            "t5": tokenize(t5_tokenizer(), [""]).to(self.device),
        }
        self.alphas = assemble("unet", self.parts).scheduler.alphas_cumprod if settings.name == "unet" else Tensor()
        self.alphas = self.alphas.to(self.device)
        if settings.reading:
            share = learn_to_read(self.parts, data, settings.reading, settings.seed)
            print(f"the text encoders answer {share:.1%} of the questions about a caption", flush=True)
        self.parts.to(self.device).train()
        if settings.name == "unet":  # contiguous bfloat16 convolutions are far slower on CPUs
            self.parts["unet"].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.parts).requires_grad_(False)
        self.optimizers = make_optimizers(self.parts, settings)
        self.random = torch.Generator().manual_seed(settings.seed)
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.clock = time.monotonic()
        if settings.compile:
            for parts in (self.parts, self.average):
                parts["unet" if settings.name == "unet" else "transformer"].compile(dynamic=False)

    def progress(self) -> float:
        """Fraction of the training that is done."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        return self.seconds / (60 * (self.settings.minutes or 0) or 1)

    def train_step(self) -> float:
        """One optimizer step on one batch; returns the loss."""
        progress, settings = self.progress(), self.settings
        warmup, decay = (self.step + 1) / settings.warmup, (1 - progress) / (1 - settings.decay_from)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, warmup, max(decay, 0.02)) * group["base_rate"]
        with explicit_attention(self.device.type == "cpu"), torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(distil=progress >= settings.distil_from)
        loss.backward()
        if settings.name == "mmdit" and progress < settings.distil_from:
            transformer: Any = self.parts["transformer"]
            for p in transformer.time_text_embed.guidance_embedder.parameters():
                p.grad = None  # one constant scale so far: nothing to learn
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        rate = 1 - min(settings.average, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), [p.detach() for p in self.parts.parameters()], rate)
        now = time.monotonic()  # what lies between steps (checkpoints) counts too
        self.seconds += now - self.clock
        self.clock = now
        self.losses.append(loss.item())
        return self.losses[-1]

    def loss(self, distil: bool) -> Tensor:
        """The loss of one random batch."""
        b, rng = self.settings.batch, self.random
        picked = torch.randint(len(self.latents), (b,), generator=rng)
        caption = torch.randint(CAPTIONS, (b,), generator=rng)
        dropped = (torch.rand(b, generator=rng) < DROPOUT)[:, None].to(self.device)
        level = (torch.randperm(b, generator=rng) + torch.rand(b, generator=rng)) / b  # stratified over (0, 1)
        noise = torch.randn(b, *self.latents.shape[1:], generator=rng)
        batch = Batch(
            clean=self.latents[picked],
            noise=noise.to(self.device),
            level=level.to(self.device),
            weight=self.weights[picked],
            tokens={k: torch.where(dropped, self.empty[k], ids[picked, caption]) for k, ids in self.tokens.items()},
            empty=self.empty,
        )
        if self.settings.name == "unet":
            return unet_loss(self.parts, batch, self.alphas)
        scale = 1 + (MAX_GUIDANCE - 1) * torch.rand(b // 2, generator=rng) if distil else Tensor()
        return mmdit_loss(self.parts, batch, self.average if distil else None, scale.to(self.device))

    def state(self) -> dict[str, Any]:
        """Everything that decides how the run goes on."""
        return {
            "parts": self.parts.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": self.random.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.parts.load_state_dict(state["parts"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.set_state(state["random"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], list(state["losses"])
        self.clock = time.monotonic()

    def pipeline(self) -> Any:
        """The pipeline of the averaged weights, in float32 on the CPU."""
        parts = new_parts(self.settings.name)
        parts.load_state_dict(self.average.state_dict())
        return assemble(self.settings.name, parts)


def make_optimizers(parts: nn.ModuleDict, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for matrices and convolutions; AdamW for embeddings, the layers next to the latents, norms and biases."""
    outer = ("embed_tokens", "embedding.weight", "shared", "relative_attention", "conv_in", "conv_out", "x_embedder")
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in parts.named_parameters():
        last = name == "transformer.proj_out.weight"
        if p.requires_grad:
            (others if p.ndim < 2 or last or any(word in name for word in outer) else matrices).append(p)
    optimizers = [
        Muon(matrices, lr=settings.muon_rate),
        torch.optim.AdamW(others, lr=settings.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_rate"] = group["lr"]
    return optimizers


def sample_grid(name: str, pipe: Any, columns: int = 8, rows: int = 2) -> Image.Image:
    """Held-out prompts from fixed noise with the default call arguments."""
    picked = prompts(columns * rows, seed=1)
    images = pipe(picked, generator=torch.Generator().manual_seed(0), **defaults(name, len(picked))).images
    grid = Image.new("RGB", (66 * columns, 66 * rows))
    for i, image in enumerate(images):
        grid.paste(image, (66 * (i % columns), 66 * (i // columns)))
    return grid


def save(trainer: Trainer, out: Path) -> None:
    """Write checkpoint, sample grid and pipeline folder; the first two appear whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), out / "checkpoint.tmp")
    os.replace(out / "checkpoint.tmp", out / "checkpoint.pt")
    pipe = trainer.pipeline()
    sample_grid(trainer.settings.name, pipe).save(out / "grid.tmp.png")
    os.replace(out / "grid.tmp.png", out / "grid.png")
    pipe.to(torch.float16).save_pretrained(out / "pipeline")


def main(arguments: list[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description="Train a demo model of attnctrl from scratch.")
    parser.add_argument("name", choices=NAMES)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="length of the training in steps")
    length.add_argument("--minutes", type=float, help="length of the training in minutes, checkpoints included")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, sample grid and pipeline")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--scenes", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--muon-rate", type=float, default=Settings.muon_rate)
    parser.add_argument(
        "--distil-from", type=float, default=Settings.distil_from, help="mmdit: as a fraction; 1: never"
    )
    parser.add_argument("--reading", type=int, default=Settings.reading, help="steps of learning to read; 0: none")
    parser.add_argument("--start", type=Path, help="folder of a pipeline whose weights are the first ones")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser (takes a minute at the start)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options = vars(parser.parse_args(arguments))
    out, threads, save_every, resume = (options.pop(key) for key in ("out", "threads", "save_every", "resume"))
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(**options | ({"reading": 0} if resume else {}))
    trainer = Trainer(settings, make_data(settings.scenes, settings.seed))
    if resume:
        trainer.load_state(torch.load(out / "checkpoint.pt", map_location=settings.device))
    saved = time.monotonic()
    while trainer.progress() < 1:
        trainer.train_step()
        if trainer.step % 20 == 0:
            loss, minutes = sum(trainer.losses[-20:]) / 20, trainer.seconds / 60
            print(f"step {trainer.step}  {minutes:.1f} min  {trainer.progress():.1%}  loss {loss:.4f}", flush=True)
        if time.monotonic() - saved > save_every:
            save(trainer, out)
            saved = time.monotonic()
    save(trainer, out)


if __name__ == "__main__":
    main()
