"""ConsiStory's subject-driven self-attention (arXiv:2402.03286): images see the subject's tokens of anchor images.

For row i with anchors j, same branch and image number, and kept tokens R_j, the subject's tokens of j but for a random
half, drawn anew in each step:
    out_i = att(q_i, [k_i; k_j[R_j] for j != i], [v_i; v_j[R_j] for j != i])
The subject is where the maps of its words, at a quarter of the latent's side (mean over heads, sites and the last 20
steps), exceed Otsu's threshold for the image.  The maps are read by a probe (the op on 0/1 columns), never formed, and
masks are those of the steps before, so the first step is plain.  Keys are gathered; rows with fewer are padded by
masked ones.
    q_i <- s q_i' + (1 - s) q_i,  s from 0.9 down to 0.818 over the first tenth of the run
keeps layouts apart; q' is the query of a pass that shares nothing, which these steps run in addition (one more call of
the denoiser each).

Not here: the second run of the authors, which copies features between matching tokens of the images (DIFT).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..alignment import indicator
from ..call import (
    Attend,
    AttentionCall,
    Denoise,
    DenoiseCall,
    Prediction,
    Rows,
    Site,
    Window,
    batch_index,
    in_window,
)
from ..families import site_tokens
from ..latents.local_blend import quarter_sites
from ..prompts import check_call, check_count, encode_in
from ..sharing import Sharing, append_keys, check_window, image_of, keys_of
from ..tokens import Encoded, Word
from .random_sharing import Group, drawn, group_of, shared_tokens, story_sites

__all__ = ["SubjectSharing", "otsu"]

Grid = tuple[int, ...]
MEMORY = 20  # steps whose maps count


def otsu(values: Float[Tensor, "n"], bins: int = 256) -> float:
    """The threshold that parts values into two classes with the largest variance between them."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    counts = torch.histc(values.double(), bins, low, high)
    centres = low + (torch.arange(bins, dtype=torch.float64) + 0.5) * (high - low) / bins
    below, above = counts.cumsum(0), counts.sum() - counts.cumsum(0)
    mass = (counts * centres).cumsum(0)
    between = below * above * (mass / below.clamp(min=1) - (mass[-1] - mass) / above.clamp(min=1)) ** 2
    return float(centres[between.argmax()])


@dataclass(frozen=True)
class _Probe:
    """The conditional rows of a call, the columns of their words, and what was seen of them in this step."""

    rows: Rows
    index: Int[Tensor, "b"]
    columns: Float[Tensor, "b 1 m 1"]
    grid: Grid
    total: Float[Tensor, "b n"]


@dataclass(frozen=True)
class _Kept:
    """Tokens of each (prompt, image) that others see in this step, padded to one length."""

    index: Int[Tensor, "e k"]
    valid: Bool[Tensor, "e k"]


@dataclass(frozen=True)
class _Plan:
    """Who reads whom, and for each batch entry which (prompt, image) it is."""

    groups: tuple[Group, ...]
    entries: Int[Tensor, "b"]


def subject_sites(sites: Sequence[Site]) -> list[Site]:
    """Self-attention of the up blocks, which shares (second half of a transformer's), and the sites whose maps tell
    where the subject is (`latents.local_blend.quarter_sites`)."""
    chosen = {*story_sites(sites), *quarter_sites(sites)}
    return [site for site in sites if site in chosen]


@dataclass(eq=False)
class SubjectSharing:
    """The same subject in all images of one pipeline call.

    prompts  as given to the pipeline
    words    for each prompt, the word or words of the subject
    anchors  how many of the first prompts are read by others (the authors' 2)
    dropout  which part of an anchor's subject tokens is left out in each step (0.5)
    vanilla  when queries are mixed with those of a plain pass; (0, 0) spares that pass
    blend    s at the first and at the last of these steps
    seed     of the dropout
    steps    when: fractions of the run, or two step indices
    sites    a selector, or a function choosing the sites that share and those whose maps are read
    masks    after a step: for each (prompt, image) the subject's mask on the grid of the maps

    How many tokens are shared differs from step to step; a compiled denoiser makes further graphs for that.
    Raises ValueError when a prompt does not have its word; MissingRows when an anchor is not in the call.
    """

    prompts: Sequence[str | Encoded]
    words: Sequence[Word | Sequence[Word]]
    anchors: int = 2
    dropout: float = 0.5
    vanilla: Window = (0.0, 0.1)
    blend: tuple[float, float] = (0.9, 0.818)
    seed: int = 0
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] = subject_sites

    stage = "edit"
    kinds = frozenset({"self", "joint", "cross"})
    needs = frozenset({"all_rows", "segments"})

    masks: dict[tuple[int, int], Bool[Tensor, "..."]] = field(default_factory=dict, init=False, repr=False)
    _run: Any = field(default=None, init=False, repr=False)
    _seen: deque[dict[tuple[int, int], Tensor]] = field(init=False, repr=False)
    _grid: Grid = field(default=(), init=False, repr=False)
    _probes: dict[Any, _Probe | None] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[Grid, _Kept] = field(default_factory=dict, init=False, repr=False)
    _entries: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    _pass: Literal["only", "plain", "blended"] = field(default="only", init=False, repr=False)
    _queries: dict[tuple[str, str], tuple[Rows, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _strength: float = field(default=0.0, init=False, repr=False)
    _index: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.words, str) or len(self.words) != len(self.prompts):
            raise ValueError(f"words needs one entry per prompt, {len(self.prompts)}, got {self.words!r}")
        if not 1 <= self.anchors <= len(self.prompts):
            raise ValueError(f"anchors is 1 to the number of prompts, {len(self.prompts)}, not {self.anchors!r}")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout is a part of the tokens, 0 to 1, not {self.dropout!r}")
        check_window("steps", self.steps)
        check_window("vanilla", self.vanilla)
        self._share: Sharing[_Plan] = Sharing(self._plan, self.steps)
        self._seen = deque(maxlen=MEMORY)

    # ------------------------------------------------------------------------------------------------------- attention

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        if call.kind in ("cross", "joint") and not call.probe and self._pass != "plain":
            self._look(call, attend)
        if call.kind == "cross" or self._pass == "plain":
            if call.kind != "cross" and not call.probe:
                self._queries[call.site.denoiser, call.site.name] = call.rows or call.table, call.query
            return attend(call)
        plan, kept = self._share(call), self._kept.get(call.grid or ())
        if plan is None or kept is None or kept.index.shape[1] == 0:
            return attend(call)
        rows, before = self._queries.get((call.site.denoiser, call.site.name), (None, None))
        if self._pass == "blended" and rows == call.table and before is not None and not call.probe:
            call = call.replace(query=torch.lerp(call.query, before, self._strength))
        return self._shared(call, attend, plan, kept)

    def _shared(self, call: AttentionCall, attend: Attend, plan: _Plan, kept: _Kept) -> Tensor:
        own = keys_of(call, image_of(call))
        index, valid = kept.index[plan.entries], kept.valid[plan.entries]
        out = attend(call) if sum(len(group.readers.rows) for group in plan.groups) < len(call.table) else None
        for group in plan.groups:
            key, value = (shared_tokens(x, index, group.others) for x in (own.key, own.value))
            closed = ~valid[group.others].flatten(1)[:, None, None]  # (t, 1, 1, s)
            mask = F.pad(closed, (call.key.shape[2], 0), value=False)
            done = attend(append_keys(group.readers.of(call), key, value).forbid(mask))
            out = done.new_empty(call.query.shape[0], *done.shape[1:]) if out is None else out
            out = out.index_copy(0, group.readers.index, done)
        assert out is not None
        return out

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if not (self._kept and in_window(call.step, self.vanilla) and in_window(call.step, self.steps)):
            return denoise(call)
        try:
            self._pass, self._queries = "plain", {}
            denoise(call)
            self._pass = "blended"
            return denoise(call)
        finally:
            self._pass, self._queries = "only", {}

    # ----------------------------------------------------------------------------------------------------------- masks

    def begin_run(self, run: Any) -> None:
        self._run = run
        check_call("SubjectSharing", list(self.prompts), run.prompts)
        self._seen.clear()
        self._probes.clear()
        self._kept, self.masks, self._index, self._grid = {}, {}, -1, ()

    def begin(self, call: DenoiseCall) -> None:
        """Masks are made of what was seen, and tokens drawn, once per step and outside any compiled graph."""
        check_count("SubjectSharing", len(self.prompts), call.rows.prompt)
        self._entries = sorted(set(zip(call.rows.prompt, call.rows.image, strict=True)))
        self._share.begin(call)
        self._strength = self._strength_at(call)
        if call.step.index != self._index:
            self._index = call.step.index
            self._keep(call)

    def _strength_at(self, call: DenoiseCall) -> float:
        steps = [i for i in range(call.step.total) if in_window(replace(call.step, index=i), self.vanilla)]
        done = steps.index(call.step.index) / max(len(steps) - 1, 1) if call.step.index in steps else 0.0
        return self.blend[0] + (self.blend[1] - self.blend[0]) * done

    def _keep(self, call: DenoiseCall) -> None:
        step: dict[tuple[int, int], Tensor] = {}
        for probe in self._probes.values():
            if probe is not None:
                maps = probe.total.unflatten(0, (len(probe.rows), -1)).sum(1).cpu()  # frames of a row see one subject
                for entry, seen in zip(zip(probe.rows.prompt, probe.rows.image, strict=True), maps, strict=True):
                    step[entry] = step[entry] + seen if entry in step else seen
        self._probes.clear()
        if any(seen.any() for seen in step.values()):
            self._seen.append(step)
        if not self._seen:
            return
        family, geometry = self._run.family(call.denoiser), self._run.geometry(call.denoiser)
        maps = [torch.stack([seen[entry] for seen in self._seen if entry in seen]).mean(0) for entry in self._entries]
        limits = [otsu(seen) for seen in maps]
        self.masks = {
            entry: (seen > limit).reshape(self._grid)
            for entry, seen, limit in zip(self._entries, maps, limits, strict=True)
        }
        self._kept = {}
        for site in story_sites(self._run.sites_of(self)):
            grid = site_tokens(site, family, geometry)[0]["image"].grid
            if grid is not None and grid not in self._kept:
                resized = F.interpolate(
                    torch.stack(maps)[:, None].unflatten(2, self._grid),
                    grid,
                    mode=("bilinear", "trilinear")[len(grid) - 2],
                )
                subject = resized.flatten(1) > torch.tensor(limits)[:, None]
                chance = torch.rand(subject.shape, generator=drawn(self.seed, call.step, site))
                self._kept[grid] = _padded(subject & (chance >= self.dropout), call.latents.device)

    def _look(self, call: AttentionCall, attend: Attend) -> None:
        """Add the maps of the words at this site to what was seen in this step."""
        if call.grid is None:
            raise ValueError(f"the maps of {call.site.name or 'this call'} have no grid in query_tokens")
        if self._grid and call.grid != self._grid:
            raise ValueError(
                f"SubjectSharing reads maps of one resolution, but its sites have {self._grid} and {call.grid}; choose "
                "with sites=..."
            )
        key = (call.table, call.kind, call.grid, call.key.shape[2], call.query.device)
        if key not in self._probes:
            self._probes[key] = self._probe(call)
        probe = self._probes[key]
        if probe is None:
            return
        value = probe.columns.to(call.value.dtype).expand(-1, call.query.shape[1], -1, -1)
        seen = call.borrow(probe.index).replace(value=value, rows=probe.rows, probe=True)
        if call.kind == "joint":
            seen = seen.queries("image")
        probe.total.add_(attend(seen).detach().float().mean(1)[..., 0])

    def _probe(self, call: AttentionCall) -> _Probe | None:
        table, m = call.table, call.key.shape[2]
        start, length = (
            (call.key_tokens["text"].start, call.key_tokens["text"].length) if call.kind == "joint" else (0, m)
        )
        cond = [i for i, (branch, _, _, variant) in enumerate(table.table()) if branch == "cond" and variant == ""]
        if not cond or call.grid is None:
            return None
        self._grid = call.grid
        rows, device = table.take(cond), call.query.device
        columns = torch.zeros(len(rows), m, 1)
        for i, prompt in enumerate(rows.prompt):
            encoded = encode_in(self._run, self.prompts[prompt], length)
            columns[i, start : start + length, 0] = indicator(encoded, self.words[prompt]).float()
        total = torch.zeros(len(rows) * rows.fold, math.prod(call.grid), device=device)
        index = batch_index(tuple(cond), rows.fold, device)
        return _Probe(rows, index, columns.repeat_interleave(rows.fold, 0)[:, None].to(device), call.grid, total)

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        groups = group_of(rows, device, self.anchors)
        if groups is None:
            return None
        known = self._entries or sorted(set(zip(rows.prompt, rows.image, strict=True)))
        at = {entry: i for i, entry in enumerate(known)}
        entries = [at[entry] for entry in zip(rows.prompt, rows.image, strict=True) for _ in range(rows.fold)]
        return _Plan(groups, torch.tensor(entries, device=device))


def _padded(keep: Bool[Tensor, "e n"], device: torch.device) -> _Kept:
    """The tokens of each entry that are kept, in one length."""
    counts = keep.sum(1)
    index = keep.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    valid = torch.arange(index.shape[1]) < counts[:, None]
    return _Kept(index.to(device), valid.to(device))
