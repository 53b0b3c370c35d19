"""Untwisting RoPE (arXiv:2602.05013) and AlignedGen: a reference's keys are shared, scaled per frequency or moved.

A target row i attends to its own text and image and to the reference's image (no reference text); values stay as is:
    out_i = att(q_i, [k_i; lambda m R_delta k_ref], [v_i; v_ref])
m multiplies each channel pair, R_delta moves the keys by delta tokens.  Both commute with RoPE, so they act on keys as
they come.  Along an axis of D channels, for pair d (0 turns fastest):
    m_d = high + (low - high) (d / (D/2 - 1))^beta                 (Untwisting RoPE)
high < 1 keeps targets from copying the reference place by place; low > 1 strengthens its style.  delta = (0, width)
puts the reference beside the target (AlignedGen's ShiftPE).  m = 1, delta = 0 is naive sharing.
With `adain`, image queries and keys of targets first get the reference's statistics, before RoPE:
    x <- R ((1 - a) x' + a adain(x', x'_ref)),  x' = R^-1 x
Two fused calls: the reference plain, targets with n_text + 2 n_image keys.  No map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, Rope, Site, Step, Tokens, Window
from ..sharing import Pairs, Sharing, append_keys, check_window, pairs, token_adain

__all__ = ["RopeKeyModulation", "Schedule", "multipliers"]

Schedule = float | tuple[float, float] | Callable[[Step], float]
"""A number, (start, end) of a line over the run, or a function of the step."""


def at(schedule: Schedule, step: Step) -> float:
    """The schedule's value at this step; a line has its ends at the first and the last step."""
    if callable(schedule):
        return float(schedule(step))
    if isinstance(schedule, tuple):
        start, end = schedule
        return start + (end - start) * step.index / max(step.total - 1, 1)
    return schedule


def multipliers(
    rope: Rope,
    low: float | Tensor,
    high: float | Tensor,
    beta: float,
    *,
    constant: int = 0,
    on_constant: Literal["low", "curve"] | float = "low",
) -> Float[Tensor, "pairs"]:
    """m of each channel pair.  The first `constant` axes are those along which all image tokens lie at one place: the
    curve has no meaning there, and they take `low`, unless told "curve" or a number."""
    parts = []
    for axis, omega in enumerate(rope.omega):
        count = len(omega)
        place = torch.arange(count, dtype=torch.float64, device=rope.positions.device) / max(count - 1, 1)
        if axis < constant and on_constant != "curve":
            value = low if on_constant == "low" else on_constant
            parts.append(torch.ones_like(place) * value)
        else:
            parts.append(high + (low - high) * place**beta)
    return torch.cat(parts)


@dataclass(eq=False)
class RopeKeyModulation:
    """Targets share the image keys and values of a reference row, scaled per RoPE frequency, moved, or both.

    reference    the prompt whose rows are read; they stay plain
    low, high    m of the lowest and the highest frequency of an axis.  The paper lets both grow linearly, and its page
                 has low between 0.6 and 1.5 and high below 1; (1, 1.1) and (0, 1) are the ends that ports of it use, in
                 the paper's direction.  A number, (first step, last step), or a function of the step
    beta         how late along the frequencies m leaves `high`; ports use 2 to 50
    on_constant  m of axes along which an image does not extend (FLUX's axis 0): "low", "curve" or a number
    shift        delta in tokens, (rows, columns); "beside" is (0, width)
    factor       lambda, a number, a line or a function of the step
    adain        a, 0 to 1; ports of Untwisting RoPE use 0.5, AlignedGen 1
    steps        in which part of the run
    sites        a selector or a function; None: all self and joint sites of images

    Raises MissingRows where the reference is not in the call; refused at attach on models without RoPE.
    """

    reference: int = 0
    low: Schedule = (1.0, 1.1)
    high: Schedule = (0.0, 1.0)
    beta: float = 2.0
    on_constant: Literal["low", "curve"] | float = "low"
    shift: tuple[float, float] | Literal["beside"] = (0.0, 0.0)
    factor: Schedule = 1.0
    adain: float = 0.0
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] | None = None

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows", "segments", "rope"})

    _now: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        if not 0 <= self.adain <= 1:
            raise ValueError(f"adain is a strength from 0 to 1, not {self.adain!r}")
        if not self.beta > 0:
            raise ValueError(f"beta is an exponent above 0, not {self.beta!r}")
        if self.shift != "beside" and (isinstance(self.shift, str) or len(self.shift) != 2):
            raise ValueError(f"shift is (rows, columns) in tokens, or 'beside', not {self.shift!r}")
        if isinstance(self.on_constant, str) and self.on_constant not in ("low", "curve"):
            raise ValueError(f"on_constant is 'low', 'curve' or a number, not {self.on_constant!r}")
        self._pairs: Sharing[Pairs] = Sharing(lambda rows, device: pairs(rows, device, self.reference), self.steps)

    @classmethod
    def aligned_gen(cls, factor: Schedule = 1.0) -> RopeKeyModulation:
        """AlignedGen on FLUX.1: single-stream blocks, the reference beside the target, full AdaIN; lambda 1 ("fix")."""
        return cls(low=1.0, high=1.0, shift="beside", factor=factor, adain=1.0, sites="single")

    def begin(self, call: DenoiseCall) -> None:
        self._pairs.begin(call)
        self._now = self._values(call.step, call.latents.device)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._pairs(call)
        if plan is None:
            return attend(call)
        tokens, rope = call.key_tokens, call.key_tokens.rope
        if rope is None or "image" not in tokens:
            raise ValueError(
                f"{call.site.name or 'this call'} does not tell the image's positions in its keys: key_tokens has "
                f"the segments {[segment.name for segment in tokens.segments]} and {'no' if rope is None else 'a'} rope"
            )
        low, high, factor = self._now or self._values(call.step, call.query.device)
        image, grid = tokens.only("image"), tokens["image"].grid or ()
        assert image.rope is not None
        wide = torch.promote_types(call.key.dtype, torch.float32)  # scaled and moved, rounded once
        m = multipliers(
            image.rope, low, high, self.beta, constant=len(rope.omega) - len(grid), on_constant=self.on_constant
        )
        key = image.rope.scale(tokens.get(call.key, "image")[plan.of_targets].to(wide), factor * m)
        down, right = (0.0, grid[-1]) if self.shift == "beside" else self.shift
        if down or right:
            delta = [0.0] * (len(rope.omega) - 2) + [down, right]
            key = image.rope.rotate(key, delta)
            moved = image.rope.positions + image.rope.positions.new_tensor(delta)
            image = replace(image, rope=replace(image.rope, positions=moved))
        value = tokens.get(call.value, "image")[plan.of_targets]
        targets = plan.targets.of(self._like_reference(call, plan))
        shared = attend(append_keys(targets, key.to(call.key.dtype), value, image, name="reference"))
        plain = attend(plan.others.of(call))
        out = plain.new_empty(call.query.shape[0], *plain.shape[1:])
        return out.index_copy(0, plan.targets.index, shared).index_copy(0, plan.others.index, plain)

    def _like_reference(self, call: AttentionCall, plan: Pairs) -> AttentionCall:
        """The call whose image queries and keys have the reference's statistics, taken before RoPE."""
        if self.adain == 0:
            return call
        return call.replace(
            query=_adain(call.query, call.query_tokens, plan.reference, self.adain),
            key=_adain(call.key, call.key_tokens, plan.reference, self.adain),
        )

    def _values(self, step: Step, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of low, high and lambda, as tensors: they change with the step, and a compiled graph does not."""
        dtype = torch.float32 if device.type in ("mps", "npu") else torch.float64
        low, high, factor = (
            torch.tensor(at(s, step), dtype=dtype, device=device) for s in (self.low, self.high, self.factor)
        )
        return low, high, factor


def _adain(x: Float[Tensor, "b h n d"], tokens: Tokens, index: Int[Tensor, "b"], strength: float) -> Tensor:
    """`x` with the image tokens of each row on the way to the statistics of the row `index`, as before RoPE."""
    rope = tokens.only("image").rope
    assert rope is not None
    image = tokens.get(x, "image").to(torch.promote_types(x.dtype, torch.float32))
    before = rope.unrotate(image)
    after = rope.rotate(torch.lerp(before, token_adain(before, index), strength), rope.positions)
    own = index == torch.arange(len(index), device=index.device)  # these keep their bits
    return tokens.put(x, "image", torch.where(own[:, None, None, None], tokens.get(x, "image"), after.to(x.dtype)))
