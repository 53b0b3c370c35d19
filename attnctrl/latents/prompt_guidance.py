"""A guidance scale for each prompt of a batch, in a pipeline that has one for all.

    guided_r = u_r + w_r (c_r - u_r)
Where cond and uncond rows share a call, the pipeline computes u + w (c - u) with its own scale w, so c is replaced by
u + (w_r / w) (c - u).  Where the scale is embedded (FLUX), the denoiser's input `guidance` is set for each row.
Used by edit-friendly inversion (3.5 for the source, 15 for the target) and FlowEdit (1.5 and 5.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..call import Denoise, DenoiseCall, MissingRows, Prediction
from ..prompts import check_count

__all__ = ["PromptGuidance"]


@dataclass(eq=False)
class PromptGuidance:
    """Guide prompt i of the pipeline call with `scales[i]`; a scale equal to the pipeline's own changes nothing.

    Raises ValueError when the pipeline runs another number of prompts, or neither guides nor has an embedded scale.
    """

    scales: Sequence[float]

    _own: float = field(default=1.0, init=False, repr=False)

    def begin_run(self, run: Any) -> None:
        self._own = float(getattr(run.pipeline, "guidance_scale", 1.0))

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        check_count("PromptGuidance", len(self.scales), call.rows.prompt)
        scales = torch.tensor([self.scales[prompt] for prompt in call.rows.prompt], dtype=torch.float64)
        embedded = call.inputs.get("guidance")
        if isinstance(embedded, Tensor):
            return denoise(call.replace(inputs={**call.inputs, "guidance": scales.to(embedded)}))
        if set(call.rows.branch) == {"cond"}:
            raise ValueError(
                "PromptGuidance needs cond and uncond rows in one call of the denoiser, or a model with an embedded "
                "guidance scale; call the pipeline with guidance_scale above 1"
            )
        prediction = denoise(call)
        cond = [
            i for i, b in enumerate(call.rows.branch) if b == "cond" and self.scales[call.rows.prompt[i]] != self._own
        ]
        if not cond:
            return prediction
        value = prediction.value
        try:
            partner = call.rows.partner(branch="uncond")[cond].to(value.device)
        except MissingRows as error:
            raise MissingRows(f"PromptGuidance weighs cond against uncond rows of the same call: {error}") from error
        ratio = (scales[cond] / self._own).to(value).reshape(-1, *(1 for _ in value.shape[1:]))
        uncond = value[partner]
        index = torch.tensor(cond, device=value.device)
        return prediction.replace(value=value.index_copy(0, index, uncond + ratio * (value[index] - uncond)))
