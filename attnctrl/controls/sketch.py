"""Sketches and illustrations: mixtures of self-attention over several references.

MixSA (arXiv:2501.00816), rows of reference sketches r with weights a_r, in late self-attention of every other row:
    out = sum_r a_r att(q, k_r, v_r) + (1 - sum_r a_r) att(q, k, v)                 one fused call per part
IlluSign (arXiv:2504.10822), rows output o, style s, picture i, its edges e:
    out_o = A'(g q_i + d q_e, k_s) v_s        Cross-Image Attention with the queries of picture and edges
    and for what moves, between a style row b at the start and one e at the end, with a weight m per query:
    joint   out_o = att(q_o, [k_b + log m; k_e + log(1 - m)], [v_b; v_e])            one fused call
    outer   out_o = m att(q_o, k_b, v_b) + (1 - m) att(q_o, k_e, v_e)                two
All other rows stay plain.  In joint attention only image tokens are shared and blended.

No code of either paper is public.  `SketchMixture` and `illustration` follow their texts' equations; the weight 0.8 and
the sites (`sharing.late_sites`) are ours, g = 1 and d = 0.5 IlluSign's.  Its output starts from the noise of the edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, Rows, Site, Window, batch_index
from ..latents.adain import LatentAdaIN, Mask
from ..sharing import (
    UNSHARED,
    Pairs,
    Part,
    Sharing,
    check_window,
    from_rows,
    gather_rows,
    image_of,
    join_keys,
    keys_of,
    late_sites,
    outer_mix,
    pairs,
    part,
    partner_rows,
    queries_from,
    shift_keys,
)
from .cross_image import CrossImageAttention

__all__ = ["QueryBlend", "ReferenceOverlay", "SketchMixture", "illustration"]

_NOTHING = -1e3  # log of a weight of 0: exp leaves nothing of it, and half precision holds it

Sites = str | Callable[[Sequence[Site]], list[Site]]


@dataclass(eq=False)
class SketchMixture:
    """Draw all other prompts of a pipeline call with the strokes of some of them.

    references  {prompt: weight}, weights from 0 to 1 that add up to at most 1
    steps       when: fractions of the run, or two step indices
    sites       a selector, or a function choosing sites
    """

    references: Mapping[int, float] = field(default_factory=lambda: {0: 0.8})
    steps: Window = (0.0, 1.0)
    sites: Sites = late_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        weights = self.references.values()
        if not self.references or min(weights) < 0 or sum(weights) > 1 + 1e-9:
            raise ValueError(
                f"references are prompts with weights from 0 to 1 that add up to at most 1, not {dict(self.references)}"
            )
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        targets, others = plan[0][1].targets, plan[0][1].others
        segment, rest = image_of(call), 1 - sum(weight for weight, _ in plan)
        out: Tensor | float = attend(targets.of(call)) * rest if rest > 1e-9 else 0.0
        for weight, read in plan:
            out = out + attend(targets.of(from_rows(call, read.reference, segment))) * weight
        assert isinstance(out, Tensor)
        return gather_rows((targets, out), (others, attend(others.of(call))))

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> list[tuple[float, Pairs]] | None:
        others = lambda branch, prompt, variant: prompt not in self.references  # noqa: E731
        plan = []
        for prompt, weight in self.references.items():
            read = pairs(rows, device, prompt, targets=others) if weight else None
            if read is not None:
                plan.append((float(weight), read))
        return plan or None


@dataclass(eq=False)
class QueryBlend:
    """The output's queries are a sum of other rows' queries.  Give it before what shares keys.

    weights  {prompt: factor}; they need not add up to 1, and a larger sum sharpens
    output   the prompt whose queries are replaced
    steps    when: fractions of the run, or two step indices
    sites    a selector, or a function choosing sites
    """

    weights: Mapping[int, float]
    output: int = 0
    steps: Window = (0.0, 1.0)
    sites: Sites = late_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(weight) for weight in self.weights.values()):
            raise ValueError(f"weights are prompts with finite factors, at least one, not {dict(self.weights)}")
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        targets, sources = plan
        blended = sum(call.query[index] * weight for weight, index in sources)
        assert isinstance(blended, Tensor)
        query = call.query.index_copy(0, targets.index, blended.to(call.query.dtype))
        return attend(call.replace(query=queries_from(call, query, image_of(call))))

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> tuple[Part, list[tuple[float, Int[Tensor, "t"]]]] | None:
        chosen = [i for i, (_, prompt, _, v) in enumerate(rows.table()) if prompt == self.output and v != UNSHARED]
        if not chosen:
            return None
        index = lambda of: batch_index(tuple(of), rows.fold, device)  # noqa: E731
        sources = [
            (float(weight), index(partner_rows(rows, chosen, prompt))) for prompt, weight in self.weights.items()
        ]
        return part(rows, chosen, device), sources


@dataclass(eq=False)
class ReferenceOverlay:
    """One image that reads two references, each where it belongs: a hand at the start and at the end of a sign.

    weight      of the first reference per pixel, from 0 to 1, of any size
    references  the prompts of both
    output      the prompt that reads them
    form        "joint": one softmax over both, with log-weights; "outer": a weighted sum of two
    steps       when: fractions of the run, or two step indices
    sites       a selector, or a function choosing sites
    """

    weight: Float[Tensor, "height width"]
    references: tuple[int, int] = (1, 2)
    output: int = 0
    form: Literal["joint", "outer"] = "joint"
    steps: Window = (0.0, 1.0)
    sites: Sites = late_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not 0 <= float(self.weight.min()) <= float(self.weight.max()) <= 1:
            raise ValueError(f"weight is a tensor (height, width) of numbers from 0 to 1, not {self.weight!r}")
        if self.form not in ("joint", "outer"):
            raise ValueError(f"form is 'joint' or 'outer', not {self.form!r}")
        if len({*self.references, self.output}) < 3:
            raise ValueError(
                f"two references and the output are three prompts, not {self.references} and {self.output}"
            )
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        if call.grid is None:
            raise ValueError("weight is laid on the image's grid, and query_tokens of this call has none")
        targets, others, segment = plan[0].targets, plan[0].others, image_of(call)
        share = _on_grid(self.weight.to(call.query), call.grid)[None, None]  # (1, 1, n)
        images = call if segment is None else call.queries(segment)
        start, end = (targets.of(from_rows(images, pair.reference, segment)) for pair in plan)
        if self.form == "outer":
            out = outer_mix(attend, start, end, share[..., None])
        else:
            log, rest = (x.log().clamp_min(_NOTHING) for x in (share, 1 - share))
            out = attend(join_keys(shift_keys(start, log, segment), shift_keys(keys_of(end, segment), rest)))
        if segment is not None:
            out = call.query_tokens.put(attend(targets.of(call)), segment, out)
        return gather_rows((targets, out), (others, attend(others.of(call))))

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> tuple[Pairs, Pairs] | None:
        chosen = lambda branch, prompt, variant: prompt == self.output and variant != UNSHARED  # noqa: E731
        first, second = (pairs(rows, device, prompt, targets=chosen) for prompt in self.references)
        return None if first is None or second is None else (first, second)


def illustration(
    *,
    output: int = 0,
    style: int = 1,
    picture: int = 2,
    edges: int = 3,
    picture_weight: float = 1.0,
    edge_weight: float = 0.5,
    contrast: float = 1.67,
    swap_guidance: float = 3.5,
    masks: tuple[Mask, Mask] | None = None,
    steps: Window = (0.15, 1.0),
) -> list[Any]:
    """The controls of IlluSign, to be attached together: `attach(pipe, *illustration())`.

    Queries of picture and edges, keys and values of the style with contrast and swap guidance, and the style's
    statistics of the latents (`masks` as in `LatentAdaIN`).  Structure is not re-injected: the queries are the
    picture's already.
    """
    return [
        QueryBlend({picture: picture_weight, edges: edge_weight}, output, steps),
        CrossImageAttention(
            output,
            style,
            picture,
            contrast=contrast,
            swap_guidance=swap_guidance,
            half=steps,
            full=steps,
            guidance_steps=steps,
            reinject_every=0,
        ),
        LatentAdaIN(output, style, masks),
    ]


def _on_grid(weight: Float[Tensor, "height width"], grid: tuple[int, ...]) -> Float[Tensor, "n"]:
    """The weight of each image token, its pixels averaged; the same for all frames."""
    found = F.interpolate(weight[None, None], size=grid[-2:], mode="area")[0, 0]
    return found.expand(math.prod(grid[:-2]), *found.shape).flatten()
