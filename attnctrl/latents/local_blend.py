"""Local blend of prompt-to-prompt (arXiv:2208.01626; the null-text version of the authors' code).

After every scheduler step, a target's latents keep the source's outside the words that were edited:
    W_r  = sum over steps so far, coarse cross-attention layers, heads and word tokens of the edited map of row r
    M_r  = resize(maxpool3(W_r)) / max > threshold           (N_r, subtracted words: no max-pool, their own threshold)
    x_t <- x_t where (M_s or M_t) and not (N_s or N_t), else x_s
The maps are never formed: W is the attention op applied to 0/1 columns, summed in float32, seen from outside the edit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..alignment import indicator
from ..call import Attend, AttentionCall, DenoiseCall, Rows, Site, StepCall, StepFunction, Tokens, batch_index
from ..families import site_tokens
from ..prompts import Prompts, check_call, check_count, encode_in, flatten, source_images
from ..tokens import Word

__all__ = ["LocalBlend", "quarter_sites"]

Words = Sequence[Word | Sequence[Word]]
Grid = tuple[int, ...]


def quarter_sites(sites: Sequence[Site]) -> list[Site]:
    """Cross or joint sites at a quarter of the latent's side (16x16 of 64x64 in the authors' code); where a model has
    none, those of its finest resolution (coarser ones of small models do not tell where a word is)."""
    found = [site for site in sites if site.kind in ("cross", "joint")]
    scales = {site.scale for site in found}
    scale = 4 if 4 in scales else min(scales, default=1)
    return [site for site in found if site.scale == scale]


@dataclass(frozen=True)
class _Probe:
    """How the conditional rows of a call are looked at, and what was seen so far."""

    rows: Rows
    index: Int[Tensor, "b"]  # their batch entries
    columns: Float[Tensor, "b 1 m c"]  # 1 on the keys of the words, and of the subtracted ones
    total: Float[Tensor, "rows n c"]


@dataclass(eq=False)
class LocalBlend:
    """Keep the source image outside the edited words.  Give it before the edit: it reads the edited maps.

    prompts    [source, target, ...] as given to the pipeline, or a list of such edits; an edit may be its source alone
    words      for each prompt, the word or words whose region may change ([] for none)
    subtract   for each prompt, the word or words whose region may not
    threshold  of the normalised maps, for words and subtracted words; below 0 the region is everything
    start      from which fraction of the run on latents are blended (maps are gathered from the first step)
    sites      a selector or a function choosing sites; all must have one resolution
    masks      after a run: (images, height, width) or (images, frames, height, width), True where an image could
               differ from its source; None before the first blend

    Raises ValueError when a prompt does not have its word.
    """

    prompts: Prompts
    words: Words
    subtract: Words | None = None
    threshold: float | tuple[float, float] = 0.3
    start: float = 0.2
    sites: str | Callable[[Sequence[Site]], list[Site]] = quarter_sites

    stage = "observe"
    kinds = frozenset({"cross", "joint"})
    needs = frozenset({"all_rows", "segments"})

    masks: Bool[Tensor, "images ..."] | None = field(default=None, init=False, repr=False)
    _run: Any = field(default=None, init=False, repr=False)
    _probes: dict[Any, _Probe | None] = field(default_factory=dict, init=False, repr=False)
    _now: tuple[Rows | None, _Probe | None] = field(default=(None, None), init=False, repr=False)
    _grid: Grid | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._flat, self._source_of = flatten(self.prompts, alone=True)
        for name, given in (("words", self.words), ("subtract", self.subtract)):
            if given is not None and (isinstance(given, str) or len(given) != len(self._flat)):
                raise ValueError(f"{name} needs one entry per prompt, {len(self._flat)}, got {given!r}")
        if not 0 <= self.start <= 1:
            raise ValueError(f"start is a fraction of the run in [0, 1], not {self.start!r}")

    # ------------------------------------------------------------------------------------------------------- gathering

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        out = attend(call)
        if call.probe or call.kind not in self.kinds:
            return out
        rows, probe = self._now
        if rows is None or rows != call.rows:  # a part of the rows, folded rows, or a call made by hand
            m, like = call.key.shape[2], call.query
            probe = self._probe(call.table, call.kind, call.query_tokens, call.key_tokens, m, like)
        if probe is None:
            return out
        value = probe.columns.to(call.value.dtype).expand(-1, call.query.shape[1], -1, -1)
        seen = call.borrow(probe.index).replace(value=value, rows=probe.rows, probe=True)
        if call.kind == "joint":
            seen = seen.queries("image")
        weights = attend(seen).detach().to(probe.total.dtype).mean(1)  # (b, n, c)
        probe.total.add_(weights.reshape(probe.total.shape))
        return out

    def begin_run(self, run: Any) -> None:
        self._run = run
        self._probes.clear()
        self._now, self._grid, self.masks = (None, None), None, None
        check_call("LocalBlend", self._flat, run.prompts)

    def begin(self, call: DenoiseCall) -> None:
        """Words are found, and room is made for the maps, outside any compiled graph."""
        check_count("LocalBlend", len(self._flat), call.rows.prompt)
        family, geometry = self._run.family(call.denoiser), self._run.geometry(call.denoiser)
        probe = None
        for site in self._run.sites_of(self):
            if site.denoiser == call.denoiser:
                queries, keys = site_tokens(site, family, geometry)
                probe = self._probe(call.rows, site.kind, queries, keys, keys.length, call.latents)
        self._now = call.rows, probe

    def _probe(self, table: Rows, kind: str, queries: Tokens, keys: Tokens, m: int, like: Tensor) -> _Probe | None:
        grid = queries["image"].grid if "image" in queries else None
        if self._grid is not None and grid != self._grid:
            raise ValueError(
                f"LocalBlend gathers maps of one resolution, but its sites have {self._grid} and {grid}; "
                "choose with sites=..."
            )
        start, length = (keys["text"].start, keys["text"].length) if kind == "joint" else (0, m)
        key = (table, start, length, m, grid, like.device, like.dtype)
        if key not in self._probes:
            self._probes[key] = self._make_probe(table, start, length, m, grid, like)
        return self._probes[key]

    def _make_probe(
        self, table: Rows, start: int, length: int, m: int, grid: Grid | None, like: Tensor
    ) -> _Probe | None:
        cond = [i for i, (branch, _, _, variant) in enumerate(table.table()) if branch == "cond" and variant == ""]
        if not cond:
            return None
        if grid is None:
            raise ValueError("LocalBlend needs the image's grid in query_tokens")
        self._grid = grid
        rows = table.take(cond)
        columns = torch.zeros(len(rows), m, 1 if self.subtract is None else 2)
        for i, prompt in enumerate(rows.prompt):
            encoded = encode_in(self._run, self._flat[prompt], length)
            for c, given in enumerate((self.words, self.subtract)):
                if given is not None:
                    columns[i, start : start + length, c] = indicator(encoded, given[prompt]).float()
        return _Probe(
            rows=rows,
            index=batch_index(tuple(cond), rows.fold, like.device),
            columns=columns.repeat_interleave(rows.fold, 0)[:, None].to(like.device),
            total=like.new_zeros(
                len(rows), math.prod(grid), columns.shape[-1], dtype=torch.promote_types(like.dtype, torch.float32)
            ),
        )

    # -------------------------------------------------------------------------------------------------------- blending

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        latents = step(call)
        if call.step.index < int(self.start * call.step.total):
            return latents
        entries = list(zip(call.rows.prompt, call.rows.image, strict=True))
        index = source_images(call.rows.prompt, call.rows.image, self._source_of)
        sources = torch.tensor(index, device=latents.device)
        own = self._own_masks(entries, call)  # (images, c, *grid of the latents)
        either = own | own[sources]
        change = either[:, 0] if self.subtract is None else either[:, 0] & ~either[:, 1]
        self.masks = change
        where = change.flatten(1)[..., None] if call.packed else change[:, None]
        return torch.where(where, latents, latents[sources])

    def _own_masks(self, entries: Sequence[tuple[int, int]], call: StepCall) -> Bool[Tensor, "images c ..."]:
        sums = self._sums()
        if not any(seen.any() for seen in sums.values()):
            raise RuntimeError("LocalBlend saw no attention: its sites did not run")
        grid, size = self._grid, call.grid
        assert grid is not None and size is not None  # attention has run
        maps = torch.stack([sums[entry] for entry in entries]).movedim(-1, 1)  # (images, c, n)
        flat = maps.reshape(*maps.shape[:2], -1, *grid[-2:])  # (images, c, frames, height, width)
        pooled = F.max_pool3d(flat[:, :1], (1, 3, 3), stride=1, padding=(0, 1, 1))
        maps = torch.cat((pooled, flat[:, 1:]), dim=1).unflatten(2, grid[:-2] or (1,))
        maps = F.interpolate(maps if len(grid) == 3 else maps[:, :, 0], size=size, mode="nearest")
        peak = maps.flatten(2).amax(-1)
        limits = self.threshold if isinstance(self.threshold, tuple) else (self.threshold, self.threshold)
        limit = torch.tensor(limits[: maps.shape[1]], device=maps.device, dtype=maps.dtype)
        peak, limit = (x.reshape(*x.shape, *(1 for _ in size)) for x in (peak, limit))
        return (maps / peak > limit) | (limit < 0)  # without words 0 / 0, which is above no threshold

    def _sums(self) -> dict[tuple[int, int], Float[Tensor, "n c"]]:
        """What was seen of each (prompt, image), over all ways its rows came."""
        sums: dict[tuple[int, int], Tensor] = {}
        for probe in self._probes.values():
            if probe is not None:
                for entry, seen in zip(zip(probe.rows.prompt, probe.rows.image, strict=True), probe.total, strict=True):
                    sums[entry] = sums[entry] + seen if entry in sums else seen
        return sums
