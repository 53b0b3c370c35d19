"""RF-Inversion (arXiv:2410.10792, equations 8 and 17): a flow steered to a given noise, and back to a given image.

    inversion  up in t:    dY/dt = u + gamma (u_c - u)    u = v(Y, t, empty prompt), u_c = (y_1 - Y) / (1 - t)
    editing    down in t:  dX/dt = v + eta (v_c - v)      v = v(X, t, prompt),       v_c = (X - y_0) / t
with y_1 ~ N(0, I) drawn once and y_0 the image.
gamma 0 is Euler, gamma 1 ends in y_1; eta 1 goes straight to the image y_0, eta 0 is plain sampling.  One evaluation
per step.  The inversion walks the sampler's grid upwards and tells the network where a step starts (paper);
compat="diffusers" is the community pipeline: told i / (N+1), with the sampler's gaps in the sampler's order, so that
the network's time and the state's disagree.
Defaults: gamma 0.5, empty source prompt, guidance 0; eta 0.9 in the first quarter of the steps (that pipeline's
stop_timestep; its eta is 1.0, its documentation's examples 0.9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, StepCall, StepFunction, Window, in_window
from ..prompts import Prompts
from .flow import Velocity
from .schedulers import solver_for
from .start import StartFrom, per_row, source_rows

__all__ = ["RFInversion", "rf_edit", "rf_invert", "steer_to_image", "steer_to_noise"]

Compat = Literal["diffusers"]


def steer_to_noise(
    velocity: Float[Tensor, "..."], x: Float[Tensor, "..."], noise: Float[Tensor, "..."], time: float, gamma: float
) -> Float[Tensor, "..."]:
    """u + gamma (u_c - u) at noise level `time` below 1."""
    return velocity + gamma * ((noise - x) / (1 - time) - velocity)


def steer_to_image(
    velocity: Float[Tensor, "..."], x: Float[Tensor, "..."], image: Float[Tensor, "..."], time: float, eta: float
) -> Float[Tensor, "..."]:
    """v + eta (v_c - v) at noise level `time` above 0."""
    return velocity + eta * ((x - image) / time - velocity)


def rf_invert(
    x: Float[Tensor, "..."],
    velocity: Velocity,
    sigmas: Sequence[float],
    noise: Float[Tensor, "..."],
    gamma: float = 0.5,
    compat: Compat | None = None,
) -> Float[Tensor, "..."]:
    """From the image `x` to noise; `sigmas` are the sampler's, falling to 0.

    Raises ValueError for another compat than "diffusers".
    """
    n = len(sigmas) - 1
    if compat not in (None, "diffusers"):
        raise ValueError(f"compat is None (the paper's grid) or 'diffusers', not {compat!r}")
    if compat is None:
        told, steps = sigmas[:0:-1], [sigmas[i] - sigmas[i + 1] for i in reversed(range(n))]
    else:
        told, steps = [i / (n + 1) for i in range(n)], [sigmas[i] - sigmas[i + 1] for i in range(n)]
    for time, step in zip(told, steps, strict=True):
        x = x + step * steer_to_noise(velocity(x, time), x, noise, time, gamma)
    return x


def rf_edit(
    x: Float[Tensor, "..."],
    velocity: Velocity,
    sigmas: Sequence[float],
    image: Float[Tensor, "..."],
    eta: float = 0.9,
    steps: tuple[int, int] | None = None,
) -> Float[Tensor, "..."]:
    """From noise `x` towards the `image`, steered in the steps [start, stop) (None: the first quarter)."""
    start, stop = (0, (len(sigmas) - 1) // 4) if steps is None else steps
    for i, (before, after) in enumerate(pairwise(sigmas)):
        v = velocity(x, before)
        x = x + (after - before) * (steer_to_image(v, x, image, before, eta) if start <= i < stop else v)
    return x


@dataclass(eq=False)
class RFInversion:
    """Edit with the noise of `invert(pipe, image, method="rf_inversion")`: rows start from it, steered to the image.

    The pipeline must step by Euler's rule (`Solver`).  No attention is touched.

    image    latents of the image: of one for all edits, or one for each
    noise    what the inversion ended in
    prompts  [source, target, ...] as given to the pipeline, or a list of such edits
    eta      strength of the steering, 0 to 1; window: when it acts, in fractions of the run or step indices
    """

    image: Float[Tensor, "images ..."]
    noise: Float[Tensor, "images ..."]
    prompts: Prompts
    eta: float = 0.9
    window: Window = (0.0, 0.25)

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)
    _starts: StartFrom = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta lies in [0, 1], not {self.eta!r}")
        self._starts = StartFrom(self.noise, self.prompts)

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        self._starts.begin(call)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        return self._starts.denoise(call, denoise)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if self.eta == 0 or not in_window(call.step, self.window):
            return self._starts.step(call, step)
        return self._starts.step(call, lambda inner: step(self._steered(inner)))

    def _steered(self, call: StepCall) -> StepCall:
        image = per_row(self.image, source_rows("RFInversion", self.prompts, call.rows), call.sample)
        time = float(self._run.pipeline.scheduler.sigmas[call.step.index])
        return call.replace(prediction=steer_to_image(call.prediction, call.sample, image, time, self.eta))


@dataclass(eq=False)
class ToNoise:
    """The inversion inside a pipeline: its velocity is steered to `noise`."""

    noise: Float[Tensor, "images ..."]
    gamma: float
    compat: Compat | None
    latents: Float[Tensor, "images ..."] | None = field(default=None, init=False)
    _run: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.compat not in (None, "diffusers"):
            raise ValueError(f"compat is None (the paper's grid) or 'diffusers', not {self.compat!r}")

    def scheduler(self, current: Any) -> Any:
        return solver_for(current, "rf_inversion" if self.compat is None else "rf_inversion_compat", inverse=True)

    def begin_run(self, run: Any) -> None:
        self._run = run

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        scheduler = self._run.pipeline.scheduler
        time = float(scheduler.timesteps[call.step.index]) / scheduler.config.num_train_timesteps
        noise = self.noise.to(call.sample)
        velocity = steer_to_noise(call.prediction, call.sample, noise, time, self.gamma)
        self.latents = step(call.replace(prediction=velocity))
        return self.latents
