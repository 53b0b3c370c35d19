"""FlowEdit (arXiv:2412.08629): from a source image to a target one along the difference of two flows, without
inversion.

z starts at the image x.  For the last n_max steps of the sampler, t -> t', with fresh noise n (n_avg draws, averaged):
    z_s = (1-t) x + t n        z_t = z + z_s - x
    z  += (t' - t) [v(z_t, t, target) - v(z_s, t, source)]
The last n_min of them sample plainly from y = z + z_s - x, with the target's velocity.
Inside a pipeline source and target are rows of one call, so controls that share attention between rows compose with it.
Defaults are the authors' for FLUX-dev: 28 steps, n_max 24, n_min 0, n_avg 1, embedded guidance 1.5 and 5.5 (SD3: 50
steps, n_max 33, guidance 3.5 and 13.5; see `PromptGuidance`).
Evaluations: n_avg (n_max - n_min) + n_min calls of both rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction
from ..prompts import Prompts
from .flow import Velocity
from .schedulers import flow_edit_scheduler
from .start import per_row, source_rows

__all__ = ["FlowEdit", "flow_edit"]


def _check(n_max: int, n_min: int, n_avg: int) -> None:
    for name, value, least in (("n_max", n_max, 0), ("n_min", n_min, 0), ("n_avg", n_avg, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is a number of at least {least}, not {value!r}")
    if n_min > n_max:
        raise ValueError(f"n_min counts some of the n_max={n_max} last steps, got n_min={n_min}")


def flow_edit(
    x: Float[Tensor, "..."],
    source: Velocity,
    target: Velocity,
    sigmas: list[float],
    n_max: int = 24,
    n_min: int = 0,
    n_avg: int = 1,
    draw: Callable[[], Float[Tensor, "..."]] | None = None,
) -> Float[Tensor, "..."]:
    """The edited image; `sigmas` are the sampler's, falling to 0; `draw()` gives a noise like x (None: torch.randn)."""
    _check(n_max, n_min, n_avg)
    draw = draw or (lambda: torch.randn_like(x))
    z, total, sampling = x, len(sigmas) - 1, False
    for i, (t, after) in enumerate(pairwise(sigmas)):
        if total - i > n_max:
            continue
        if total - i > n_min:
            difference = torch.zeros_like(z)
            for _ in range(n_avg):
                noised = (1 - t) * x + t * draw()
                difference = difference + (target(z + noised - x, t) - source(noised, t)) / n_avg
            z = z + (after - t) * difference
            continue
        if not sampling:
            z, sampling = z + ((1 - t) * x + t * draw()) - x, True
        z = z + (after - t) * target(z, t)
    return z


@dataclass(eq=False)
class FlowEdit:
    """FlowEdit inside a flow pipeline that is called with the prompts [source, target, ...].

    The pipeline's own noise is not used.  Its latents are [x, z] all along: rows of the source stay the image, rows of
    a target are edited; only the denoiser sees them noised.  Call it with the sampler's whole num_inference_steps; it
    runs the iterations n_avg (n_max - n_min) + n_min.

    image      latents of the image as the pipeline holds them (`latents.encode`): one for all edits, or one for each
    prompts    [source, target, ...] as given to the pipeline, or a list of such edits
    n_max, n_min, n_avg  as above
    generator  of the noise; None: torch's own
    """

    image: Float[Tensor, "images ..."]
    prompts: Prompts
    n_max: int = 24
    n_min: int = 0
    n_avg: int = 1
    generator: torch.Generator | None = None

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)
    _at: int = field(default=-1, init=False, repr=False)
    _noise: Tensor | None = field(default=None, init=False, repr=False)
    _sum: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.n_max, self.n_min, self.n_avg)
        if self.n_max == 0:
            raise ValueError("n_max=0 leaves the image as it is; a pipeline needs at least one step")

    def scheduler(self, current: Any) -> Any:
        return flow_edit_scheduler(current, self.n_max, self.n_min, self.n_avg)

    def begin_run(self, run: Any) -> None:
        self._run, self._at, self._sum = run, -1, None

    def begin(self, call: DenoiseCall) -> None:
        """A fresh noise for each iteration, one per image of a source; in the last n_min, the first one's."""
        if call.step.index == self._at:
            return
        self._at = call.step.index
        if self._tail(call.step.index) > 0:
            return
        rows = call.rows.take(range(len(call.latents)))
        draws: dict[tuple[int, int], Tensor] = {}
        for (edit, _), image in zip(source_rows("FlowEdit", self.prompts, rows), rows.image, strict=True):
            if (edit, image) not in draws:
                draws[edit, image] = self._draw(call.latents[0])
        owners = [edit for edit, _ in source_rows("FlowEdit", self.prompts, rows)]
        self._noise = torch.stack([draws[key] for key in zip(owners, rows.image, strict=True)])

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        rows = call.rows.take(range(len(call.latents)))
        state, image, noised = self._state(call.latents, rows, call.step.index)
        latents = state + (noised - image)
        if self._tail(call.step.index) > 0:  # a target's latents are noisy themselves by now
            latents = torch.where(self._sources(rows, state), latents, state)
        return denoise(call.replace(latents=latents))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        state, image, noised = self._state(call.sample, call.rows, call.step.index)
        sources, tail = self._sources(call.rows, state), self._tail(call.step.index)
        if tail >= 0:
            if tail == 0:
                state = torch.where(sources, state, state + (noised - image))
            velocity = call.prediction.masked_fill(sources, 0)
            return step(call.replace(prediction=velocity, sample=state))
        difference = call.prediction - call.prediction[self._source_of(call.rows)]
        self._sum = difference if self._sum is None else self._sum + difference
        if (call.step.index + 1) % self.n_avg:
            return step(call.replace(prediction=torch.zeros_like(difference), sample=state))
        mean, self._sum = self._sum / self.n_avg, None
        return step(call.replace(prediction=mean, sample=state))

    def _tail(self, index: int) -> int:
        """Which of the last n_min steps this is; negative before them."""
        steps = min(self.n_max, self._run.pipeline.scheduler.num_inference_steps)
        return index - self.n_avg * max(steps - self.n_min, 0)

    def _state(self, latents: Tensor, rows: Rows, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The latents [x, z] of this iteration, the image of every row, and the noised image."""
        image = per_row(self.image, source_rows("FlowEdit", self.prompts, rows), latents)
        time = float(self._run.pipeline.scheduler.sigmas[index])
        assert self._noise is not None  # the denoiser runs first
        return (image if index == 0 else latents), image, (1 - time) * image + time * self._noise.to(image)

    def _sources(self, rows: Rows, like: Tensor) -> Tensor:
        is_source = [source for _, source in source_rows("FlowEdit", self.prompts, rows)]
        return torch.tensor(is_source, device=like.device).reshape(-1, *(1 for _ in like.shape[1:]))

    def _source_of(self, rows: Rows) -> list[int]:
        owners = source_rows("FlowEdit", self.prompts, rows)
        at = {
            (edit, image): i for i, ((edit, source), image) in enumerate(zip(owners, rows.image, strict=True)) if source
        }
        return [at[edit, image] for (edit, _), image in zip(owners, rows.image, strict=True)]

    def _draw(self, like: Tensor) -> Tensor:
        device = like.device if self.generator is None else self.generator.device
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=device).to(like.device)
