"""Edit-friendly DDPM inversion (arXiv:2304.06140): noise maps that make the stochastic sampler rebuild an image.

The latents of every level are drawn with *independent* noise, x_{j+1} = sqrt(a) x0 + sqrt(1-a) n_j, not as a chain.
With mu_j, s_j the mean and deviation of the sampler's step from x_{j+1} (source prompt, guided),
    z_j = (x_j - mu_j) / s_j            and sampling is x_j = mu_j + s_j z_j with another prompt, the same z for all
    rows.
Kept are the shifts s_j z_j: they stay right where s_j = 0.
keep_last=True (default) keeps the shift of the last step, so that the source is rebuilt exactly; False is the authors'
code, which drops it.  eta scales the deviation as in DDIM, s^2 = eta^2 (..); the authors' code has eta s^2 inside the
root and agrees at eta = 1.  Their defaults: 100 steps, skip 36, guidance 3.5 for the source and 15 for the target (see
`PromptGuidance`), eta 1.
Evaluations: N to invert, N - skip to edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, StepCall, StepFunction
from ..prompts import Prompts
from .ddim import Leg, Predict, Predicts, ddim_mean
from .schedulers import edit_friendly_scheduler
from .start import StartFrom, check_schedule, per_row, source_rows

__all__ = ["EditFriendly", "NoiseMaps", "edit_friendly_sample", "noise_maps", "noisy_path"]


@dataclass(frozen=True, eq=False)
class NoiseMaps:
    """What edit-friendly inversion keeps, from image to noise: `path` x_0 .. x_N, `shifts` of the steps x_{j+1} -> x_j,
    and their `deviations`."""

    path: Float[Tensor, "levels images ..."]
    shifts: Float[Tensor, "steps images ..."]
    deviations: tuple[float, ...]
    timesteps: tuple[int, ...]
    eta: float = 1.0

    @property
    def zs(self) -> Float[Tensor, "steps images ..."]:
        """The noise maps z_j; 0 where the step has no deviation."""
        scale = self.shifts.new_tensor([1 / s if s > 0 else 0.0 for s in self.deviations])
        return self.shifts * scale.reshape(-1, *(1 for _ in self.shifts.shape[1:]))

    def without_last(self) -> NoiseMaps:
        """The maps with z_0 = 0, as the authors' code leaves them."""
        shifts = self.shifts.clone()
        shifts[0] = 0
        return replace(self, shifts=shifts)


def noisy_path(
    x0: Float[Tensor, "images ..."],
    legs: Sequence[Leg],
    noise: Float[Tensor, "steps images ..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "levels images ..."]:
    """x_0 .. x_N with independent noise, `noise[j]` that of the j-th smallest timestep."""
    if noise is None:
        device = x0.device if generator is None else generator.device
        noise = torch.randn((len(legs), *x0.shape), generator=generator, dtype=x0.dtype, device=device).to(x0.device)
    if len(noise) != len(legs):
        raise ValueError(f"noise has {len(noise)} draws, the schedule {len(legs)} steps: one for each")
    levels = [leg.start for leg in reversed(legs)]
    return torch.stack([x0, *(a**0.5 * x0 + (1 - a) ** 0.5 * n for a, n in zip(levels, noise, strict=True))])


def noise_maps(
    path: Float[Tensor, "levels images ..."],
    predict: Predict,
    legs: Sequence[Leg],
    predicts: Predicts = "epsilon",
    eta: float = 1.0,
    keep_last: bool = True,
) -> NoiseMaps:
    """The maps of a `noisy_path`; `predict` is the network with the source prompt, guided."""
    n = len(legs)
    shifts, deviations = [torch.empty(0)] * n, [0.0] * n
    for i, leg in enumerate(legs):
        j = n - 1 - i
        mean, deviations[j] = ddim_mean(
            path[j + 1], predict(path[j + 1], leg.timestep), leg.start, leg.stop, predicts, eta
        )
        shifts[j] = path[j] - mean
    maps = NoiseMaps(path, torch.stack(shifts), tuple(deviations), tuple(leg.timestep for leg in legs), eta)
    return maps if keep_last else maps.without_last()


def edit_friendly_sample(
    x: Float[Tensor, "rows ..."],
    predict: Predict,
    legs: Sequence[Leg],
    maps: NoiseMaps,
    skip: int = 0,
    predicts: Predicts = "epsilon",
) -> Float[Tensor, "rows ..."]:
    """From x_{N-skip} to the image, with the maps' noise for every row."""
    for i, leg in enumerate(legs):
        if i >= skip:
            mean, _ = ddim_mean(x, predict(x, leg.timestep), leg.start, leg.stop, predicts, maps.eta)
            x = mean + maps.shifts[len(legs) - 1 - i]
    return x


@dataclass(eq=False)
class EditFriendly:
    """Sample with the noise maps of `invert(pipe, image, prompt, method="edit_friendly")`.

    Puts a stochastic DDIM on the pipeline, starts every row at x_{N-skip} of its source and adds the source's shift
    after each step.  Call the pipeline with the N steps of the inversion; it runs N - skip.  The source's row rebuilds
    the image if its guidance is that of the inversion (`PromptGuidance`); give it before controls that change latents
    further.

    maps     of the inversion
    prompts  [source, target, ...], or a list of such edits
    skip     noisiest steps that are left out (authors: 36 of 100)
    """

    maps: NoiseMaps
    prompts: Prompts
    skip: int = 0

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)
    _starts: StartFrom = field(init=False, repr=False)

    def __post_init__(self) -> None:
        steps = len(self.maps.shifts)
        if not 0 <= self.skip < steps:
            raise ValueError(
                f"skip is a number of steps from 0 to {steps - 1}, the maps have {steps}, not {self.skip!r}"
            )
        self._starts = StartFrom(self.maps.path[steps - self.skip], self.prompts)

    def scheduler(self, current: Any) -> Any:
        return edit_friendly_scheduler(current, self.skip, self.maps.eta)

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        if call.step.index == 0:
            check_schedule("EditFriendly", self._run, call.step.total, self.maps.timesteps[self.skip :])
        self._starts.begin(call)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        return self._starts.denoise(call, denoise)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        j = len(self.maps.shifts) - self.skip - 1 - call.step.index
        shift = per_row(self.maps.shifts[j], source_rows("EditFriendly", self.prompts, call.rows), call.sample)
        kwargs = {**call.kwargs, "variance_noise": shift}
        return self._starts.step(call.replace(kwargs=kwargs), step)
