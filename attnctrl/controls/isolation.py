"""IR-Diffusion's isolation (arXiv:2411.19261): the subjects of an image do not see each other.

In an image with the subjects a = 1 ... s, whose regions do not overlap, a query of subject a sees no key of another:
    scores += -c sum_a 1[query in a] 1[key in a subject other than a]
which is an additive bias of rank s: one fused call, no map and no mask.  Background and text see and are seen by all.
c = 10,000 leaves a weight of 0 in every dtype.

The authors' code is not public: the up blocks, all steps and regions given by hand are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..call import Attend, AttentionCall, Bias, DenoiseCall, Rows, Site, Tokens, Window, in_window
from ..families import site_tokens
from ..sharing import check_window
from .random_sharing import story_sites

__all__ = ["Box", "Region", "SubjectIsolation", "cover"]

Box = tuple[float, float, float, float]
Region = Box | Tensor
"""(left, top, right, bottom) in fractions of the image, or a mask (height, width), True inside."""

CLOSED = -1e4


def cover(region: Region, grid: tuple[int, ...]) -> Bool[Tensor, "tokens"]:
    """The tokens of a grid (height, width), or (frames, height, width), whose middle lies in a region.

    Raises ValueError when there is none.
    """
    *frames, height, width = grid
    if isinstance(region, Tensor):
        if region.ndim != 2:
            raise ValueError(f"a region is a box or a mask (height, width), not a tensor of {tuple(region.shape)}")
        mask = F.interpolate(region[None, None].float().cpu(), size=(height, width), mode="nearest-exact")[0, 0] > 0.5
    else:
        left, top, right, bottom = region
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ValueError(f"a box is (left, top, right, bottom) in fractions of the image, not {region!r}")
        rows, columns = ((torch.arange(size) + 0.5) / size for size in (height, width))
        mask = ((top <= rows) & (rows < bottom))[:, None] & ((left <= columns) & (columns < right))
    if not mask.any():
        raise ValueError(f"no token of the {height} x {width} grid lies in the region {region!r}")
    return mask.expand(*frames, height, width).flatten()


@dataclass(eq=False)
class SubjectIsolation:
    """Keep the subjects of an image apart.

    subjects  for each prompt of the pipeline call, the regions of its subjects; fewer than two isolate nothing
    steps     when: fractions of the run, or two step indices
    sites     a selector, or a function choosing sites

    Raises ValueError when regions of one image overlap, or are smaller than a token.
    """

    subjects: Sequence[Sequence[Region]]
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] = story_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"segments"})

    _run: Any = field(default=None, init=False, repr=False)
    _rows: Rows | None = field(default=None, init=False, repr=False)
    _on: bool = field(default=True, init=False, repr=False)
    _now: dict[tuple[str, str], Bias | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_window("steps", self.steps)

    def begin_run(self, run: Any) -> None:
        self._run, self._rows = run, None

    def begin(self, call: DenoiseCall) -> None:
        """Biases are made outside any compiled graph, one per grid."""
        self._on = in_window(call.step, self.steps)
        if self._rows == call.rows or not self._on:
            return
        self._rows, self._now = call.rows, {}
        family, geometry = self._run.family(call.denoiser), self._run.geometry(call.denoiser)
        of_grid: dict[tuple[int, ...], Bias | None] = {}
        for site in self._run.sites_of(self):
            grid = site_tokens(site, family, geometry)[0]["image"].grid or ()
            if grid not in of_grid:
                of_grid[grid] = self._make(call.rows, grid, call.latents)
            self._now[site.denoiser, site.name] = of_grid[grid]

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        begun = self._rows is not None
        if not (self._on if begun else in_window(call.step, self.steps)):
            return attend(call)
        if begun and self._rows == call.rows:
            bias = self._now[call.site.denoiser, call.site.name]
        else:  # a part of the rows, folded rows, or a call made by hand
            if call.grid is None:
                name, segments = call.site.name or "this call", call.query_tokens.segments
                raise ValueError(f"isolation needs the image's grid, and query_tokens of {name} has {segments}")
            bias = self._make(call.table, call.grid, call.query)
        if bias is None:
            return attend(call)
        assert bias.left is not None
        left = _among(bias.left, call.query_tokens, call.query.shape[2])
        right = _among(bias.right, call.key_tokens, call.key.shape[2])
        return attend(call.replace(bias=(*call.bias, Bias(left, right))))

    def _make(self, rows: Rows, grid: tuple[int, ...], like: Tensor) -> Bias | None:
        prompts = max(rows.prompt) + 1
        if prompts > len(self.subjects):
            raise ValueError(f"subjects has regions for {len(self.subjects)} prompts, the pipeline runs {prompts}")
        most = max(len(regions) for regions in self.subjects)
        if most < 2:
            return None
        inside = torch.zeros(len(self.subjects), most, len(cover((0, 0, 1, 1), grid)))
        for prompt, regions in enumerate(self.subjects):
            for number, region in enumerate(regions):
                inside[prompt, number] = cover(region, grid)
        if (inside.sum(1) > 1).any():
            raise ValueError(
                f"regions of prompt {int((inside.sum(1) > 1).any(1).nonzero()[0])} overlap on a {grid} grid"
            )
        inside = inside[[prompt for prompt in rows.prompt for _ in range(rows.fold)]].to(like)  # (b, s, n)
        others = inside.sum(1, keepdim=True) - inside
        return Bias(inside.transpose(1, 2)[:, None], CLOSED * others.transpose(1, 2)[:, None])


def _among(x: Float[Tensor, "b 1 s r"], tokens: Tokens, length: int) -> Float[Tensor, "b 1 n r"]:
    """What is said of image tokens, said of all: 0 of the others."""
    image = tokens["image"]
    return F.pad(x, (0, 0, image.start, length - image.start - image.length))
