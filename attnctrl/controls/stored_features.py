"""Queries, keys or values of an inversion, kept for the run that edits its image (arXiv:2411.04746, arXiv:2412.07517).

A solver walks n intervals of time; an inversion walks up the boundaries that the edit then walks down.  What is kept
belongs to an interval, counted from the noise end (0 has the upper bound t = 1), and to the order of the evaluation in
it: 1 at the interval's beginning, 2 in its middle.  So in an order-1 pair the edit, at the upper bound of an interval,
reads what the inversion had at its lower bound, as in the authors' code; an order-2 pair is exact in time.
    euler     evaluation i is (interval i, order 1)
    midpoint  evaluations 2 i and 2 i + 1 are (i, 1) and (i, 2)            (RF-Solver of order 2 is this rule)
    fireflow  evaluation 0 is (0, 1), evaluation i > 0 is (i - 1, 2)       (later order-1 velocities are reused)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, MissingRows, Rows, Site, Step, Tokens, Window, in_window
from ..sharing import Sharing, check_window, pairs

__all__ = ["Evaluation", "FromSource", "StoredFeatures", "evaluation", "intervals", "value_sites"]

Solver = Literal["euler", "midpoint", "fireflow"]
Features = dict[str, Float[Tensor, "b h n d"]]  # by "query", "key", "value"

_NAMES = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class _Kept:
    """The features of one attention operation."""

    rows: Rows
    tokens: dict[str, Tokens]
    features: Features


class Evaluation(NamedTuple):
    """One call of the network by a solver: the interval counted from the noise end, and the order in it."""

    interval: int
    order: int


Place = dict[tuple[str, str], list[_Kept]]  # by denoiser and name of the site


def intervals(total: int, solver: Solver) -> int:
    """Number of intervals that `total` evaluations of a solver walk.  Raises ValueError where they make none."""
    count = {"euler": total, "midpoint": total / 2, "fireflow": total - 1}.get(solver)
    if count is None:
        raise ValueError(f"solver is 'euler', 'midpoint' or 'fireflow', not {solver!r}")
    if count < 1 or count != int(count):
        raise ValueError(f"{total} iterations of the loop are no whole intervals of the solver {solver!r}")
    return int(count)


def evaluation(index: int, total: int, solver: Solver, *, inverse: bool = False) -> Evaluation:
    """What evaluation `index` of `total` is.  `inverse`: the run walks up, towards the noise."""
    count = intervals(total, solver)
    walked, order = {
        "euler": (index, 1),
        "midpoint": (index // 2, index % 2 + 1),
        "fireflow": (max(index - 1, 0), min(index, 1) + 1),
    }[solver]
    return Evaluation(count - 1 - walked if inverse else walked, order)


def value_sites(sites: Sequence[Site]) -> list[Site]:
    """Single-stream blocks from number 20 of 38 (FLUX: 20-37) or 21 of 40 (HunyuanVideo: 21-39) on, the authors' own.
    Of models with double-stream blocks only, the last 18 of 57, as in FLUX; elsewhere all self sites (OpenSora)."""
    joint = [site for site in sites if site.kind == "joint"]
    singles = [site for site in joint if site.place == "single"]
    if singles:
        return [site for site in singles if site.block >= 20 * (max(s.block for s in singles) + 1) // 38]
    if joint:
        return joint[39 * len(joint) // 57 :]
    return [site for site in sites if site.kind == "self"]


@dataclass(eq=False)
class StoredFeatures:
    """Keep features of an inversion: attach it while the pipeline inverts, then give it to the control that edits.

    inject    of how many intervals next to the noise: a number, or a fraction of them.  The authors' scripts use 2, 3,
              5 of 15 to 30 (their code's default of 20 is not what they use)
    solver    how the inversion walks: "midpoint" (RF-Solver), "fireflow" or "euler"
    features  which of "q", "k", "v" to keep
    inverse   whether the run attached to walks towards the noise; False keeps the features of a generated source
    device    where to keep them; None: where they are
    sites     a selector, or a function choosing sites; it must hold those of the control that edits

    Memory: rows * tokens * width numbers per feature, site and evaluation; FLUX of 1024 x 1024 in bfloat16 28 MB for
    one value, 1.0 GB for the 18 default sites and two evaluations of one interval.  `nbytes` tells.
    """

    inject: int | float = 3
    solver: Solver = "midpoint"
    features: str = "v"
    inverse: bool = True
    device: torch.device | str | None = None
    sites: str | Callable[[Sequence[Site]], list[Site]] = value_sites

    stage = "observe"
    kinds = frozenset({"self", "joint"})

    total: int | None = field(default=None, init=False, repr=False)  # iterations of the run that was recorded
    _kept: dict[Evaluation, Place] = field(default_factory=dict, init=False, repr=False)
    _now: tuple[bool, Place | None] = field(default=(False, None), init=False, repr=False)

    def __post_init__(self) -> None:
        intervals(2, self.solver)
        if not self.features or set(self.features) - set(_NAMES):
            raise ValueError(f"features are letters of 'q', 'k', 'v', e.g. 'v', not {self.features!r}")
        if self.inject < 0 or (isinstance(self.inject, float) and self.inject > 1):
            raise ValueError(f"inject is a number of intervals, or a fraction of them in [0, 1], not {self.inject!r}")

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        kept = [entry for place in self._kept.values() for entries in place.values() for entry in entries]
        return sum(x.numel() * x.element_size() for entry in kept for x in entry.features.values())

    @property
    def evaluations(self) -> list[Evaluation]:
        """Of which evaluations something is kept, from the noise end on."""
        return sorted(now for now, place in self._kept.items() if place)

    def begin_run(self, run: Any) -> None:
        self._kept.clear()
        self.total = None

    def begin(self, call: DenoiseCall) -> None:
        self._now = True, self._place(call.step)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        begun, place = self._now
        place = place if begun else self._place(call.step)
        if place is not None and not call.probe:
            features = {}
            for name in map(_NAMES.__getitem__, self.features):
                x = getattr(call, name).detach()
                features[name] = x.clone() if self.device is None else x.to(self.device, copy=True)
            entries = place.setdefault((call.site.denoiser, call.site.name), [])
            tokens = {"query": call.query_tokens, "key": call.key_tokens, "value": call.key_tokens}
            entries[:] = [entry for entry in entries if entry.rows != call.table] + [
                _Kept(call.table, tokens, features)
            ]
        return attend(call)

    def _place(self, step: Step) -> Place | None:
        """Where the features of this step go; None where they are not kept."""
        self.total = step.total
        now = evaluation(step.index, step.total, self.solver, inverse=self.inverse)
        count = self.inject * intervals(step.total, self.solver) if isinstance(self.inject, float) else self.inject
        return self._kept.setdefault(now, {}) if now.interval < int(count) else None

    def read(self, step: Step, site: Site, rows: Rows, names: Sequence[str], *, text: bool = True) -> Features | None:
        """The features of `site` that this step of an edit is to use, for each of `rows`; None where nothing is kept:
        outside the injected intervals, and at FireFlow's order-1 evaluations.  `text=False`: image tokens only.

        A row takes what was kept of its branch, prompt and image; else of the cond row, of the only prompt, of the only
        image.  Raises MissingRows when there is none, ValueError when another number of iterations was recorded.
        """
        if self.total is None:
            raise ValueError("nothing is stored: attach the StoredFeatures to the run that inverts the image first")
        if step.total != self.total:
            raise ValueError(
                f"{self.total} iterations were stored and this run makes {step.total}: invert and edit with the same "
                "solver and number of steps"
            )
        missing = [name for name in names if name[0] not in self.features]
        if missing:
            raise ValueError(f"{missing[0]} is needed, but StoredFeatures(features={self.features!r}) keeps others")
        place = self._kept.get(evaluation(step.index, step.total, self.solver))
        if not place:
            return None
        if (site.denoiser, site.name) not in place:
            raise ValueError(f"nothing is stored of {site.name}: give StoredFeatures the sites of the edit, too")
        entries = place[site.denoiser, site.name]
        chosen = _choose(rows, entries)
        found = {}
        for name in names:
            parts = [
                entry.features[name] if text else entry.tokens[name].get(entry.features[name], "image")
                for entry in entries
            ]
            if chosen == [(0, row) for row in range(len(entries[0].rows))]:
                found[name] = parts[0]
            else:
                fold = entries[0].rows.fold
                found[name] = torch.cat([parts[entry][row * fold : (row + 1) * fold] for entry, row in chosen])
        return found


def _choose(rows: Rows, entries: Sequence[_Kept]) -> list[tuple[int, int]]:
    """For each of `rows`, which of the entries it reads, and which row of it."""
    at = {(b, p, i): (e, r) for e, kept in enumerate(entries) for r, (b, p, i, _) in enumerate(kept.rows.table())}
    prompts, images = {p for _, p, _ in at}, {i for _, _, i in at}
    chosen = []
    for branch, prompt, image, _ in rows.table():
        p = prompt if len(prompts) > 1 else min(prompts)
        i = image if len(images) > 1 else min(images)
        place = at.get((branch, p, i)) or at.get(("cond", p, i))
        if place is None:
            raise MissingRows(f"of prompt {prompt}, image {image} nothing is stored; stored are {sorted(at)}")
        chosen.append(place)
    return chosen


@dataclass(eq=False)
class FromSource:
    """What controls have in common that use features of a source: which, when, and of which rows.

    Where `stored` is None, the source is prompt 0 of the same call, with the row's branch, image and variant.  Probes
    pass: these controls change what attention reads, not the map that an observer asks for.
    """

    stored: StoredFeatures | None = None
    steps: Window | None = None
    text: bool = True
    sites: str | Callable[[Sequence[Site]], list[Site]] = value_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    _run: Any = field(default=None, init=False, repr=False)
    _on: bool = field(default=True, init=False, repr=False)
    _rows: Rows | None = field(default=None, init=False, repr=False)
    _now: dict[tuple[str, str], Features | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.steps is None:
            self.steps = (0.0, 0.2) if self.stored is None else (0.0, 1.0)
        check_window("steps", self.steps)
        self._lockstep = Sharing(lambda rows, device: pairs(rows, device, 0), self.steps)

    def names(self) -> list[str]:
        """The features used, of query, key, value."""
        raise NotImplementedError

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        """Who reads whom, and what is stored, is told outside any compiled graph."""
        if self.stored is None:
            self._lockstep.begin(call)
            return
        self._on, self._rows, self._now = in_window(call.step, self._lockstep.steps), call.rows, {}
        if self._on:
            for site in self._run.sites_of(self):
                if site.denoiser == call.denoiser:
                    self._now[site.denoiser, site.name] = self._read(call.step, site, call.rows, call.latents.device)

    def source(self, call: AttentionCall) -> Features | None:
        """The source's features for every batch entry of this call; None where they are not to be used."""
        found = None
        if not call.probe:
            found = self._of_row(call) if self.stored is None else self._of_store(call)
        return None if found is None else {name: self._whole(call, name, x) for name, x in found.items()}

    def _of_row(self, call: AttentionCall) -> Features | None:
        plan = self._lockstep(call)
        if plan is None:
            return None
        found = {name: getattr(call, name)[plan.reference] for name in self.names()}
        if call.kind == "joint" and not self.text:
            found = {name: _tokens(call, name).get(x, "image") for name, x in found.items()}
        return found

    def _of_store(self, call: AttentionCall) -> Features | None:
        begun = self._rows is not None
        if not (self._on if begun else in_window(call.step, self._lockstep.steps)):
            return None
        table = call.table
        if begun and self._rows == (table if table.fold == 1 else replace(table, fold=1)):
            return self._now[call.site.denoiser, call.site.name]
        return self._read(call.step, call.site, table, call.query.device)  # a part of the rows, or a call made by hand

    def _read(self, step: Step, site: Site, rows: Rows, device: torch.device) -> Features | None:
        assert self.stored is not None
        found = self.stored.read(step, site, rows, self.names(), text=self.text or site.kind != "joint")
        return None if found is None else {name: x.to(device) for name, x in found.items()}

    def _whole(self, call: AttentionCall, name: str, x: Tensor) -> Tensor:
        """The source's feature, with the row's own text tokens where text is not shared.  Raises ValueError where the
        source has other tokens, or rows have text lengths of their own."""
        own: Tensor = getattr(call, name)
        if call.kind == "joint" and self.text and call.mask is not None:
            raise ValueError(f"the texts at {call.site.name} are masked to their own lengths: share images, text=False")
        images = call.kind == "joint" and not self.text
        wanted = _tokens(call, name).get(own, "image").shape if images else own.shape
        if x.shape != wanted:
            raise ValueError(
                f"the source's {name} at {call.site.name} has shape {tuple(x.shape)}, here it is {tuple(wanted)}: "
                "images must have one size, and texts one length unless only images are shared, text=False"
            )
        x = x.to(own.dtype)
        return _tokens(call, name).put(own, "image", x) if images else x


def _tokens(call: AttentionCall, name: str) -> Tokens:
    return call.query_tokens if name == "query" else call.key_tokens
