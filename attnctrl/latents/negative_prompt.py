"""Negative-prompt inversion (arXiv:2305.16807): the source prompt in place of the empty one.

    e = e(x, source) + w (e(x, prompt) - e(x, source))
On the source's row guidance cancels for any w, so sampling from a DDIM inversion (guidance 1) retraces it as far as
DDIM does; no optimisation, no further evaluation.  `interpolation` > 0 goes from the source prompt's embedding towards
the empty one's, by the angle between the flattened embeddings (the code of proximal guidance, arXiv:2306.05414).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Denoise, DenoiseCall, MissingRows, Prediction
from ..prompts import Prompts, check_count, flatten

__all__ = ["NegativePrompt", "negative_prompt_embedding"]

_TEXTS = ("encoder_hidden_states", "encoder_attention_mask", "pooled_projections")


def negative_prompt_embedding(
    source: Float[Tensor, "b ..."], null: Float[Tensor, "b ..."], interpolation: float = 0.0
) -> Float[Tensor, "b ..."]:
    """The source prompt's embedding, `interpolation` of the way (0 to 1) to the empty prompt's."""
    if not 0 <= interpolation <= 1:
        raise ValueError(f"interpolation lies in [0, 1], not {interpolation!r}")
    if interpolation == 0:
        return source
    low, high = source.flatten(1), null.flatten(1)
    cosine = (torch.nn.functional.normalize(low) * torch.nn.functional.normalize(high)).sum(1)
    angle = torch.acos(cosine)[:, None]
    mixed = torch.sin((1 - interpolation) * angle) * low + torch.sin(interpolation * angle) * high
    return (mixed / torch.sin(angle)).reshape(source.shape)


@dataclass(frozen=True)
class NegativePrompt:
    """Every uncond row of an edit gets its source's prompt: token embeddings, their mask, and pooled embeddings.

    prompts        [source, target, ...] as given to the pipeline, or a list of such edits
    interpolation  towards the pipeline's own negative prompt, token embeddings only

    Raises MissingRows where cond and uncond rows do not share a call of the denoiser; ValueError in a run without
    guidance.
    """

    prompts: Prompts
    interpolation: float = 0.0

    needs = frozenset({"all_rows"})

    def __post_init__(self) -> None:
        negative_prompt_embedding(torch.ones(1, 2), torch.eye(2)[:1], self.interpolation)

    def begin_run(self, run: Any) -> None:
        if not getattr(run.pipeline, "do_classifier_free_guidance", True):
            raise ValueError("NegativePrompt acts on guidance; call the pipeline with guidance_scale above 1")

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        _, sources = flatten(self.prompts, alone=True)
        rows = call.rows
        check_count("NegativePrompt", len(sources), rows.prompt)
        at = {entry: i for i, entry in enumerate(rows.table())}
        uncond, cond = [], []
        for row, (branch, prompt, image, variant) in enumerate(rows.table()):
            if branch == "uncond":
                source = ("cond", sources[prompt], image, variant)
                if source not in at:
                    raise MissingRows(
                        f"uncond row {row} needs the text of {source} in the same call of the denoiser, which has "
                        f"{rows.table()}; pass the source prompt as the pipeline's negative prompt instead"
                    )
                uncond.append(row)
                cond.append(at[source])
        return denoise(call.replace(inputs=self._texts(call.inputs, uncond, cond)) if uncond else call)

    def _texts(self, inputs: Mapping[str, Any], uncond: list[int], cond: list[int]) -> dict[str, Any]:
        new = dict(inputs)
        for name in _TEXTS:
            if isinstance(inputs.get(name), Tensor):
                new[name] = self._replaced(inputs[name], uncond, cond, name == "encoder_hidden_states")
        added = inputs.get("added_cond_kwargs")
        if added and "text_embeds" in added:
            new["added_cond_kwargs"] = {
                **added,
                "text_embeds": self._replaced(added["text_embeds"], uncond, cond, False),
            }
        return new

    def _replaced(self, text: Tensor, uncond: list[int], cond: list[int], interpolated: bool) -> Tensor:
        own, source = text[uncond], text[cond]
        if interpolated:
            source = negative_prompt_embedding(source, own, self.interpolation)
        return text.index_copy(0, torch.tensor(uncond, device=text.device), source.to(text.dtype))
