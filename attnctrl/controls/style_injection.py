"""StyleID (arXiv:2312.09008): the content's queries, the style's keys and values, sharpened.

Rows of one pipeline call: output o, style s, content c (their own inverted trajectories).  In late self-attention:
    q_hat = gamma q_c + (1 - gamma) q_o
    out_o = att(tau q_hat, k_s, v_s)                  style and content rows stay plain; one fused call
tau multiplies the scores; it is put on the query, so that the rows still share one call.  The output starts from the
content's noise with the style's statistics per channel (`latents.StartAdaIN`).

Defaults: the authors' (gamma 0.75, tau 1.5; output blocks 6-11 of SD 1.4 are up_blocks.2 and up_blocks.3,
`sharing.late_sites`); their diffusers port has five of these six layers.  gamma may be a function of step and site, for
schedules over layers and steps (arXiv:2605.26538).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, Rows, Site, Step, Window
from ..sharing import Pairs, Sharing, check_window, from_rows, image_of, late_sites, pairs, queries_from

__all__ = ["StyleInjection"]

Gamma = float | Callable[[Step, Site], float]


@dataclass(frozen=True)
class _Plan:
    style: Pairs
    content: Int[Tensor, "t"]  # the content's entry for each output


@dataclass(eq=False)
class StyleInjection:
    """Redraw one image in the style of another.

    gamma        share of the content's queries in [0, 1], or a function (step, site) -> share; lower is more style
    temperature  factor of the scores; above 1 sharpens
    output, style, content   their prompts in the pipeline call
    steps        when: fractions of the run, or two step indices
    sites        a selector, or a function choosing sites

    Raises MissingRows when style or content are not in the same call of the denoiser.
    """

    gamma: Gamma = 0.75
    temperature: float = 1.5
    output: int = 0
    style: int = 1
    content: int = 2
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] = late_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    _run: Any = field(default=None, init=False, repr=False)
    _gammas: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.gamma):
            _check_gamma(self.gamma)
        if not self.temperature > 0:
            raise ValueError(f"temperature is a factor above 0, not {self.temperature}")
        if self.output in (self.style, self.content):
            raise ValueError(
                f"output ({self.output}) is another prompt than style ({self.style}) and content ({self.content})"
            )
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        segment, targets = image_of(call), plan.style.targets.index
        own, gamma = call.query[targets], self._gamma(call)
        blended = (call.query[plan.content] * gamma + own * (1 - gamma)) * self.temperature
        query = call.query.index_copy(0, targets, blended.to(own.dtype))
        shared = from_rows(call, plan.style.reference, segment)
        return attend(shared.replace(query=queries_from(call, query, segment)))

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)
        if callable(self.gamma):
            for site in self._run.sites_of(self):
                gamma = _check_gamma(self.gamma(call.step, site))
                exact = torch.promote_types(call.latents.dtype, torch.float32)
                self._gammas[site.name] = torch.tensor(gamma, device=call.latents.device, dtype=exact)

    def _gamma(self, call: AttentionCall) -> float | Tensor:
        if not callable(self.gamma):
            return self.gamma
        known = self._gammas.get(call.site.name)
        return _check_gamma(self.gamma(call.step, call.site)) if known is None else known

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        of_output = lambda branch, prompt, variant: prompt == self.output  # noqa: E731
        style, content = (pairs(rows, device, prompt, targets=of_output) for prompt in (self.style, self.content))
        return None if style is None or content is None else _Plan(style, content.of_targets)


def _check_gamma(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is the content's share of the queries, in [0, 1], not {gamma}")
    return gamma
