"""One initial noise for all images of an edit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction
from ..prompts import Prompts, flatten

__all__ = ["SharedNoise"]


@dataclass(frozen=True)
class SharedNoise:
    """Every target starts from its source's noise: x_T of image i of each target is x_T of image i of the source.

    Prompt-to-prompt (arXiv:2208.01626) needs it: with noises of their own, source and target differ from the start.
    Acts in the first iteration only: on what the denoiser sees, and on what the scheduler steps from, so the source's
    latents stay the pipeline's own bits.  Noise that a scheduler adds later (ancestral samplers) is each row's own.

    prompts  [source, target, ...], or a list of such edits, as they are given to the pipeline

    Raises ValueError when the pipeline runs another number of prompts.
    """

    prompts: Prompts

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        if call.step.index != 0:
            return denoise(call)
        images = call.rows.take(range(len(call.latents)))
        return denoise(call.replace(latents=self.share(call.latents, images)))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if call.step.index != 0:
            return step(call)
        return step(call.replace(sample=self.share(call.sample, call.rows)))

    def share(self, latents: Tensor, rows: Rows) -> Tensor:
        """`latents` (one row per image, described by `rows`) with every target's row replaced by its source's."""
        _, sources = flatten(self.prompts)
        if (count := max(rows.prompt) + 1) != len(sources):
            raise ValueError(f"SharedNoise was made for {len(sources)} prompts, the pipeline runs {count}")
        at = {entry: i for i, entry in enumerate(zip(rows.prompt, rows.image, strict=True))}
        index = [at[sources[prompt], image] for prompt, image in zip(rows.prompt, rows.image, strict=True)]
        return latents[torch.tensor(index, device=latents.device)]
