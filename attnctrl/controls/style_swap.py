"""Visual style prompting (arXiv:2402.12974): images read keys and values of a reference image.

For a target row i with reference r of the same branch, in late self-attention:
    out_i = att(q_i, k_r, v_r)                     the reference row stays plain; one fused call, nothing added
    negative="swap_query" (StyleKeeper, arXiv:2510.06827), unconditional rows: out_i = att(q_r, k_i, v_i), so that the
    negative prediction holds what leaks from the reference and guidance moves away from it
In joint attention only image tokens are taken from the reference; the text stays each row's own.

Defaults: the six self-attention layers of up_blocks.1 of SDXL, as the authors choose (`sharing.late_sites` has the
other families), all steps, both branches swapped.  StyleKeeper's code is not public; its scale is the pipeline's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, Rows, Site, Window, batch_index
from ..sharing import Sharing, check_window, from_rows, image_of, late_sites, partner_rows, queries_from

__all__ = ["StyleSwap"]


@dataclass(frozen=True)
class _Plan:
    """Of every batch entry: whose keys and values it reads, and with whose queries (None: with its own)."""

    keys: Int[Tensor, "b"]
    queries: Int[Tensor, "b"] | None


@dataclass(eq=False)
class StyleSwap:
    """Give all prompts of a pipeline call the style of one of them.

    reference  the prompt whose style the others take
    negative   what unconditional rows do: "swap" keys and values, as the authors; "swap_query", as StyleKeeper
    steps      when: fractions of the run, or two step indices
    sites      a selector, or a function choosing sites

    Raises MissingRows when a row's reference is not in the same call of the denoiser.
    """

    reference: int = 0
    negative: Literal["swap", "swap_query"] = "swap"
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] = late_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        if self.negative not in ("swap", "swap_query"):
            raise ValueError(f"negative is 'swap' or 'swap_query', not {self.negative!r}")
        check_window("steps", self.steps)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        segment = image_of(call)
        shared = from_rows(call, plan.keys, segment)
        if plan.queries is not None:
            shared = shared.replace(query=queries_from(call, call.query[plan.queries], segment))
        return attend(shared)

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        targets = [i for i, prompt in enumerate(rows.prompt) if prompt != self.reference]
        if not targets:
            return None
        keys, queries = list(range(len(rows))), list(range(len(rows)))
        for row, reference in zip(targets, partner_rows(rows, targets, self.reference), strict=True):
            negative = self.negative == "swap_query" and rows.branch[row] != "cond"
            (queries if negative else keys)[row] = reference
        of_keys, of_queries = (batch_index(tuple(index), rows.fold, device) for index in (keys, queries))
        return _Plan(of_keys, None if queries == list(range(len(rows))) else of_queries)
