"""Latents of given images for the rows of a pipeline: where a run starts, and which row belongs to which image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction
from ..prompts import Prompts, check_count, flatten

__all__ = ["StartFrom", "check_schedule", "per_row", "source_rows"]


def source_rows(name: str, prompts: Prompts, rows: Rows) -> list[tuple[int, bool]]:
    """For each row (one per image): the number of its edit, and whether it is the edit's source.

    Raises ValueError when the pipeline runs another number of prompts than control `name` was made for.
    """
    _, sources = flatten(prompts, alone=True)
    check_count(name, len(sources), rows.prompt)
    edits = {source: k for k, source in enumerate(dict.fromkeys(sources))}
    return [(edits[sources[p]], sources[p] == p) for p in rows.prompt]


def per_row(
    images: Float[Tensor, "images ..."], rows: Sequence[tuple[int, bool]], like: Tensor
) -> Float[Tensor, "rows ..."]:
    """Of `images`, one for all edits or one for each, that of every row; on the device and in the dtype of `like`.

    Raises ValueError where their number or shape does not fit.
    """
    edits = max(edit for edit, _ in rows) + 1
    if len(images) not in (1, edits):
        raise ValueError(f"there are {len(images)} images for {edits} edits; give one for all, or one for each")
    if images.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"the image's latents have the shape {tuple(images.shape[1:])}, the pipeline's {tuple(like.shape[1:])}; "
            "call it with the image's height and width"
        )
    index = [edit if len(images) > 1 else 0 for edit, _ in rows]
    return images.to(like)[torch.tensor(index, device=like.device)]


def check_schedule(name: str, run: Any, total: int, timesteps: Sequence[float]) -> None:
    """Raises ValueError when the `total` iterations of `run` do not end with these timesteps, noise first."""
    if run is None or run.pipeline is None:  # a loop by hand
        return
    visited = run.pipeline.scheduler.timesteps.double().cpu()
    visited = visited[len(visited) - total :]
    wanted = torch.tensor(list(timesteps), dtype=torch.float64)[-total:]
    if len(visited) != len(wanted) or not torch.allclose(visited, wanted, rtol=1e-4, atol=1e-2):
        raise ValueError(
            f"{name} was made for the timesteps {[round(t, 1) for t in timesteps]}, the pipeline visits "
            f"{[round(t, 1) for t in visited.tolist()]}: give it the inversion's num_inference_steps, height and width"
        )


@dataclass(frozen=True, eq=False)
class StartFrom:
    """Every row starts from given latents, whatever the pipeline drew.

    In the first iteration only: on what the denoiser sees, and on what the scheduler steps from.

    latents  one image's for all edits, or one for each
    prompts  [source, target, ...] as given to the pipeline, or a list of such edits
    """

    latents: Float[Tensor, "images ..."]
    prompts: Prompts

    def begin(self, call: DenoiseCall) -> None:
        """Shapes and numbers are checked before the denoiser runs."""
        if call.step.index == 0:
            self._for(call.rows.take(range(len(call.latents))), call.latents)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if call.step.index != 0:
            return denoise(call)
        return denoise(call.replace(latents=self._for(call.rows.take(range(len(call.latents))), call.latents)))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        return step(call if call.step.index != 0 else call.replace(sample=self._for(call.rows, call.sample)))

    def _for(self, rows: Rows, like: Tensor) -> Tensor:
        return per_row(self.latents, source_rows("StartFrom", self.prompts, rows), like)
