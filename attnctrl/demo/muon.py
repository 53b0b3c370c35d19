"""Muon (https://kellerjordan.github.io/posts/muon): momentum whose update matrices are made orthogonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """update = sqrt(max(1, rows / columns)) * orthogonal(gradient + momentum * buffer).

    Every parameter needs two or more dimensions; all but the first are taken together, so a convolution is a matrix
    too (`torch.optim.Muon` takes matrices only). Parameters of equal shape are treated in one batch."""

    def __init__(self, params, lr: float = 0.01, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault((p.shape[0], p[0].numel()), []).append(p)
            for (rows, columns), params in shapes.items():
                updates = []
                for p in params:
                    gradient: Any = p.grad
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(buffer, group["momentum"]).reshape(rows, columns))
                scale = max(1.0, rows / columns) ** 0.5
                for p, update in zip(params, orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(p.shape).to(p.dtype), alpha=-group["lr"] * scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of each matrix U S V^T of (b, rows, columns), by Newton-Schulz iterations in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
