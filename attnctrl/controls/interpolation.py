"""Attention interpolation, AID and PAID (arXiv:2403.17924): images between two prompts.

The prompts of a pipeline call are [start, between, ..., end] with coefficients 0 = c_0 <= ... <= c_last = 1.  For a
conditional row i between them, b and e being the rows of start and end, in self-, cross- and joint attention:
    outer  out_i = (1 - c) att(q_i, [k_i; k_b], [v_i; v_b]) + c att(q_i, [k_i; k_e], [v_i; v_e])      two fused calls
    inner  out_i = att(q_i, [k_i; (1 - c) k_b + c k_e], [v_i; (1 - c) v_b + c v_e])                   one
fused=False leaves the row's own keys and values out.  Start, end and unconditional rows stay plain, in a call of their
own.  Rotary positions are those of the rows' common grid; in joint attention text keys of start and end are read, too.

The text of a row between is its own: a guide prompt (PAID), or embeddings between (`TextInterpolation`).  Its
noise is interpolated on the sphere between those of start and end.

Defaults: the authors' (outer, fused, the first half of the steps).  Their slerp takes each line of pixels by itself
(noise="last_axis"); here it takes the whole latent.  Their Beta coefficients are `beta_coefficients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import (
    Attend,
    AttentionCall,
    Bias,
    Denoise,
    DenoiseCall,
    Prediction,
    Rows,
    Site,
    StepCall,
    StepFunction,
    Window,
    batch_index,
)
from ..prompts import check_count
from ..sharing import Part, Sharing, check_window, from_rows, gather_rows, join_keys, outer_mix, part, partner_rows

__all__ = ["AttentionInterpolation", "beta_coefficients", "slerp"]


@dataclass(frozen=True)
class _Plan:
    between: Part
    others: Part
    start: Int[Tensor, "b"]  # of every batch entry between, the start's; the others their own
    end: Int[Tensor, "b"]
    weight: Float[Tensor, "t 1 1 1"]


@dataclass(eq=False)
class AttentionInterpolation:
    """Draw the images between the first and the last prompt of a pipeline call.

    coefficients  one per prompt, from 0 to 1, never falling
    form          "outer" mixes attention outputs, "inner" keys and values
    fused         rows between read their own keys, too
    noise         "slerp": rows between start from noise between those of start and end; "last_axis": line by line, as
                  the authors; None: from their own
    steps         when: fractions of the run, or two step indices
    sites         a selector, or a function choosing sites; None: all self-, cross- and joint attention

    Raises ValueError when the pipeline runs another number of prompts; MissingRows when start or end are not in the
    same call of the denoiser.
    """

    coefficients: Sequence[float]
    form: Literal["outer", "inner"] = "outer"
    fused: bool = True
    noise: Literal["slerp", "last_axis"] | None = "slerp"
    steps: Window = (0.0, 0.5)
    sites: str | Callable[[Sequence[Site]], list[Site]] | None = None

    stage = "edit"
    kinds = frozenset({"self", "cross", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        c = list(self.coefficients)
        if len(c) < 2 or (c[0], c[-1]) != (0, 1) or sorted(c) != c:
            raise ValueError(f"coefficients rise from 0 (start) to 1 (end), one per prompt, not {c}")
        if self.form not in ("outer", "inner"):
            raise ValueError(f"form is 'outer' or 'inner', not {self.form!r}")
        if self.noise not in ("slerp", "last_axis", None):
            raise ValueError(f"noise is 'slerp', 'last_axis' or None, not {self.noise!r}")
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        own = plan.between.of(call)
        start, end = (plan.between.of(from_rows(call, index)) for index in (plan.start, plan.end))
        weight = plan.weight.to(torch.promote_types(call.query.dtype, torch.float32))
        if self.form == "inner":
            mixed = _mixed(start, end, weight)
            out = attend(join_keys(own, mixed) if self.fused else mixed)
        else:
            if self.fused:
                start, end = join_keys(own, start), join_keys(own, end)
            out = outer_mix(attend, end, start, weight)
        out = out.to(call.value.dtype)
        return gather_rows((plan.between, out), (plan.others, attend(plan.others.of(call))))

    # ----------------------------------------------------------------------------------------------------------- noise

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if call.step.index != 0 or self.noise is None:
            return denoise(call)
        return denoise(call.replace(latents=self._started(call.latents, call.rows.take(range(len(call.latents))))))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if call.step.index != 0 or self.noise is None:
            return step(call)
        return step(call.replace(sample=self._started(call.sample, call.rows)))

    def _started(self, latents: Tensor, rows: Rows) -> Tensor:
        count = len(self.coefficients)
        at = {entry: i for i, entry in enumerate(zip(rows.prompt, rows.image, strict=True))}
        between = [entry for entry in at if 0 < entry[0] < count - 1]
        if not between:
            return latents
        own, start, end = (
            torch.tensor([at[p if q is None else q, image] for p, image in between], device=latents.device)
            for q in (None, 0, count - 1)
        )
        c = torch.tensor([self.coefficients[p] for p, _ in between], dtype=latents.dtype, device=latents.device)
        c = c.reshape(-1, *(1 for _ in latents.shape[1:]))
        dims = (-1,) if self.noise == "last_axis" else tuple(range(1, latents.ndim))
        return latents.index_copy(0, own, slerp(latents[start], latents[end], c, dims=dims).to(latents.dtype))

    # ----------------------------------------------------------------------------------------------------------- rows

    def begin(self, call: DenoiseCall) -> None:
        check_count("AttentionInterpolation", len(self.coefficients), call.rows.prompt)
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        last = len(self.coefficients) - 1
        if any(prompt > last for prompt in rows.prompt):
            check_count("AttentionInterpolation", last + 1, rows.prompt)
        chosen = [i for i, prompt in enumerate(rows.prompt) if rows.branch[i] == "cond" and 0 < prompt < last]
        if not chosen:
            return None
        start, end = list(range(len(rows))), list(range(len(rows)))
        for index, prompt in ((start, 0), (end, last)):
            for row, partner in zip(chosen, partner_rows(rows, chosen, prompt), strict=True):
                index[row] = partner
        c = [self.coefficients[rows.prompt[row]] for row in chosen for _ in range(rows.fold)]
        exact = torch.float32 if device.type == "mps" else torch.float64
        return _Plan(
            between=part(rows, chosen, device),
            others=part(rows, [i for i in range(len(rows)) if i not in chosen], device),
            start=batch_index(tuple(start), rows.fold, device),
            end=batch_index(tuple(end), rows.fold, device),
            weight=torch.tensor(c, dtype=exact).to(device)[:, None, None, None],
        )


def _mixed(start: AttentionCall, end: AttentionCall, c: Float[Tensor, "t 1 1 1"]) -> AttentionCall:
    """Keys and values between two; a key that is masked on one side counts by the other's share: log((1 - c) e^mask_b +
    c e^mask_e)."""

    def mix(x: Tensor, y: Tensor) -> Tensor:
        return x if x is y else (x * (1 - c) + y * c).to(x.dtype)

    mask = start.mask
    if mask is not None and end.mask is not None and mask is not end.mask:
        a, b = (m.to(c.dtype).log() if m.dtype == torch.bool else m.to(c.dtype) for m in (mask, end.mask))
        mask = torch.logaddexp(a + torch.log1p(-c), b + torch.log(c)).to(start.query.dtype)
    bias = tuple(Bias(a.left, mix(a.right, b.right)) for a, b in zip(start.bias, end.bias, strict=True))
    return start.replace(key=mix(start.key, end.key), value=mix(start.value, end.value), mask=mask, bias=bias)


# ------------------------------------------------------------------------------------------- latents and coefficients


def slerp(
    start: Float[Tensor, "*shape"],
    end: Float[Tensor, "*shape"],
    c: float | Float[Tensor, "#*shape"],
    *,
    dims: Sequence[int] | None = None,
    threshold: float = 0.9995,
) -> Float[Tensor, "*shape"]:
    """Between two tensors on the sphere of the dimensions `dims` (None: all), on a line where they are nearly parallel
    or one of them is zero."""
    exact = torch.promote_types(start.dtype, torch.float32)
    x, y = start.to(exact), end.to(exact)
    dims = tuple(range(x.ndim)) if dims is None else tuple(dims)
    norms = x.square().sum(dims, keepdim=True).sqrt() * y.square().sum(dims, keepdim=True).sqrt()
    cosine = (x * y).sum(dims, keepdim=True) / norms
    angle = cosine.acos()
    turned = (((1 - c) * angle).sin() * x + (c * angle).sin() * y) / angle.sin()
    return torch.where(cosine.abs() <= threshold, turned, (1 - c) * x + c * y).to(start.dtype)


def beta_coefficients(count: int, alpha: float, beta: float) -> list[float]:
    """`count` coefficients from 0 to 1: quantiles of Beta(alpha, beta) at equal steps.  alpha = beta = 1 is uniform;
    larger ones gather in the middle.  The authors start with both equal to the number of steps."""
    if count < 2 or alpha <= 0 or beta <= 0:
        raise ValueError(f"at least 2 coefficients and alpha, beta above 0, not {count}, {alpha}, {beta}")
    inner = [_quantile(j / (count - 1), alpha, beta) for j in range(1, count - 1)]
    return [0.0, *inner, 1.0]


def _quantile(p: float, alpha: float, beta: float) -> float:
    """Where the distribution function of Beta(alpha, beta) is p, by halving."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _distribution(middle, alpha, beta) < p else (low, middle)
    return middle


def _distribution(x: float, alpha: float, beta: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz's algorithm)."""
    if x > (alpha + 1) / (alpha + beta + 2):  # where it converges slowly
        return 1 - _distribution(1 - x, beta, alpha)
    if x <= 0:
        return 0.0
    tiny = 1e-300
    front = math.exp(
        alpha * math.log(x) + beta * math.log1p(-x)
        + math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    ) / alpha  # fmt: skip
    c, d, total = 1.0, 0.0, 1.0
    for step in range(10_000):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(alpha + m) * (alpha + beta + m) * x / ((alpha + 2 * m) * (alpha + 2 * m + 1))
        else:
            term = m * (beta - m) * x / ((alpha + 2 * m - 1) * (alpha + 2 * m))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        total *= c * d
        if step and abs(c * d - 1) < 1e-16:
            break
    return front * (total - 1)
