"""Cross-Image Attention (arXiv:2311.03335): the output reads the appearance image with queries shaped by the structure.

Rows of one pipeline call: output o (started from the structure's noise), appearance a, structure s.  In the decoder's
self-attention at the latent's side and half of it:
    A     = softmax(q_o k_a^T / sqrt(d))        every fifth step, early on: k_s, v_s instead, which re-injects structure
    A'    = clip(c A + (1 - c) / m, 0, 1)       contrast c, rows not renormalised
    out_o = A' v_a                              rows a and s stay plain
The clip needs the entries of A, so with contrast the output's map is formed, in chunks of queries (stage "kernel");
contrast 1 is one fused call for all rows.  In joint attention the image's keys are taken and its queries contrasted.

Swap guidance, at the denoiser: eps = eps_off + g (eps_on - eps_off), off being the output's row without the swap; g
falls linearly to half (at least 1) over the run.  Rows a and s do not depend on the swap, so the call has one row more,
where the authors run all three twice.

Defaults: the authors', whose ranges in steps (10-70 at half the side, 10-90 at the full one, 10-90 for guidance, 40 for
re-injection) count the 68 steps that are left of 100 after skipping 32; here they are fractions of the run.
`compat` repeats that their attention sees the step before (0 at first), while guidance does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Attend, AttentionCall, Denoise, DenoiseCall, Prediction, Rows, Site, Step, Window, in_window
from ..sharing import (
    UNSHARED,
    Pairs,
    Sharing,
    check_window,
    contrast,
    from_rows,
    gather_rows,
    image_of,
    late_sites,
    pairs,
)

__all__ = ["CrossImageAttention"]


@dataclass(frozen=True)
class _Plan:
    appearance: Pairs
    structure: Pairs


@dataclass(eq=False)
class CrossImageAttention:
    """Give the structure of one image the appearance of another.

    output, appearance, structure   their prompts in the pipeline call
    contrast         1 for none, up to about 2
    swap_guidance    1 for none, up to about 5
    half, full       when to swap at sites coarser than the finest, and at the finest
    guidance_steps   when to guide
    reinject_every, reinject   at every so manieth step of this window keys and values are the structure's; 0: never
    compat           count steps of attention as the authors' code does
    sites            a selector, or a function choosing sites

    Raises MissingRows when the three are not in the same call of the denoiser.
    """

    output: int = 0
    appearance: int = 1
    structure: int = 2
    contrast: float = 1.67
    swap_guidance: float = 3.5
    half: Window = (0.15, 1.0)
    full: Window = (0.15, 1.0)
    guidance_steps: Window = (0.15, 1.0)
    reinject_every: int = 5
    reinject: Window = (0.0, 0.59)
    compat: bool = False
    sites: str | Callable[[Sequence[Site]], list[Site]] = late_sites

    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    _finest: int = field(default=1, init=False, repr=False)
    _reinjects: bool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if len({self.output, self.appearance, self.structure}) < 3:
            raise ValueError(
                "output, appearance and structure are three prompts, not "
                f"{self.output}, {self.appearance}, {self.structure}"
            )
        for name in ("contrast", "swap_guidance"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is 1 (none) or more, not {getattr(self, name)}")
        if self.reinject_every < 0:
            raise ValueError(f"reinject_every is a number of steps, 0 for never, not {self.reinject_every}")
        for name in ("half", "full", "guidance_steps", "reinject"):
            check_window(name, getattr(self, name))
        self._half, self._full = Sharing(self._plan, self.half), Sharing(self._plan, self.full)

    @property
    def stage(self) -> str:
        """ "kernel" with contrast, which computes the softmax itself."""
        return "edit" if self.contrast == 1 else "kernel"

    @property
    def forms_maps(self) -> bool:
        return self.contrast != 1

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        share = self._full if call.site.scale <= self._finest else self._half
        step = self._counted(call.step)
        plan = share(call, step)
        if plan is None:
            return attend(call)
        reinjects = self._is_reinjected(step) if self._reinjects is None else self._reinjects
        read, segment = plan.structure if reinjects else plan.appearance, image_of(call)
        shared = from_rows(call, read.reference, segment)
        if self.contrast == 1:
            return attend(shared)
        targets = read.targets.of(shared)
        if segment is None:
            out = contrast(targets, self.contrast)
        else:
            images = contrast(targets.queries(segment), self.contrast)
            out = targets.query_tokens.put(attend(targets), segment, images)
        return gather_rows((read.targets, out), (read.others, attend(read.others.of(call))))

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        table = call.rows.table()
        outputs = [i for i, (_, prompt, _, variant) in enumerate(table) if prompt == self.output and not variant]
        if self.swap_guidance == 1 or not outputs or not in_window(call.step, self.guidance_steps):
            return denoise(call)
        count = len(call.rows)
        prediction = denoise(call.add_rows(outputs, UNSHARED))
        on, off = prediction.take(outputs), prediction.take(range(count, count + len(outputs)))
        towards = (self._strength(call.step) - 1) * (on.value - off.value)
        at = {table[row][:3]: i for i, row in enumerate(outputs)}
        same = [i for i, entry in enumerate(table) if entry[:3] in at]  # rows that others added, too
        own = prediction.take(range(count))
        return own.put(same, own.take(same).value + towards[[at[table[i][:3]] for i in same]])

    def begin_run(self, run: Any) -> None:
        self._finest = min(site.scale for site in run.sites_of(self))

    def begin(self, call: DenoiseCall) -> None:
        step = self._counted(call.step)
        self._half.begin(call, step)
        self._full.begin(call, step)
        self._reinjects = self._is_reinjected(step)

    def _strength(self, step: Step) -> float:
        """Of swap guidance: linspace(g, max(g / 2, 1), steps of the run)."""
        last = max(self.swap_guidance / 2, 1)
        return self.swap_guidance + (last - self.swap_guidance) * step.index / max(step.total - 1, 1)

    def _counted(self, step: Step) -> Step:
        return replace(step, index=max(step.index - 1, 0)) if self.compat else step

    def _is_reinjected(self, step: Step) -> bool:
        return bool(self.reinject_every) and step.index % self.reinject_every == 0 and in_window(step, self.reinject)

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        chosen = lambda branch, prompt, variant: prompt == self.output and variant != UNSHARED  # noqa: E731
        appearance, structure = (
            pairs(rows, device, prompt, targets=chosen) for prompt in (self.appearance, self.structure)
        )
        return None if appearance is None or structure is None else _Plan(appearance, structure)
