"""Solvers of a flow dx/dt = v(x, t), t the noise level: x_t = (1-t) x_0 + t noise, v = noise - x_0.

They walk a grid of times, down to sample and up to invert, by the same formula (h is negative on the way down):
    euler      x += h v(x, t)                           told="stop": v(x, t + h), as the sampler asked on the way down
    midpoint   m = x + h/2 v(x, t);  x += h v(m, t + h/2)                  = rf_solver, RF-Solver's order 2
    fireflow   m = x + h/2 v_last;   x += h v(m, t + h/2)          v_last: of the last step
RF-Solver (arXiv:2411.04746) writes x += h v1 + h^2/2 (v2 - v1) / (h/2), which is x += h v2: the midpoint rule, without
its cancellation.  FireFlow (arXiv:2412.07517) asks at the start of its first step only.
Evaluations for N steps: euler N, midpoint 2N, fireflow N + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["SOLVERS", "Solver", "Told", "Visit", "Walk", "integrate", "visits"]

Solver = Literal["euler", "midpoint", "rf_solver", "fireflow"]
Told = Literal["start", "stop"]
Velocity = Callable[[Tensor, float], Tensor]

SOLVERS: tuple[Solver, ...] = ("euler", "midpoint", "rf_solver", "fireflow")


@dataclass(frozen=True)
class Visit:
    """One evaluation of the network.

    time: what it is told.  order: 1 at the start (or end) of an interval, 2 in its middle.  key: the noisier end of the
    interval, under which features of inversion and sampling are paired (RF-Edit).  interval: its number.
    """

    time: float
    order: int
    key: float
    interval: int


def visits(times: Sequence[float], solver: Solver = "euler", told: Told = "start") -> list[Visit]:
    """Every evaluation a solver makes on its way along `times`, in order.

    Raises ValueError for an unknown solver, for times that do not strictly rise or fall (two intervals would share a
    key), and for told="stop" with another solver than euler.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is one of {', '.join(map(repr, SOLVERS))}, not {solver!r}")
    if told not in ("start", "stop") or (told == "stop" and solver != "euler"):
        raise ValueError(f"told is 'start', or with the solver 'euler' 'stop', not {told!r} with {solver!r}")
    steps = [after - before for before, after in pairwise(times)]
    if not steps or not (all(h > 0 for h in steps) or all(h < 0 for h in steps)):
        raise ValueError(f"times must strictly rise or strictly fall, two at least, got {list(times)}")
    found = []
    for k, (start, stop) in enumerate(pairwise(times)):
        key = max(start, stop)
        if solver == "euler":
            found.append(Visit(start if told == "start" else stop, 1, key, k))
            continue
        if solver != "fireflow" or k == 0:
            found.append(Visit(start, 1, key, k))
        found.append(Visit(start + (stop - start) / 2, 2, key, k))
    return found


@dataclass(eq=False)
class Walk:
    """A solver on its way along `times`, fed with one velocity at a time: `x = walk(v(x, visit.time), x)` for each of
    `walk.visits`.

    What it returns is where the next velocity is wanted: a midpoint, or an end of an interval.  States are kept in
    float32 at least.  What others change in between (callbacks, blends) is carried over to the state the midpoint was
    made from.
    """

    times: Sequence[float]
    solver: Solver = "euler"
    told: Told = "start"

    index: int = field(default=0, init=False)
    _base: Tensor | None = field(default=None, init=False, repr=False)
    _sent: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.visits = visits(self.times, self.solver, self.told)

    def __call__(self, velocity: Float[Tensor, "..."], sample: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if self.index == len(self.visits):
            raise RuntimeError(f"the walk is over: {self.solver} makes {len(self.visits)} evaluations on these times")
        visit = self.visits[self.index]
        self.index += 1
        exact = torch.promote_types(sample.dtype, torch.float32)
        base = sample.to(exact)
        if visit.order == 2:
            assert self._base is not None and self._sent is not None  # a midpoint was sent
            base = self._base + (base - self._sent)
        if visit.order == 2 or self.solver == "euler":
            base = base + self._length(visit) * velocity.to(exact)
        out = base
        if self.index < len(self.visits) and self.visits[self.index].order == 2:
            out = base + self._length(self.visits[self.index]) / 2 * velocity.to(exact)
        sent = out.to(sample.dtype)
        self._base, self._sent = base, sent.to(exact)
        return sent

    def _length(self, visit: Visit) -> float:
        return self.times[visit.interval + 1] - self.times[visit.interval]


def integrate(
    x: Float[Tensor, "..."],
    velocity: Velocity,
    times: Sequence[float],
    solver: Solver = "euler",
    told: Told = "start",
) -> Float[Tensor, "states ..."]:
    """Every state from `x` at times[0] to times[-1], midpoints included: one more than there are evaluations."""
    walk, path = Walk(times, solver, told), [x]
    for visit in walk.visits:
        path.append(walk(velocity(path[-1], visit.time), path[-1]))
    return torch.stack(path)
