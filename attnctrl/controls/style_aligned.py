"""StyleAligned (arXiv:2312.02133): every image attends to a reference image, too, with its statistics.

For a target row i with reference r of the same branch, AdaIN over tokens per head and channel:
    q', k' = adain(q_i, q_r), adain(k_i, k_r)
    out_i  = att(q', [k'; s k_r], [v_i; v_r])      scores of the reference's part raised by c
    full   : out_i = att(q_i, [k_i; k of all other rows], [v_i; v of all other rows]), without AdaIN, s and c
One fused call over twice the keys for the targets, one over their own for the rest; c is a key bias (one channel more),
the reference's AdaIN is the identity and left out, so the reference keeps its bits.  In joint attention the shared keys
and the statistics are those of the image tokens.

Defaults: the authors' StyleAlignedArgs (s = 1, c = 0, queries and keys, all self-attention, all steps).  They use
c = log 2 for a real reference, and s = 0.5 where the reference is a very famous picture.  Their shared layer norm
changes nothing (its statistics are each token's own) and is not here.

`SharedGroupNorm`, which they use with Stable Diffusion 1, takes group statistics over a row and its reference together:
    out_i = norm([x_i; x_r] along the height) at x_i
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, DenoiseCall, Module, ModuleCall, Rows, Site, Window, batch_index
from ..sharing import (
    Pairs,
    Sharing,
    check_window,
    from_rows,
    gather_rows,
    image_of,
    join_keys,
    keys_of,
    pairs,
    partner_rows,
    shift_keys,
    token_adain,
)

__all__ = ["SharedGroupNorm", "StyleAligned", "shared_sites"]


def shared_sites(sites: Sequence[Site], only_self_level: float = 0.0) -> list[Site]:
    """All self and joint sites but the share `only_self_level`, evenly spread, which the authors leave as they are.

    Counted as they do, down, up, mid.  With their arithmetic the share left out is not exact: of 70 layers 0.25 leaves
    18, and one below a single layer leaves none.
    """
    found = [site for site in sites if site.kind in ("self", "joint")]
    order = {"down": 0, "up": 1, "mid": 2}
    counted = sorted(found, key=lambda site: order.get(site.place, 0))
    flip = only_self_level > 0.5
    switched = int((1 - only_self_level if flip else only_self_level) * len(counted))
    left_out = {
        site for i, site in enumerate(counted) if (bool(switched) and i % (len(counted) // switched) == 0) != flip
    }
    return [site for site in found if site not in left_out]


@dataclass(frozen=True)
class _Plan:
    pairs: Pairs
    everyone: tuple[Int[Tensor, "b"], ...]  # of every batch entry, the entries of all other prompts


@dataclass(eq=False)
class StyleAligned:
    """Draw all prompts of a pipeline call in the style of one of them.

    reference             the prompt whose style the others take
    scale, shift          factor of the reference's keys, and what is added to their scores (-inf: they are left out)
    adain_queries, adain_keys, adain_values   which get the reference's statistics
    share_attention       False: only statistics are taken
    full_attention_share  every row attends to all rows; AdaIN, scale and shift are not used
    only_self_level       share of the layers left as they are (see `shared_sites`); not together with sites
    steps                 when: fractions of the run, or two step indices
    sites                 a selector, or a function choosing sites

    Raises MissingRows when a row's reference is not in the same call of the denoiser.
    """

    reference: int = 0
    scale: float = 1.0
    shift: float = 0.0
    adain_queries: bool = True
    adain_keys: bool = True
    adain_values: bool = False
    share_attention: bool = True
    full_attention_share: bool = False
    only_self_level: float = 0.0
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] | None = None

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        if not 0 <= self.only_self_level < 1:
            raise ValueError(f"only_self_level is a share of the layers in [0, 1), not {self.only_self_level}")
        if self.sites is not None and self.only_self_level:
            raise ValueError("only_self_level chooses sites; give it or sites, not both")
        if self.full_attention_share and (self.scale, self.shift) != (1, 0):
            raise ValueError("full_attention_share has no reference part for scale and shift to act on")
        if not math.isfinite(self.scale) or math.isnan(self.shift) or self.shift == math.inf:
            raise ValueError(f"scale is a number and shift a number or -inf, not {self.scale} and {self.shift}")
        if self.sites is None:
            self.sites = functools.partial(shared_sites, only_self_level=self.only_self_level)
        self._share = Sharing(self._plan, self.steps)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        segment = image_of(call)
        if self.full_attention_share:
            everyone = call
            for index in plan.everyone:
                everyone = join_keys(everyone, keys_of(from_rows(call, index), segment))
            return attend(everyone)
        index = plan.pairs.reference
        aligned = call.replace(
            query=token_adain(call.query, index, tokens=call.query_tokens, segment=segment)
            if self.adain_queries
            else call.query,
            key=token_adain(call.key, index, tokens=call.key_tokens, segment=segment) if self.adain_keys else call.key,
            value=token_adain(call.value, index, tokens=call.key_tokens, segment=segment)
            if self.adain_values
            else call.value,
        )
        if not self.share_attention or self.shift == -math.inf:
            return attend(aligned)
        shared = keys_of(from_rows(aligned, index), segment)
        if self.scale != 1:
            shared = shared.replace(key=shared.key * self.scale)
        both = join_keys(aligned, shift_keys(shared, self.shift))
        targets, others = plan.pairs.targets, plan.pairs.others
        return gather_rows((targets, attend(targets.of(both))), (others, attend(others.of(call))))

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        if self.full_attention_share:
            prompts = sorted(set(rows.prompt))
            at = [prompts.index(prompt) for prompt in rows.prompt]
            everyone = [
                [partner_rows(rows, [row], prompts[(at[row] + j) % len(prompts)])[0] for row in range(len(rows))]
                for j in range(1, len(prompts))
            ]
        else:
            everyone = []
        found = pairs(rows, device, self.reference)
        if found is None:
            return None
        return _Plan(found, tuple(batch_index(tuple(index), rows.fold, device) for index in everyone))


@dataclass(eq=False)
class SharedGroupNorm:
    """Group normalisation over each image and the reference together, for UNets.  Give it beside StyleAligned.

    reference  the prompt whose statistics the others take in
    steps      when: fractions of the run, or two step indices
    modules    a selector of submodules: all group norms of a diffusers UNet.  Transformers have none, and are
               refused at attach

    Raises MissingRows when a row's reference is not in the same call of the denoiser.
    """

    reference: int = 0
    steps: Window = (0.0, 1.0)
    modules: str = r".*\.(resnets\.\d+\.norm[12]|attentions\.\d+\.norm)|conv_norm_out"

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        self._share = Sharing(lambda rows, device: pairs(rows, device, self.reference), self.steps)

    def module(self, call: ModuleCall, module: Module) -> Tensor:
        ((name, x),) = call.inputs.items()
        plan = self._share.among(call.rows, call.step, x.device)
        if plan is None:
            return module(call)
        targets, others = plan.targets, plan.others
        both = torch.cat((x[targets.index], x[plan.of_targets]), dim=2)
        out = module(call.with_inputs(**{name: both}).replace(rows=targets.rows))[:, :, : x.shape[2]]
        rest = module(call.with_inputs(**{name: x[others.index]}).replace(rows=others.rows))
        return gather_rows((targets, out), (others, rest))

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)
