"""What the demo models learn: the loss of one batch, and their predictions as the pipelines ask for them.

A batch has `clean` latents and `noise` (b, 16, 16, 16), a `level` (b) in (0, 1) that says how noisy each becomes, a
loss `weight` (b, 1, 16, 16) and in `tokens` the ids (b, 24) of both tokenizers; `empty` has those of the empty caption.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_GUIDANCE = 6.0  # largest scale that the guidance embedding learns


@dataclass(frozen=True)
class Batch:
    """One training batch; see the module's text."""

    clean: Tensor
    noise: Tensor
    level: Tensor
    weight: Tensor
    tokens: dict[str, Tensor]
    empty: dict[str, Tensor]


def unet_loss(parts: nn.ModuleDict, batch: Batch, alphas: Tensor) -> Tensor:
    """Weighted squared error of v = sqrt(a) n - sqrt(1-a) x, with a from the cumulative products `alphas`."""
    timestep = (batch.level * len(alphas)).long()
    signal, amount = (a[timestep].sqrt()[:, None, None, None] for a in (alphas, 1 - alphas))
    noisy = signal * batch.clean + amount * batch.noise
    target = signal * batch.noise - amount * batch.clean
    return _error(predict_unet(parts, noisy, timestep, batch.tokens), target, batch.weight)


def mmdit_loss(parts: nn.ModuleDict, batch: Batch, teacher: nn.ModuleDict | None, scale: Tensor) -> Tensor:
    """Weighted squared error of n - x at x_t = (1-t) x + t n, t = sigmoid(N(1.2, 1.2)).

    Which object is where is decided above t = 0.8, where two fifths of the levels lie; with N(0.3, 1), where a seventh
    did, two objects kept swapping their attributes.

    With a `teacher`, the first half of the batch instead learns to give, in one evaluation with the guidance embedding
    of `scale` (b / 2), the teacher's guided prediction u + scale (c - u) (arXiv:2210.03142)."""
    t = torch.sigmoid(1.2 + 1.2 * torch.special.ndtri(batch.level.clamp(1e-4, 1 - 1e-4)))
    noisy, target = torch.lerp(batch.clean, batch.noise, t[:, None, None, None]), batch.noise - batch.clean
    guidance = torch.ones_like(t)
    if teacher is not None:
        half = len(scale)
        guided = _guided(teacher, noisy[:half], t[:half], batch, scale)
        guidance, target = torch.cat([scale, guidance[half:]]), torch.cat([guided, target[half:]])
    return _error(predict_mmdit(parts, noisy, t, batch.tokens, guidance), target, batch.weight)


@torch.no_grad()
def _guided(teacher: nn.ModuleDict, noisy: Tensor, t: Tensor, batch: Batch, scale: Tensor) -> Tensor:
    b = len(noisy)
    both = {key: torch.cat([ids[:b], batch.empty[key].expand(b, -1)]) for key, ids in batch.tokens.items()}
    ones = torch.ones(2 * b, device=t.device)
    cond, uncond = predict_mmdit(teacher, noisy.repeat(2, 1, 1, 1), t.repeat(2), both, ones).float().chunk(2)
    return uncond + scale[:, None, None, None] * (cond - uncond)


def _error(predicted: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (predicted.float() - target).square()).mean()


def predict_unet(parts: nn.ModuleDict, noisy: Tensor, timestep: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """v (b, 16, 16, 16) of noisy latents, as `StableDiffusionPipeline` asks for it."""
    text = parts["text_encoder"](tokens["clip"])[0]
    return parts["unet"](noisy.contiguous(memory_format=torch.channels_last), timestep, text).sample


def predict_mmdit(
    parts: nn.ModuleDict, noisy: Tensor, t: Tensor, tokens: dict[str, Tensor], guidance: Tensor
) -> Tensor:
    """n - x (b, 16, 16, 16) of noisy latents, as `FluxPipeline` asks for it: ids are (0, row, column)."""
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


@contextlib.contextmanager
def explicit_attention(enabled: bool = True) -> Iterator[None]:
    """Attention as two products and a softmax, for training on a CPU.

    At 256 tokens of 32 channels, compiled, forward and backward take a quarter of the fused kernel's time."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.mT
        if is_causal:
            n = scores.shape[-1]
            attn_mask = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, float("-inf"))
            scores = scores + attn_mask
        return scores.softmax(-1).to(value.dtype) @ value

    functional: Any = nn.functional
    fused = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention if enabled else fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused
