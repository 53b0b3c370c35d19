"""Texts between two prompts: the embeddings of the rows between are interpolated on a line.

    e_i = (1 - c_i) e_start + c_i e_end           and pooled embeddings alike
AID (arXiv:2403.17924) conditions its images between this way where it has no guide prompt.  It acts on what the
denoiser is given, so it is the same for every family; where texts have masks, a token counts that counts at either end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows
from ..prompts import check_count
from ..sharing import partner_rows

__all__ = ["TextInterpolation"]

_TEXTS = ("encoder_hidden_states", "pooled_projections", "text_embeds")
_MASKS = ("encoder_hidden_states_mask", "encoder_attention_mask", "encoder_mask")


@dataclass(frozen=True)
class TextInterpolation:
    """Give the rows between the first and the last prompt of a pipeline call texts between theirs.

    coefficients  one per prompt, from 0 (the first prompt's text) to 1 (the last one's)

    Raises ValueError when the pipeline runs another number of prompts, or the denoiser takes no text; MissingRows when
    start or end are not in the same call of the denoiser.
    """

    coefficients: Sequence[float]

    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        c = list(self.coefficients)
        if len(c) < 2 or any(not 0 <= one <= 1 for one in c):
            raise ValueError(f"coefficients are two or more numbers from 0 to 1, one per prompt, not {c}")

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        check_count("TextInterpolation", len(self.coefficients), call.rows.prompt)
        inputs = self._between(call.inputs, call.rows)
        added = inputs.get("added_cond_kwargs")
        if isinstance(added, Mapping):
            inputs["added_cond_kwargs"] = self._between(added, call.rows)
        if not any(isinstance(inputs.get(name), Tensor) for name in _TEXTS):
            raise ValueError(f"TextInterpolation found no text among the denoiser's inputs {sorted(inputs)}")
        return denoise(call.replace(inputs=inputs))

    def _between(self, inputs: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        last = len(self.coefficients) - 1
        between = [i for i, prompt in enumerate(rows.prompt) if 0 < prompt < last]
        start, end = (partner_rows(rows, between, prompt) for prompt in (0, last))
        changed = dict(inputs)
        for name in (*_TEXTS, *_MASKS):
            x = inputs.get(name)
            if not isinstance(x, Tensor) or len(x) != len(rows) or not between:
                continue
            if name in _MASKS:
                new = torch.maximum(x[start], x[end])
            else:
                c = torch.tensor([self.coefficients[rows.prompt[i]] for i in between], dtype=x.dtype, device=x.device)
                new = torch.lerp(x[start], x[end], c.reshape(-1, *(1 for _ in x.shape[1:])))
            changed[name] = x.index_copy(0, torch.tensor(between, device=x.device), new)
        return changed
