"""Noise levels of a scheduler's iterations, read from its own tables.

In the scale of the pipeline's latents x = alpha x0 + sigma noise, where schedulers differ:
    variance preserving (DDIM, DDPM, PNDM, DPM-Solver, UniPC ...)    alpha^2 + sigma^2 = 1
    sigma space (Euler, Heun, LMS, EDM)                               alpha = 1
    flow matching, and solvers of VP kind with flow sigmas            alpha = 1 - sigma
"""

from __future__ import annotations

import functools
import math
from typing import Any

from .call import Level, Predicts

__all__ = ["Reading", "levels", "predicts"]

_GAP = {"DDIMScheduler", "DDIMParallelScheduler", "CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"}  # t -> t - T // n
_LISTED = {
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "PNDMScheduler",
    "LCMScheduler",
    "TCDScheduler",
}  # t -> next listed
_SIGMA_SPACE = {
    "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler", "LMSDiscreteScheduler",
    "EDMEulerScheduler",
}  # fmt: skip
_PREDICTS: dict[str, Predicts] = {
    "epsilon": "noise", "v_prediction": "velocity", "sample": "x0", "flow_prediction": "flow",
}  # fmt: skip


def _names(scheduler: Any) -> set[str]:
    return {cls.__name__ for cls in type(scheduler).__mro__}


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    kinds = any(name.startswith("FlowMatch") for name in _names(scheduler))
    return kinds or config.get("prediction_type") == "flow_prediction" or bool(config.get("use_flow_sigmas"))


def predicts(scheduler: Any) -> Predicts:
    """What the scheduler takes the network's output for.  Raises ValueError where that is none of the four."""
    kind = scheduler.config.get("prediction_type", "flow_prediction" if _is_flow(scheduler) else None)
    if any(name.startswith("EDM") for name in _names(scheduler)) or kind not in _PREDICTS:
        raise ValueError(
            f"{type(scheduler).__name__} with prediction_type {kind!r} takes the network's output for none of "
            f"{', '.join(_PREDICTS)}"
        )
    return _PREDICTS[kind]


def levels(scheduler: Any, index: int, told: float | None = None) -> tuple[Level, Level]:
    """The levels before and after the iteration `index` of the full schedule.

    told: the timestep, where it is known; the schedule's entry nearest to `index` that has it is meant.
    Raises ValueError for schedulers whose tables are not known.
    """
    times = [float(t) for t in scheduler.timesteps.tolist()]
    if told is not None:
        same = [i for i, t in enumerate(times) if math.isclose(t, told, rel_tol=1e-4, abs_tol=1e-4)]
        index = min(same, key=lambda i: abs(i - index), default=index)
    if not 0 <= index < len(times):
        raise ValueError(f"iteration {index} of a schedule of {len(times)}")
    after = times[index + 1] if index + 1 < len(times) else 0.0
    names = _names(scheduler)
    if getattr(scheduler, "sigmas", None) is not None and (
        _is_flow(scheduler) or hasattr(scheduler, "_sigma_to_alpha_sigma_t") or names & _SIGMA_SPACE
    ):
        if scheduler.config.get("invert_sigmas"):
            raise ValueError(f"{type(scheduler).__name__} with invert_sigmas runs its levels the other way round")
        first, second = (_of_sigma(scheduler, scheduler.sigmas[i]) for i in (index, index + 1))
        return Level(times[index], *first), Level(after, *second)
    if names & (_GAP | _LISTED | {"DDIMInverseScheduler"}):
        return _of_timesteps(scheduler, times[index], after, index + 1 == len(times))
    raise ValueError(f"the noise levels of {type(scheduler).__name__} are not known")


def _of_sigma(scheduler: Any, sigma: Any) -> tuple[float, float]:
    if _is_flow(scheduler):
        return 1 - float(sigma), float(sigma)
    if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
        alpha, sigma = scheduler._sigma_to_alpha_sigma_t(sigma)
        return float(alpha), float(sigma)
    return 1.0, float(sigma)


def _of_timesteps(scheduler: Any, now: float, after: float, last: bool) -> tuple[Level, Level]:
    names = _names(scheduler)
    gap = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    if names & _GAP:
        after = now - gap
    elif "DDIMInverseScheduler" in names:
        now, after = now - gap, now
    elif last:
        after = -1

    def level(timestep: float) -> Level:
        if timestep >= 0:
            bar = float(scheduler.alphas_cumprod[int(timestep)])
        elif "DDIMInverseScheduler" in names:
            bar = float(scheduler.initial_alpha_cumprod)
        elif names & _GAP or "PNDMScheduler" in names:
            bar = float(scheduler.final_alpha_cumprod)
        else:
            bar = 1.0
        return Level(max(timestep, 0.0), math.sqrt(bar), math.sqrt(1 - bar))

    return level(now), level(after)


class Reading:
    """`Levels` of an iteration of `scheduler`, read when asked for; `told` is the timestep, where it is known."""

    def __init__(self, scheduler: Any, index: int, told: Any) -> None:
        self.scheduler, self.index, self.told = scheduler, index, told

    @functools.cached_property
    def _both(self) -> tuple[Level, Level]:
        return levels(self.scheduler, self.index, None if self.told is None else float(self.told))

    @property
    def now(self) -> Level:
        return self._both[0]

    @property
    def next(self) -> Level:
        return self._both[1]

    @property
    def predicts(self) -> Predicts:
        return predicts(self.scheduler)
