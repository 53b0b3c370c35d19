"""Local blend of prompt-to-prompt (arXiv:2208.01626; the null-text version of the authors' code).

After every scheduler step, a target's latents keep the source's outside the words that were edited:
    W_r  = sum over steps so far, coarse cross-attention layers, heads and word tokens of the edited map of row r
    M_r  = resize(maxpool3(W_r)) / max > threshold             (subtracted words: no max-pool, their own threshold)
    x_t <- x_s + (M_s or M_t) and not (N_s or N_t) * (x_t - x_s)
The maps are never formed: W is the attention op applied to 0/1 columns, in float32, seen from outside the edit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..alignment import indicator
from ..call import Attend, AttentionCall, Site, StepCall, StepFunction
from ..prompts import Prompts, encode_for, flatten
from ..tokens import Encoded, Word

__all__ = ["LocalBlend", "quarter_sites"]

Words = Sequence[Word | Sequence[Word]]


def quarter_sites(sites: Sequence[Site]) -> list[Site]:
    """Cross or joint sites at a quarter of the latent's side (16x16 of 64x64 in the authors' code), or the nearest finer resolution there is."""
    found = [site for site in sites if site.kind in ("cross", "joint")]
    finer = [site.scale for site in found if site.scale <= 4]
    scale = max(finer) if finer else min((site.scale for site in found), default=1)
    return [site for site in found if site.scale == scale]


@dataclass(eq=False)
class LocalBlend:
    """Keep the source image outside the edited words.  Give it before the edit: it reads the edited maps.

    prompts    [source, target, ...] as given to the pipeline, or a list of such edits
    words      for each prompt, the word or words whose region may change
    subtract   for each prompt, the word or words whose region may not
    threshold  of the normalised maps, for words and subtracted words; below 0 the region is everything
    start      from which fraction of the run on latents are blended (maps are gathered from the first step)
    sites      a selector or a function choosing sites; all must have one resolution
    masks      after a run: (images, height, width) or (images, frames, height, width), True where an image could differ from its source

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
    _maps: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)
    _columns: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)
    _grid: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._flat, self._source_of = flatten(self.prompts)
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
        table = call.table
        cond = [i for i, (branch, _, _, variant) in enumerate(table.table()) if branch == "cond" and variant == ""]
        if not cond:
            return out
        probe = call.take(cond)
        if call.kind == "joint":
            probe = probe.queries("image")
        columns = self._probe_columns(probe)  # (b, 1, m, c)
        value = columns.expand(-1, call.query.shape[1], -1, -1)
        seen = attend(probe.replace(value=value, probe=True)).float().mean(1)  # (b, n, c)
        self._see(seen, probe)
        return out

    def _see(self, seen: Float[Tensor, "b n c"], call: AttentionCall) -> None:
        grid = call.grid
        if self._grid is not None and grid != self._grid:
            raise ValueError(f"LocalBlend gathers maps of one resolution, but its sites have {self._grid} and {grid}; choose with sites=...")
        self._grid = grid
        table = call.table
        for i, (prompt, image) in enumerate(zip(table.prompt, table.image, strict=True)):
            part = seen[i * table.fold : (i + 1) * table.fold].flatten(0, 1)
            before = self._maps.get((prompt, image))
            self._maps[prompt, image] = part if before is None else before + part

    def _probe_columns(self, call: AttentionCall) -> Float[Tensor, "b 1 m c"]:
        table, m, value = call.table, call.key.shape[2], call.value
        start, length = (0, m) if call.kind == "cross" else (call.key_tokens["text"].start, call.key_tokens["text"].length)
        key = (table, m, start, length, value.device, value.dtype)
        if key not in self._columns:
            columns = torch.zeros(len(table), m, 1 if self.subtract is None else 2, dtype=value.dtype)
            for i, prompt in enumerate(table.prompt):
                encoded = self._encode(self._flat[prompt], length, call.site)
                for c, given in enumerate((self.words, self.subtract)):
                    if given is not None:
                        columns[i, start : start + length, c] = indicator(encoded, given[prompt]).to(value.dtype)
            self._columns[key] = columns.repeat_interleave(table.fold, 0)[:, None].to(value.device)
        return self._columns[key]

    def _encode(self, prompt: str | Encoded, length: int, site: Site) -> Encoded:
        if self._run is not None:
            return encode_for(self._run.pipeline, self._run.family(site.denoiser), prompt, length)
        if isinstance(prompt, Encoded):
            return prompt
        raise ValueError(f"without a pipeline, prompts must be encoded: attnctrl.tokens.encode(tokenizer, {prompt!r}, length)")

    # -------------------------------------------------------------------------------------------------------- blending

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        latents = step(call)
        if call.step.index < int(self.start * call.step.total):
            return latents
        entries = list(zip(call.rows.prompt, call.rows.image, strict=True))
        missing = [entry for entry in entries if entry not in self._maps]
        if missing:
            raise RuntimeError(f"LocalBlend saw no attention of (prompt, image) {missing}; its sites did not run")
        at = {entry: i for i, entry in enumerate(entries)}
        sources = torch.tensor([at[self._source_of[prompt], image] for prompt, image in entries], device=latents.device)
        own = self._own_masks(entries, call)  # (images, c, *grid of the latents)
        change = (own | own[sources])[:, 0]
        if own.shape[1] > 1:
            change = change & ~(own | own[sources])[:, 1]
        self.masks = change
        where = change.flatten(1)[..., None] if call.packed else change[:, None]
        return torch.where(where, latents, latents[sources])

    def _own_masks(self, entries: Sequence[tuple[int, int]], call: StepCall) -> Bool[Tensor, "images c ..."]:
        maps = torch.stack([self._maps[entry] for entry in entries])  # (images, n, c)
        grid = self._grid
        assert grid is not None and call.grid is not None  # attention has run
        maps = maps.movedim(-1, 1).unflatten(-1, grid)  # (images, c, *grid)
        frames = maps.movedim(2, 1).flatten(0, 1) if len(grid) == 3 else maps
        frames = torch.cat((F.max_pool2d(frames[:, :1], 3, stride=1, padding=1), frames[:, 1:]), dim=1)
        if len(grid) == 3:
            frames = frames.unflatten(0, (len(entries), grid[0])).movedim(1, 2)
        resized = F.interpolate(frames, size=call.grid, mode="nearest")
        peak = resized.flatten(2).amax(-1).reshape(*resized.shape[:2], *(1 for _ in call.grid))
        limits = self.threshold if isinstance(self.threshold, tuple) else (self.threshold, self.threshold)
        limit = torch.tensor(limits[: resized.shape[1]], device=resized.device, dtype=resized.dtype)
        return resized / peak > limit.reshape(1, -1, *(1 for _ in call.grid))

    def begin_run(self, run: Any) -> None:
        self._run = run
        self._maps.clear()
        self._columns.clear()
        self._grid, self.masks = None, None
        ours = [prompt.prompt if isinstance(prompt, Encoded) else prompt for prompt in self._flat]
        if run.prompts is not None and list(run.prompts) != ours:
            raise ValueError(f"the pipeline was called with the prompts {list(run.prompts)}, LocalBlend was made for {ours}")
