"""Null-text inversion (arXiv:2211.09794): texts of the uncond rows with which guided sampling follows an inverted
trajectory.

Along x*_n .. x*_0 of an unguided DDIM inversion, at step i of the sampler from x (at first x*_n), with e_c the
prediction of the source prompt, computed once:
    null_i = argmin |step(x; e(x, null) + w (e_c - e(x, null))) - x*_{n-i-1}|^2,  starting from null_{i-1}
    x <- step(x; guided with null_i)
by at most `inner` updates of a fresh Adam with learning rate 1e-2 (1 - i/100); the loss is read before its update, and
below 1e-5 + 2e-5 i that update is the last.  w = 7.5, inner = 10: the authors' code.
Evaluations beyond the inversion: one per update, with a backward pass, and one per step for the next x.  `PinSource`
needs neither: the source is pinned whatever its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, StepCall, StepFunction, batch_index
from ..prompts import Prompts
from .ddim import Leg, Predicts, ddim_step, legs_of
from .schedulers import solver_for
from .start import StartFrom, check_schedule, per_row, source_rows
from .trajectory import Trajectory

__all__ = ["NullText", "NullTexts", "fit_null_text", "null_text"]

Embedding = Float[Tensor, "#b tokens channels"]


def fit_null_text(
    null: Embedding,
    step: Callable[[Tensor], Tensor],
    target: Float[Tensor, "b ..."],
    index: int,
    inner: int = 10,
    rate: float = 1e-2,
    tolerance: float = 1e-5,
) -> tuple[Embedding, int]:
    """The embedding of step `index` and the number of updates made; `step(null)` is the sampler's step with it."""
    null = null.detach().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([null], lr=rate * max(1 - index / 100, 0.0))
    updates = 0
    with torch.enable_grad():
        for updates in range(1, inner + 1):  # noqa: B007
            loss = torch.nn.functional.mse_loss(step(null), target)
            optimizer.zero_grad()
            (null.grad,) = torch.autograd.grad(loss, [null])
            optimizer.step()
            if loss.item() < tolerance + index * 2e-5:
                break
    return null.detach(), updates


def null_text(
    trajectory: Float[Tensor, "states b ..."],
    predict: Callable[[Tensor, int, Tensor], Tensor],
    source: Embedding,
    null: Embedding,
    legs: Sequence[Leg],
    guidance: float = 7.5,
    inner: int = 10,
    predicts: Predicts = "epsilon",
) -> tuple[Float[Tensor, "steps b tokens channels"], Float[Tensor, "states b ..."]]:
    """The embedding of each step, and the latents sampled with them, noise first.

    trajectory: of `ddim_invert`; predict: (x, timestep, embedding) -> prediction; source, null: embeddings of the
    source prompt and of the empty one.
    """
    x, found, path = trajectory[-1], [], [trajectory[-1]]
    for i, leg in enumerate(legs):
        with torch.no_grad():
            cond = predict(x, leg.timestep, source)

        def step(null: Tensor, x: Tensor = x, leg: Leg = leg, cond: Tensor = cond) -> Tensor:
            uncond = predict(x, leg.timestep, null)
            return ddim_step(x, uncond + guidance * (cond - uncond), leg.start, leg.stop, predicts)

        null, _ = fit_null_text(null, step, trajectory[len(legs) - 1 - i], i, inner)
        with torch.no_grad():
            x = step(null)
        found.append(null)
        path.append(x)
    return torch.stack(found), torch.stack(path)


@dataclass(frozen=True, eq=False)
class NullTexts:
    """What null-text inversion found: an embedding for each step, and the trajectory it was made for."""

    embeddings: Float[Tensor, "steps 1 tokens channels"]
    trajectory: Trajectory
    guidance: float


@dataclass(eq=False)
class NullText:
    """Sample with the uncond texts of `invert(pipe, image, prompt, method="null_text")`.

    Every uncond row, of source and targets, gets null_i at step i (authors; single_branch=True: the source's only,
    their ablation), and every row starts from the inverted noise.  The pipeline must step by DDIM (`Solver`).

    Raises ValueError in a run without guidance, or of other timesteps, or with another guidance scale than the texts
    were made for.
    """

    nulls: NullTexts
    prompts: Prompts
    single_branch: bool = False

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)
    _starts: StartFrom = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._starts = StartFrom(self.nulls.trajectory.noise, self.prompts)

    def begin_run(self, run: Any) -> None:
        self._run = run
        check_guided("NullText", run, self.nulls.guidance)

    def begin(self, call: DenoiseCall) -> None:
        if call.step.index == 0:
            check_schedule("NullText", self._run, call.step.total, self.nulls.trajectory.timesteps)
        self._starts.begin(call)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        owners = source_rows("NullText", self.prompts, call.rows)
        uncond = [
            row
            for row, branch in enumerate(call.rows.branch)
            if branch == "uncond" and (owners[row][1] or not self.single_branch)
        ]
        call = with_text(call, uncond, self.nulls.embeddings[call.step.index])
        return self._starts.denoise(call, denoise)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        return self._starts.step(call, step)


def check_guided(name: str, run: Any, guidance: float) -> None:
    """Raises ValueError when the pipeline of `run` does not guide, or with another scale."""
    pipeline = run.pipeline
    if pipeline is None:
        return
    scale = pipeline.guidance_scale if pipeline.do_classifier_free_guidance else 1.0
    if scale != guidance:
        raise ValueError(f"{name} needs guidance_scale={guidance}, the pipeline runs with {scale}")


def with_text(call: DenoiseCall, rows: Sequence[int], text: Float[Tensor, "1 tokens channels"]) -> DenoiseCall:
    """The call with this text for these rows."""
    old = call.inputs["encoder_hidden_states"]
    index = batch_index(tuple(rows), 1, old.device)
    new = text.to(old).expand(len(rows), -1, -1)
    return call.replace(inputs={**call.inputs, "encoder_hidden_states": old.index_copy(0, index, new)})


@dataclass(eq=False)
class FitNullText:
    """Fits the texts while the pipeline samples with the source prompt, guided.

    The cond row runs along in every evaluation, so that one call serves any family whose guidance is one call.
    """

    trajectory: Trajectory
    guidance: float
    inner: int
    found: list[Tensor] = field(default_factory=list, init=False)
    evaluations: int = field(default=0, init=False)

    needs = frozenset({"all_rows"})
    _run: Any = field(default=None, init=False, repr=False)

    def scheduler(self, current: Any) -> Any:
        return solver_for(current, "ddim")

    def begin_run(self, run: Any) -> None:
        self._run = run
        check_guided("null-text inversion", run, self.guidance)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        uncond, cond = (call.rows.where(branch=name).tolist() for name in ("uncond", "cond"))
        if len(uncond) != 1 or len(cond) != 1:
            raise ValueError(
                "null-text inversion needs the cond and uncond row of one image in one call of the denoiser, got "
                f"{call.rows.table()}"
            )
        scheduler, i = self._run.pipeline.scheduler, call.step.index
        if i == 0:
            call = call.replace(latents=per_row(self.trajectory.noise, [(0, True)], call.latents))
        leg = legs_of(scheduler)[i]
        x = call.latents

        def step(null: Tensor) -> Tensor:
            value = denoise(with_text(call, uncond, null)).value
            self.evaluations += 1
            guided = value[uncond] + self.guidance * (value[cond].detach() - value[uncond])
            return ddim_step(x, guided, leg.start, leg.stop, scheduler.config.prediction_type)

        null = self.found[-1] if self.found else call.inputs["encoder_hidden_states"][uncond]
        target = self.trajectory.latents[len(self.trajectory) - 1 - i].to(x)
        self.found.append(fit_null_text(null, step, target, i, self.inner)[0])
        self.evaluations += 1
        return denoise(with_text(call, uncond, self.found[-1]))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if call.step.index == 0:
            call = call.replace(sample=per_row(self.trajectory.noise, [(0, True)], call.sample))
        return step(call)
