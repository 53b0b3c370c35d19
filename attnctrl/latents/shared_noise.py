"""One initial noise for all images of an edit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, Rows, StepCall, StepFunction
from ..prompts import Prompts, check_count, flatten, source_images

__all__ = ["SharedNoise"]


@dataclass(frozen=True)
class SharedNoise:
    """Every target starts from its source's noise: x_T of image i of each target is x_T of image i of the source.

    Prompt-to-prompt (arXiv:2208.01626) needs it: with noises of their own, source and target differ from the start.
    Acts in the first iteration only: on what the denoiser sees, and on what the scheduler steps from, so the source's
    latents stay the pipeline's own bits.  Noise that a scheduler adds later (ancestral samplers) is each row's own.

    prompts  [source, target, ...], or a list of such edits, as they are given to the pipeline; an edit may be its
             source alone

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
        _, sources = flatten(self.prompts, alone=True)
        check_count("SharedNoise", len(sources), rows.prompt)
        index = source_images(rows.prompt, rows.image, sources)
        return latents[torch.tensor(index, device=latents.device)]
