"""The latents an inversion went through, and the control that holds the source to them.

Direct inversion (arXiv:2310.01506) adds the offset o_i = x*_{n-i-1} - step(x*_{n-i}) to the source's latents after each
scheduler step; what comes out is x*_{n-i-1} itself, so the source is *set* to it: no second pass, and no drift.
MasaCtrl's reference latents and plug-and-play's stored latents are the same.  The source then ends at the inverted
image exactly, whatever the guidance scale, and its attention is that of the image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction
from ..prompts import Prompts
from .start import check_schedule, per_row, source_rows

__all__ = ["PinSource", "Trajectory"]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The latents of an inversion: entry k is the state after k calls of the network, entry 0 the image's.

    Memory: the latents only, (n + 1) times those of the images (SD 1.5, 50 steps, float32: 3.3 MB); no features.

    timesteps: what the sampler tells the network on the way back, noise first; empty: not checked.
    solver: the sampler that walks the same states back (`Solver`); None: the pipeline's own scheduler.
    """

    latents: Float[Tensor, "states images ..."]
    timesteps: tuple[float, ...] = ()
    solver: str | None = None

    def __post_init__(self) -> None:
        if self.latents.ndim < 3 or len(self.latents) < 2:
            raise ValueError(
                "latents of a trajectory are (states, images, ...), two states at least, got the shape "
                f"{tuple(self.latents.shape)}"
            )
        if self.timesteps and len(self.timesteps) != len(self.latents) - 1:
            raise ValueError(
                f"{len(self.latents)} states need {len(self.latents) - 1} timesteps, got {len(self.timesteps)}"
            )

    def __len__(self) -> int:
        """Iterations from noise to image."""
        return len(self.latents) - 1

    @property
    def noise(self) -> Float[Tensor, "images ..."]:
        """The noisiest state, where sampling starts."""
        return self.latents[-1]

    @property
    def image(self) -> Float[Tensor, "images ..."]:
        """The latents that were inverted."""
        return self.latents[0]


@dataclass(eq=False)
class PinSource:
    """Hold each edit's source to its inversion: its row follows the trajectory, targets start from its noise.

    The pipeline must step by the trajectory's solver (`Solver`).  Acts on the latents after each scheduler step, the
    steps of the controls given after it included; give LocalBlend *before* it, so that targets blend with the pinned
    source:
        attach(pipe, LocalBlend(...), Solver("ddim"), PinSource(...), PromptToPrompt(...))
    A run of fewer iterations (img2img) starts in the middle, from the latents of that level.

    trajectory  of `invert`; of one image for all edits, or one for each
    prompts     [source, target, ...] as given to the pipeline, or a list of such edits
    start       whether targets start from the trajectory's noise, too (the source always does)

    Raises ValueError when the run visits other timesteps than the inversion did.
    """

    trajectory: Trajectory
    prompts: Prompts
    start: bool = True

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        if call.step.index == 0 and self.trajectory.timesteps:
            check_schedule("PinSource", self._run, call.step.total, self.trajectory.timesteps)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if call.step.index != 0:
            return denoise(call)
        rows = call.rows.take(range(len(call.latents)))
        return denoise(call.replace(latents=self._started(call.latents, rows, call.step.total)))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if call.step.index == 0:
            call = call.replace(sample=self._started(call.sample, call.rows, call.step.total))
        latents = step(call)
        return self._pinned(latents, call.rows, call.step.total - call.step.index - 1, sources_only=True)

    def _started(self, latents: Tensor, rows: Rows, total: int) -> Tensor:
        if total > len(self.trajectory):
            raise ValueError(
                f"the pipeline makes {total} iterations, the trajectory has {len(self.trajectory)}: give it the "
                "inversion's num_inference_steps"
            )
        return self._pinned(latents, rows, total, sources_only=not self.start)

    def _pinned(self, latents: Tensor, rows: Rows, state: int, *, sources_only: bool) -> Tensor:
        owners = source_rows("PinSource", self.prompts, rows)
        pinned = per_row(self.trajectory.latents[state], owners, latents)
        if not sources_only:
            return pinned
        keep = torch.tensor([not source for _, source in owners], device=latents.device)
        return torch.where(keep.reshape(-1, *(1 for _ in latents.shape[1:])), latents, pinned)
