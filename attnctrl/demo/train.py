"""Train a demo model from scratch:  python -m attnctrl.demo.train unet --minutes 100 --out runs/unet

The denoiser and its text encoders are trained together on scenes rendered beforehand. Each checkpoint also writes a grid of samples
from fixed noise (`grid.png`) and the exponential moving average of the weights as an ordinary pipeline folder (`pipeline/`).

    mmdit   flow matching, x_t = (1-t) x + t n, target n - x, t = sigmoid(N(0.3, 1)).  In the last part half of each batch learns
            the guided prediction u + g (c - u) of the averaged weights for the guidance embedding g in [1, 6] (arXiv:2210.03142).
    unet    v-prediction on Stable Diffusion's schedule with zero terminal SNR (arXiv:2305.08891).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from .models import assemble, defaults, new_parts
from .muon import Muon
from .render import object_mask, render_array
from .scene import prompts, sample_caption, sample_scene, is_held_out
from .tokenizers import LENGTH, clip_tokenizer, t5_tokenizer

CAPTIONS = 3  # captions of each training scene, one picked at random each time it is seen
OBJECT_WEIGHT = 2.0  # extra loss weight of latent pixels that show an object: shapes are what is learned last
DROPOUT = 0.1  # captions replaced by the empty one, for guidance
MAX_GUIDANCE = 6.0


@dataclass(frozen=True)
class Settings:
    """Length of the training in steps or in minutes, and the rest of what decides the result."""

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
    distil_from: float = 0.72  # mmdit: fraction after which the guidance embedding is learned
    average: float = 0.995
    compile: bool = False


def make_data(settings: Settings) -> dict[str, Tensor]:
    """uint8 pictures (n, 3, 64, 64), object masks (n, 1, 16, 16) in 0..1, and token ids (n, captions, 24) of both tokenizers."""
    rng = random.Random(settings.seed)
    images = np.empty((settings.scenes, 64, 64, 3), np.uint8)
    masks = np.empty((settings.scenes, 16, 16), np.float32)
    captions: list[str] = []
    for i in range(settings.scenes):
        scene, stated = _training_scene(rng)
        images[i] = render_array(scene).round()
        mask = np.any([object_mask(item, scene.style) for item in scene.objects], axis=0)
        masks[i] = mask.reshape(16, 4, 16, 4).mean((1, 3))
        captions += stated
    encoded = {"clip": tokenize(clip_tokenizer(), captions), "t5": tokenize(t5_tokenizer(), captions)}
    return {
        "images": torch.from_numpy(images).permute(0, 3, 1, 2),
        "masks": torch.from_numpy(masks)[:, None],
        **{key: ids.reshape(settings.scenes, CAPTIONS, LENGTH) for key, ids in encoded.items()},
    }


def _training_scene(rng: random.Random):
    """A scene and CAPTIONS captions of it, none of them held out."""
    while True:
        scene = sample_scene(rng)
        stated = [s for s in (sample_caption(rng, scene) for _ in range(4 * CAPTIONS)) if not is_held_out(s)]
        if len(stated) >= CAPTIONS:
            return scene, [s.caption() for s in stated[:CAPTIONS]]


def tokenize(tokenizer, captions: list[str]) -> Tensor:
    """Token ids (n, 24), padded as the pipelines pad them."""
    return tokenizer(captions, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt").input_ids


def as_latents(vae: nn.Module, images: Tensor) -> Tensor:
    """Latents (n, 16, 16, 16) of uint8 pictures: the unfolded form, one channel a component."""
    pieces = [vae.encode(part.float() / 127.5 - 1).latent_dist.mode() for part in images.split(1000)]
    return nn.functional.pixel_unshuffle(torch.cat(pieces), vae.config.fold)


class Trainer:
    """One training run; everything that a resumed run needs is in `state()`."""

    def __init__(self, settings: Settings, data: dict[str, Tensor]):
        self.settings, self.device = settings, torch.device(settings.device)
        self.parts = new_parts(settings.name, settings.seed)
        self.parts["vae"].fit(data["images"][:2000].float() / 127.5 - 1).requires_grad_(False)
        with torch.no_grad():
            self.latents = as_latents(self.parts["vae"], data["images"]).to(self.device)
        self.weights = (1 + OBJECT_WEIGHT * data["masks"]).to(self.device)
        self.weights /= self.weights.mean()
        self.tokens = {key: data[key].to(self.device) for key in ("clip", "t5")}
        empty = {"clip": tokenize(clip_tokenizer(), [""]), "t5": tokenize(t5_tokenizer(), [""])}
        self.empty = {key: ids.to(self.device) for key, ids in empty.items()}
        self.parts.to(self.device).train()
        if settings.name == "unet":
            self.parts.to(memory_format=torch.channels_last)  # contiguous bfloat16 convolutions are far slower on CPUs
            self.alphas = assemble("unet", self.parts).scheduler.alphas_cumprod.to(self.device)
            self.parts.train()
        self.average = copy.deepcopy(self.parts).requires_grad_(False)
        self.optimizers = make_optimizers(self.parts, settings)
        self.random = torch.Generator().manual_seed(settings.seed)
        self.step, self.seconds, self.losses = 0, 0.0, []
        self.clock = time.monotonic()
        if settings.compile:
            denoiser = "unet" if settings.name == "unet" else "transformer"
            self.parts[denoiser].compile(dynamic=False)
            self.average[denoiser].compile(dynamic=False)

    def progress(self) -> float:
        """Fraction of the training that is done."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        return self.seconds / (60 * self.settings.minutes)

    def train_step(self) -> float:
        """One optimizer step on one batch; returns the loss."""
        progress = self.progress()
        scale = min(1.0, (self.step + 1) / self.settings.warmup, max(0.02, (1 - progress) / (1 - self.settings.decay_from)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = scale * group["base_rate"]
        with explicit_attention(self.device.type == "cpu"), torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(progress)
        loss.backward()
        if self.settings.name == "mmdit" and progress < self.settings.distil_from:
            for p in self.parts["transformer"].time_text_embed.guidance_embedder.parameters():
                p.grad = None  # one constant scale so far: nothing to learn
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.settings.average, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), [p.detach() for p in self.parts.parameters()], 1 - decay)
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now  # what lies between steps (checkpoints) counts too
        self.losses.append(loss.item())
        return self.losses[-1]

    def loss(self, progress: float) -> Tensor:
        """Weighted mean squared error of one random batch."""
        b = self.settings.batch
        picked = torch.randint(len(self.latents), (b,), generator=self.random)
        caption = torch.randint(CAPTIONS, (b,), generator=self.random)
        dropped = (torch.rand(b, generator=self.random) < DROPOUT)[:, None].to(self.device)
        level = (torch.randperm(b, generator=self.random) + torch.rand(b, generator=self.random)) / b  # stratified, in (0, 1)
        noise = torch.randn(b, *self.latents.shape[1:], generator=self.random).to(self.device)
        clean, weight = self.latents[picked], self.weights[picked]
        tokens = {key: torch.where(dropped, self.empty[key], ids[picked, caption]) for key, ids in self.tokens.items()}
        if self.settings.name == "unet":
            timestep = (level * len(self.alphas)).long().to(self.device)
            signal, amount = (a[timestep].sqrt()[:, None, None, None] for a in (self.alphas, 1 - self.alphas))
            noisy, target = signal * clean + amount * noise, signal * noise - amount * clean
            predicted = predict_unet(self.parts, noisy, timestep, tokens)
        else:
            t = torch.sigmoid(0.3 + torch.special.ndtri(level.clamp(1e-4, 1 - 1e-4))).to(self.device)
            noisy, target = torch.lerp(clean, noise, t[:, None, None, None]), noise - clean
            guidance = torch.ones_like(t)
            if progress >= self.settings.distil_from:
                guidance, target = self.guided_target(noisy, t, tokens, target)
            predicted = predict_mmdit(self.parts, noisy, t, tokens, guidance)
        return (weight * (predicted.float() - target).square()).mean()

    @torch.no_grad()
    def guided_target(self, noisy: Tensor, t: Tensor, tokens: dict[str, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        """(guidance, target): for the first half of the batch a random scale and the guided prediction of the averaged weights."""
        half = len(t) // 2
        scale = 1 + (MAX_GUIDANCE - 1) * torch.rand(half, generator=self.random).to(t)
        both = {key: torch.cat([ids[:half], self.empty[key].expand(half, -1)]) for key, ids in tokens.items()}
        twice = predict_mmdit(self.average, noisy[:half].repeat(2, 1, 1, 1), t[:half].repeat(2), both, torch.ones(2 * half).to(t))
        cond, uncond = twice.float().chunk(2)
        guided = uncond + scale[:, None, None, None] * (cond - uncond)
        return torch.cat([scale, torch.ones_like(t[half:])]), torch.cat([guided, target[half:]])

    def state(self) -> dict:
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

    def load_state(self, state: dict) -> None:
        """Go on from `state()`."""
        self.parts.load_state_dict(state["parts"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.set_state(state["random"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]

    def pipeline(self):
        """The pipeline of the averaged weights, in float32 on the CPU."""
        parts = new_parts(self.settings.name)
        parts.load_state_dict(self.average.state_dict())
        return assemble(self.settings.name, parts)


@contextlib.contextmanager
def explicit_attention(enabled: bool = True):
    """Training on a CPU: attention as two products and a softmax. At 256 tokens of 32 channels, compiled, it takes a quarter of the
    time of the fused kernel's forward and backward pass."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.mT
        if is_causal:
            n = scores.shape[-1]
            attn_mask = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, float("-inf"))
            scores = scores + attn_mask
        return scores.softmax(-1).to(value.dtype) @ value

    fused = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention if enabled else fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = fused


def predict_unet(parts: nn.ModuleDict, noisy: Tensor, timestep: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """v (b, 16, 16, 16) of noisy latents, as `StableDiffusionPipeline` asks for it."""
    text = parts["text_encoder"](tokens["clip"])[0]
    return parts["unet"](noisy.contiguous(memory_format=torch.channels_last), timestep, text).sample


def predict_mmdit(parts: nn.ModuleDict, noisy: Tensor, t: Tensor, tokens: dict[str, Tensor], guidance: Tensor) -> Tensor:
    """n - x (b, 16, 16, 16) of noisy latents, as `FluxPipeline` asks for it: one token a latent pixel, ids (0, row, column)."""
    b, channels, height, width = noisy.shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(noisy)
    predicted = parts["transformer"](
        hidden_states=noisy.flatten(2).mT,
        timestep=t,
        guidance=guidance,
        pooled_projections=parts["text_encoder"](tokens["clip"]).pooler_output,
        encoder_hidden_states=parts["text_encoder_2"](tokens["t5"])[0],
        img_ids=ids,
        txt_ids=ids.new_zeros(tokens["t5"].shape[1], 3),
    ).sample
    return predicted.mT.reshape(b, channels, height, width)


def make_optimizers(parts: nn.ModuleDict, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for matrices and convolutions, AdamW for embeddings, the layers next to the latents, norms and biases."""
    matrices, others = [], []
    for name, p in parts.named_parameters():
        if p.requires_grad:
            outer = any(word in name for word in ("embed_tokens", "embedding.weight", "shared", "relative_attention", "conv_in", "conv_out", "x_embedder", "proj_out.weight"))
            single_block = "single_transformer_blocks" in name or "attentions" in name  # their proj_out is an inner matrix
            (matrices if p.ndim >= 2 and (not outer or ("proj_out" in name and single_block)) else others).append(p)
    optimizers = [
        Muon(matrices, lr=settings.muon_rate),
        torch.optim.AdamW(others, lr=settings.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_rate"] = group["lr"]
    return optimizers


def sample_grid(name: str, pipe, columns: int = 8, rows: int = 2) -> Image.Image:
    """Held-out prompts from fixed noise with the default call arguments."""
    picked = prompts(columns * rows, seed=1)
    images = pipe(picked, generator=torch.Generator().manual_seed(0), **_batched(defaults(name), len(picked))).images
    grid = Image.new("RGB", (66 * columns, 66 * rows))
    for i, image in enumerate(images):
        grid.paste(image, (66 * (i % columns), 66 * (i // columns)))
    return grid


def _batched(arguments: dict, n: int) -> dict:
    return {key: [value] * n if key == "negative_prompt" else value for key, value in arguments.items()}


def save(trainer: Trainer, out: Path) -> None:
    """Write checkpoint, pipeline folder and sample grid; each appears whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), out / "checkpoint.tmp")
    os.replace(out / "checkpoint.tmp", out / "checkpoint.pt")
    pipe = trainer.pipeline()
    sample_grid(trainer.settings.name, pipe).save(out / "grid.tmp.png")
    os.replace(out / "grid.tmp.png", out / "grid.png")
    export(pipe, out / "pipeline")


def export(pipe, folder: Path) -> None:
    """Save the pipeline in half precision."""
    pipe.to(torch.float16).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description="Train a demo model of attnctrl from scratch.")
    parser.add_argument("name", choices=("unet", "mmdit"))
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="length of the training in steps")
    length.add_argument("--minutes", type=float, help="length of the training in minutes, checkpoints included")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, sample grid and pipeline")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--scenes", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser (a minute at the start, steps 1.5 times as fast)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = Settings(
        name=options.name,
        steps=options.steps,
        minutes=options.minutes,
        batch=options.batch,
        scenes=options.scenes,
        seed=options.seed,
        device=options.device,
        compile=options.compile,
    )
    trainer = Trainer(settings, make_data(settings))
    if options.resume:
        trainer.load_state(torch.load(options.out / "checkpoint.pt", map_location=options.device))
    saved = time.monotonic()
    while trainer.progress() < 1:
        trainer.train_step()
        if trainer.step % 20 == 0:
            recent = trainer.losses[-20:]
            print(f"step {trainer.step}  {trainer.seconds / 60:.1f} min  {trainer.progress():.1%}  loss {sum(recent) / len(recent):.4f}", flush=True)
        if time.monotonic() - saved > options.save_every:
            save(trainer, options.out)
            saved = time.monotonic()
    save(trainer, options.out)


if __name__ == "__main__":
    main()
