"""MasaCtrl (arXiv:2304.08465): targets read the source image's keys and values in late self-attention.

For a target row t with source s of the same branch:
    mutual  out_t = att(q_t, k_s, v_s)                                       one fused call for all rows
    union   out_t = att(q_t, [k_s; k_t], [v_s; v_t])                         two: targets, and the rest
    masks   out_t = m_t att(q_t, k_s, v_s | keys in m_s) + (1 - m_t) att(q_t, k_s, v_s | keys outside m_s)      three
The source row stays plain.  Where m_s leaves no key, all of the source's are read (the authors' code averages them).
In joint attention the source's image tokens are read; text queries see all of them.

Masks found by words are the authors' too: cross-attention maps at a quarter of the latent's side, of this step so far,
mean over heads and layers, summed over the words' tokens, min-max normalised per row, at least `threshold`; those of
the conditional rows serve all branches.  They are read by a probe (the op on 0/1 columns), never formed; models without
cross-attention have none.

Defaults: the authors' for Stable Diffusion: from step 4 of 50 on, layers from 10 on, which are up_blocks.2 and
up_blocks.3.  For SDXL they tried layers from 44, 54 or 64 on without choosing; up_blocks.1 here, which is 64.
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
from ..call import Attend, AttentionCall, DenoiseCall, Rows, Site, Window, batch_index
from ..families import site_tokens
from ..latents.local_blend import quarter_sites
from ..prompts import check_call, check_count, encode_in
from ..sharing import (
    Pairs,
    Sharing,
    check_window,
    from_rows,
    gather_rows,
    image_of,
    join_keys,
    keys_of,
    late_sites,
    pairs,
)
from ..tokens import Encoded, Word

__all__ = ["MutualSelfAttention", "WordMasks"]

Mask = Float[Tensor, "height width"] | Bool[Tensor, "height width"]


@dataclass(frozen=True)
class WordMasks:
    """Where the words of each prompt are, by the cross-attention of the step.

    prompts    as given to the pipeline
    words      for each prompt, the word or words of the object
    threshold  of the normalised maps (the authors' 0.1)
    """

    prompts: Sequence[str | Encoded]
    words: Sequence[Word | Sequence[Word]]
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.words, str) or len(self.words) != len(self.prompts):
            raise ValueError(f"words needs one entry per prompt, {len(self.prompts)}, got {self.words!r}")


@dataclass(frozen=True)
class _Probe:
    """The conditional rows of a call, the columns of their words, and what was seen of them in this step."""

    rows: Rows
    index: Int[Tensor, "b"]
    columns: Float[Tensor, "b 1 m 1"]
    grid: tuple[int, ...]
    total: Float[Tensor, "rows n"]


@dataclass(eq=False)
class MutualSelfAttention:
    """Move or pose the source's object as a target's prompt says, with the source's look.

    source  the prompt of the source image
    union   targets read their own keys, too
    masks   (source, target), of any size, 1 on the object; or WordMasks, to find them; None: no masks
    steps   when: fractions of the run, or two step indices
    sites   a selector, or a function choosing sites

    Raises MissingRows when source and target are not in one call of the denoiser; ValueError when a prompt does not
    have its word, or both union and masks are given.
    """

    source: int = 0
    union: bool = False
    masks: tuple[Mask, Mask] | WordMasks | None = None
    steps: Window = (0.08, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] | None = None

    stage = "edit"
    needs = frozenset({"all_rows"})

    _run: Any = field(default=None, init=False, repr=False)
    _probes: dict[Any, _Probe] = field(default_factory=dict, init=False, repr=False)
    _now: tuple[Rows | None, _Probe | None] = field(default=(None, None), init=False, repr=False)
    _first: float = field(default=math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        if self.union and self.masks is not None:
            raise ValueError("union reads the target's own keys, masks divide the source's; give one of them")
        finds = isinstance(self.masks, WordMasks)
        if isinstance(self.masks, Sequence) and [getattr(mask, "ndim", None) for mask in self.masks] != [2, 2]:
            raise ValueError("masks are (source, target), two tensors of shape (height, width), or WordMasks")
        self.kinds = frozenset({"self", "cross"} if finds else {"self", "joint"})
        if self.sites is None:
            self.sites = _with_maps if finds else late_sites
        self._share: Sharing[Pairs] = Sharing(lambda rows, device: pairs(rows, device, self.source), self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        if call.kind == "cross":
            return self._look(call, attend)
        segment = image_of(call)
        shared = from_rows(call, plan.reference, segment)
        targets, others = plan.targets, plan.others
        if self.union:
            both = join_keys(call, keys_of(shared, segment))
            return gather_rows((targets, attend(targets.of(both))), (others, attend(others.of(call))))
        masks = self._masks(call, plan)
        if masks is None:
            return attend(shared)
        out = self._divided(targets.of(shared), attend, segment, *masks)
        return gather_rows((targets, out), (others, attend(others.of(call))))

    def _divided(
        self,
        call: AttentionCall,
        attend: Attend,
        segment: str | None,
        inside: Bool[Tensor, "t n"],
        weight: Float[Tensor, "t n"],
    ) -> Float[Tensor, "t h n c"]:
        """Attention of the targets to the inside and the outside of the source's mask, put together by their own."""
        images = call if segment is None else call.queries(segment)
        outs = []
        for region in (inside, ~inside):
            closed = region.any(-1, keepdim=True) & ~region  # where a region is empty, nothing is closed
            if segment is not None:
                closed = _widen(closed, call, segment)
            outs.append(attend(images.forbid(closed[:, None, None])))
        own = weight.to(call.query.dtype)[:, None, :, None]
        mixed = outs[0] * own + outs[1] * (1 - own)
        return mixed if segment is None else call.query_tokens.put(attend(call), segment, mixed)

    def _masks(self, call: AttentionCall, plan: Pairs) -> tuple[Bool[Tensor, "t n"], Float[Tensor, "t n"]] | None:
        """For each target: which image keys of its source are inside, and the weight of each of its queries; None where
        nothing is known yet."""
        if self.masks is None:
            return None
        table, fold = plan.targets.rows, plan.targets.rows.fold
        count = len(table)
        if isinstance(self.masks, WordMasks):
            probe = self._now[1]
            if probe is None or call.site.index < self._first:
                return None
            at = {entry: i for i, entry in enumerate(zip(probe.rows.prompt, probe.rows.image, strict=True))}
            low, high = probe.total.amin(-1, keepdim=True), probe.total.amax(-1, keepdim=True)
            tiny = torch.finfo(probe.total.dtype).tiny
            found = ((probe.total - low) / (high - low).clamp_min(tiny) >= self.masks.threshold).to(call.query.dtype)
            sources = [at[self.source, image] for image in table.image]
            targets = [at[entry] for entry in zip(table.prompt, table.image, strict=True)]
            maps = tuple(found[rows].reshape(count, -1, *probe.grid[-2:]) for rows in (sources, targets))
        else:
            given = (mask.to(device=call.query.device, dtype=call.query.dtype) for mask in self.masks)
            maps = tuple(mask.expand(count, 1, *mask.shape) for mask in given)
        if call.grid is None:
            raise ValueError("masks are laid on the image's grid, and query_tokens of this call has none")
        source, target = (_resized(mask, call.grid).repeat_interleave(fold, 0) for mask in maps)
        return source > 0.5, target

    # ----------------------------------------------------------------------------------------------- masks from words

    def _look(self, call: AttentionCall, attend: Attend) -> Tensor:
        rows, probe = self._now
        if not call.probe and probe is not None and rows == call.rows:
            value = probe.columns.to(call.value.dtype).expand(-1, call.query.shape[1], -1, -1)
            seen = attend(call.borrow(probe.index).replace(value=value, rows=probe.rows, probe=True))
            probe.total.add_(seen.detach().to(probe.total.dtype).mean(1).reshape(probe.total.shape))
        return attend(call)

    def begin_run(self, run: Any) -> None:
        self._run = run
        self._probes.clear()
        self._now = (None, None)
        if isinstance(self.masks, WordMasks):
            check_call("WordMasks", list(self.masks.prompts), run.prompts)
            self._first = min((site.index for site in run.sites_of(self) if site.kind == "cross"), default=math.inf)

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)
        cond = call.rows.where(branch="cond", variant="").tolist()
        if isinstance(self.masks, WordMasks) and cond:
            check_count("WordMasks", len(self.masks.prompts), call.rows.prompt)
            if call.rows not in self._probes:
                self._probes[call.rows] = self._probe(call, cond, self.masks)
            self._now = call.rows, self._probes[call.rows]
            self._probes[call.rows].total.zero_()

    def _probe(self, call: DenoiseCall, cond: list[int], masks: WordMasks) -> _Probe:
        family, geometry = self._run.family(call.denoiser), self._run.geometry(call.denoiser)
        site = next(site for site in self._run.sites_of(self) if site.kind == "cross")
        grid = site_tokens(site, family, geometry)[0]["image"].grid
        assert grid is not None and geometry.text is not None  # of cross-attention
        rows, like = call.rows.take(cond), call.latents
        words = {p: indicator(encode_in(self._run, masks.prompts[p], geometry.text), masks.words[p])
                 for p in set(rows.prompt)}  # fmt: skip
        exact = torch.promote_types(like.dtype, torch.float32)
        columns = torch.stack([words[p] for p in rows.prompt]).to(device=like.device, dtype=exact)
        total = like.new_zeros(len(rows), math.prod(grid), dtype=exact)
        return _Probe(rows, batch_index(tuple(cond), 1, like.device), columns[:, None, :, None], grid, total)


def _with_maps(sites: Sequence[Site]) -> list[Site]:
    """Where keys are read, and the cross-attention that finds words."""
    return [*late_sites(sites), *(site for site in quarter_sites(sites) if site.kind == "cross")]


def _resized(masks: Float[Tensor, "t frames height width"], grid: tuple[int, ...]) -> Float[Tensor, "t n"]:
    """Masks on another grid, by its nearest pixels; one of a picture is that of all frames."""
    masks = F.interpolate(masks, size=grid[-2:], mode="nearest")
    return masks.expand(-1, math.prod(grid[:-2]), -1, -1).flatten(1)


def _widen(closed: Bool[Tensor, "t n"], call: AttentionCall, segment: str) -> Bool[Tensor, "t m"]:
    """Closed image keys among all keys, of which the others are open."""
    keys = call.key_tokens[segment]
    return F.pad(closed, (keys.start, call.key.shape[2] - keys.start - keys.length))
