"""Solvers as diffusers schedulers: they decide when the network is asked, the pipeline keeps its loop and its guidance.

    EulerFlowInverseScheduler                                   up the pipeline's grid, told where each step ends
    MidpointFlowScheduler, MidpointFlowInverseScheduler         = RFSolverScheduler, RFSolverInverseScheduler
    FireFlowScheduler, FireFlowInverseScheduler                 (flow.py has the formulas and their origin)
    RFInversionInverseScheduler, RFInversionCompatScheduler     the grids of RF-Inversion (rf_inversion.py)
    FlowEditScheduler                                           FlowEdit's visits (flow_edit.py)
    DDIMInversionScheduler, EditFriendlyScheduler               DDIM solved for its start, DDPM with given noise
    (ddim.py)
All are used in place of the pipeline's own, by `from_config(pipe.scheduler.config)`; the flow ones take the arguments
of `FlowMatchEulerDiscreteScheduler.set_timesteps`, so a pipeline's sigmas and resolution shift hold.
num_inference_steps counts intervals; `timesteps` has one entry for each evaluation of the network.  Runs that begin in
the middle of the schedule (img2img) are refused by the flow solvers: pipelines do not agree on how to count there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_ddim import DDIMSchedulerOutput
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from . import flow
from .ddim import Leg, ddim_mean, ddim_unstep, legs_of
from .flow import Told, Walk, visits

__all__ = [
    "DDIMInversionScheduler",
    "EditFriendlyScheduler",
    "EulerFlowInverseScheduler",
    "FireFlowInverseScheduler",
    "FireFlowScheduler",
    "FlowEditScheduler",
    "MidpointFlowInverseScheduler",
    "MidpointFlowScheduler",
    "RFInversionCompatScheduler",
    "RFInversionInverseScheduler",
    "RFSolverInverseScheduler",
    "RFSolverScheduler",
    "Solver",
    "edit_friendly_scheduler",
    "flow_edit_scheduler",
    "is_flow",
    "solver_for",
    "way_back",
]


# as bases they are untyped: diffusers makes their attributes where a type checker does not see them
_Euler: Any = FlowMatchEulerDiscreteScheduler
_FlowOutput: Any = FlowMatchEulerDiscreteSchedulerOutput
_DDIM: Any = DDIMScheduler
_DDIMInverse: Any = DDIMInverseScheduler


# ----------------------------------------------------------------------------------------------------------------- flow


class _FlowGrid(_Euler):
    """The grid of the flow scheduler of diffusers, from the first sigma on."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        for name in ("invert_sigmas", "stochastic_sampling"):
            if getattr(self.config, name):
                raise ValueError(f"{type(self).__name__} cannot walk a schedule with {name}=True")
        if timesteps is not None:
            raise ValueError(
                f"{type(self).__name__} takes its timesteps from the sigmas; give sigmas=..., not timesteps"
            )
        super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu)
        self._lay(self.sigmas.tolist())
        self.set_begin_index(0)

    def set_begin_index(self, begin_index: int = 0) -> None:
        if begin_index:
            raise ValueError(
                f"{type(self).__name__} cannot begin at index {begin_index}: use a text-to-image pipeline, or this one "
                "with its own scheduler"
            )
        super().set_begin_index(0)

    def _lay(self, sigmas: list[float]) -> None:
        """Set the visits, from the grid's n + 1 sigmas, noise first."""
        raise NotImplementedError

    def _set(self, told: list[float], sigmas: list[float]) -> None:
        """What the network is told (noise levels), and the states' own levels, one more."""
        device = self.timesteps.device
        self.timesteps: Tensor = torch.tensor(told, device=device) * self.config.num_train_timesteps
        self.sigmas = torch.tensor(sigmas, dtype=torch.float32)


class _FlowSolver(_FlowGrid):
    solver: ClassVar[flow.Solver] = "euler"
    inverse: ClassVar[bool] = False
    told: ClassVar[Told] = "start"

    def _lay(self, sigmas: list[float]) -> None:
        times = sigmas[::-1] if self.inverse else sigmas
        self._walk = Walk(times, self.solver, self.told)
        told = [visit.time for visit in self._walk.visits]
        # a state is where its velocity is wanted, except under Euler's told="stop"
        self._set(told, [*(times[:-1] if self.solver == "euler" else told), times[-1]])

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        if self.step_index is None:
            self._init_step_index(timestep)
        latents = self._walk(model_output, sample)
        self._step_index += 1
        return _FlowOutput(prev_sample=latents) if return_dict else (latents,)


class EulerFlowInverseScheduler(_FlowSolver):
    """From image to noise, told the noise level where a step ends: the levels the sampler visits (Stable Flow)."""

    inverse, told = True, "stop"


class MidpointFlowScheduler(_FlowSolver):
    """The midpoint rule, which is RF-Solver (arXiv:2411.04746): 2N evaluations."""

    solver = "midpoint"


class MidpointFlowInverseScheduler(MidpointFlowScheduler):
    """The midpoint rule from image to noise."""

    inverse = True


class FireFlowScheduler(_FlowSolver):
    """FireFlow (arXiv:2412.07517): the predictor is the last midpoint's velocity, N + 1 evaluations."""

    solver = "fireflow"


class FireFlowInverseScheduler(FireFlowScheduler):
    """FireFlow from image to noise."""

    inverse = True


RFSolverScheduler, RFSolverInverseScheduler = MidpointFlowScheduler, MidpointFlowInverseScheduler


class RFInversionInverseScheduler(_FlowSolver):
    """The paper's grid: from image to noise, told the noise level where a step starts."""

    inverse = True


class RFInversionCompatScheduler(_FlowGrid):
    """The grid of diffusers' community pipeline: told i / (N+1), while the steps are the sampler's, longest last gap
    first."""

    def _lay(self, sigmas: list[float]) -> None:
        n = len(sigmas) - 1
        self._set([i / (n + 1) for i in range(n)], [sigmas[0] - sigma for sigma in sigmas])


class FlowEditScheduler(_FlowGrid):
    """FlowEdit's visits: the last n_max steps, each of them n_avg times, the last n_min once.

    Between visits of the same level the latents stay; the last of them makes the step.
    """

    n_max: int = 24
    n_min: int = 0
    n_avg: int = 1

    def _lay(self, sigmas: list[float]) -> None:
        total = len(sigmas) - 1
        times = [
            sigmas[i]
            for i in range(max(total - self.n_max, 0), total)
            for _ in range(self.n_avg if total - i > self.n_min else 1)
        ]
        self._set(times, [*times, sigmas[-1]])


# ----------------------------------------------------------------------------------------------------------------- DDIM


class DDIMInversionScheduler(_DDIMInverse):
    """From image to noise by the equation of the DDIM step (ddim.py): as diffusers' own where noise is predicted."""

    def step(self, model_output: Tensor, timestep: int | Tensor, sample: Tensor, return_dict: bool = True) -> Any:
        if self.num_inference_steps is None:
            raise ValueError("call set_timesteps before the first step")
        t = int(timestep)
        before = t - self.config.num_train_timesteps // self.num_inference_steps
        stop = self.alphas_cumprod[before] if before >= 0 else self.initial_alpha_cumprod
        start = self.alphas_cumprod[t]
        latents = ddim_unstep(sample, model_output, float(start), float(stop), self.config.prediction_type)
        return DDIMSchedulerOutput(prev_sample=latents) if return_dict else (latents,)


class EditFriendlyScheduler(_DDIM):
    """DDPM steps to which `variance_noise` is added as it is (deviation and all), from the step `skip` on."""

    skip: int = 0
    noise: float = 1.0  # eta, which pipelines give as an argument of their own

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        super().set_timesteps(num_inference_steps, device)
        self._legs: dict[int, Leg] = {leg.timestep: leg for leg in legs_of(self)}
        self.timesteps: Tensor = self.timesteps[self.skip :]

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        leg = self._legs[int(timestep)]
        mean, _ = ddim_mean(sample, model_output, leg.start, leg.stop, self.config.prediction_type, self.noise)
        latents = mean if variance_noise is None else mean + variance_noise
        return DDIMSchedulerOutput(prev_sample=latents) if return_dict else (latents,)


# ------------------------------------------------------------------------------------------------------------- choosing


def is_flow(scheduler: Any) -> bool:
    """Whether the pipeline of this scheduler predicts a flow's velocity."""
    config = scheduler.config
    return "FlowMatch" in type(scheduler).__name__ or config.get("prediction_type") == "flow_prediction"


_FLOW: dict[str, tuple[type, type]] = {
    "euler": (FlowMatchEulerDiscreteScheduler, EulerFlowInverseScheduler),
    "midpoint": (MidpointFlowScheduler, MidpointFlowInverseScheduler),
    "rf_solver": (RFSolverScheduler, RFSolverInverseScheduler),
    "fireflow": (FireFlowScheduler, FireFlowInverseScheduler),
    "rf_inversion": (FlowMatchEulerDiscreteScheduler, RFInversionInverseScheduler),
    "rf_inversion_compat": (FlowMatchEulerDiscreteScheduler, RFInversionCompatScheduler),
}


_FLOW_CONFIG: tuple[str, ...] = (
    "num_train_timesteps", "shift", "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len",
    "max_image_seq_len", "invert_sigmas", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas",
    "use_beta_sigmas", "time_shift_type", "stochastic_sampling",
)  # fmt: skip
_DDIM_CONFIG: tuple[str, ...] = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "clip_sample",
    "set_alpha_to_one", "steps_offset", "prediction_type", "timestep_spacing", "rescale_betas_zero_snr",
)  # fmt: skip


def solver_for(current: Any, solver: str, inverse: bool = False) -> Any:
    """A new scheduler on the grid of the pipeline's `current` one: "ddim", or for flow models "euler", "midpoint"
    ("rf_solver"), "fireflow".

    DDIM walks the pipeline's beta schedule and spacing ("linspace", which has no inverse, becomes "leading"); latents
    are never clipped.  Raises ValueError when the solver is not one of the model's.
    """
    kind = _FLOW[solver][inverse] if solver in _FLOW else DDIMInversionScheduler if inverse else DDIMScheduler
    return _made(kind, current, solver)


@dataclass(frozen=True)
class Solver:
    """Let the pipeline step by another solver while this is attached: "ddim", or for flow models "euler", "midpoint"
    ("rf_solver") or "fireflow", on the grid of its own scheduler (`solver_for`).

    num_inference_steps counts intervals; `Step.total` counts evaluations of the network.
    """

    name: str

    def scheduler(self, current: Any) -> Any:
        return solver_for(current, self.name)


def edit_friendly_scheduler(current: Any, skip: int, eta: float) -> Any:
    """An `EditFriendlyScheduler` on the grid of `current`."""
    made = _made(EditFriendlyScheduler, current, "edit_friendly")
    made.skip, made.noise = skip, eta
    return made


def flow_edit_scheduler(current: Any, n_max: int, n_min: int, n_avg: int) -> Any:
    """A `FlowEditScheduler` on the grid of `current`."""
    made = _made(FlowEditScheduler, current, "flow_edit")
    made.n_max, made.n_min, made.n_avg = n_max, n_min, n_avg
    return made


def way_back(scheduler: Any) -> tuple[float, ...]:
    """What the sampler will tell the network on the way back from where this inverse scheduler went; noise first."""
    if not isinstance(scheduler, _FlowSolver):
        return tuple(scheduler.timesteps.flip(0).tolist())
    walk = scheduler._walk
    train = scheduler.config.num_train_timesteps
    return tuple(visit.time * train for visit in visits(walk.times[::-1], walk.solver))


def _made(kind: Callable[..., Any], current: Any, solver: str) -> Any:
    name, config = type(current).__name__, dict(current.config)
    flows = (*_FLOW, "flow_edit")
    fitting: tuple[str, ...] = flows if is_flow(current) else ("ddim", "edit_friendly")
    if solver not in fitting:
        raise ValueError(f"{solver!r} does not fit the pipeline's {name}; there are {', '.join(map(repr, fitting))}")
    if solver in flows:
        config.setdefault("shift", config.get("flow_shift", 1.0))
        wanted = _FLOW_CONFIG
    else:
        if not hasattr(current, "alphas_cumprod"):
            raise ValueError(f"{solver!r} needs a beta schedule, which the pipeline's {name} does not have")
        config |= {"clip_sample": False}
        if config.get("timestep_spacing") == "linspace":
            config["timestep_spacing"] = "leading"
        wanted = _DDIM_CONFIG
    return kind(**{key: config[key] for key in wanted if key in config})
