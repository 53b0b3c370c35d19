"""Images between two prompts (AID and PAID, arXiv:2403.17924), on any supported pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import attach
from ..call import Window
from ..controls import AttentionInterpolation, TextInterpolation
from ..controls.interpolation import beta_coefficients
from ..report import Report
from .base import ReadyPipeline, check_text

__all__ = ["InterpolationOutput", "InterpolationPipeline"]


@dataclass(frozen=True)
class InterpolationOutput:
    """What came of an interpolation.

    images         from the first prompt's to the last one's; those of a coefficient next to each other
    coefficients   of each
    report         what attention control did
    """

    images: Any
    coefficients: list[float]
    report: Report


class InterpolationPipeline(ReadyPipeline):
    """`InterpolationPipeline(pipe)("a red circle", "a blue square", 5).images`."""

    @torch.no_grad()
    def __call__(
        self,
        prompt_a: str,
        prompt_b: str,
        n: int = 5,
        *,
        guide: str | None = None,
        coefficients: Sequence[float] | None = None,
        beta: tuple[float, float] = (1.0, 1.0),
        form: Literal["outer", "inner"] = "outer",
        fused: bool = True,
        noise: Literal["slerp", "last_axis"] | None = "slerp",
        steps: Window = (0.0, 0.5),
        sites: str | None = None,
        **kwargs: Any,
    ) -> InterpolationOutput:
        """Generate `n` images from `prompt_a` to `prompt_b`, both included, in one batch.

        guide         a prompt for all images between (PAID); None: embeddings between those of the two
        coefficients  where the n images lie between 0 and 1.  None: quantiles of Beta(*beta), 1, 1 being equal steps
        form, fused, noise, steps, sites    see `attnctrl.controls.AttentionInterpolation`
        kwargs        anything else the pipeline takes

        Raises ValueError, before the first step, for an empty prompt or coefficients that do not rise from 0 to 1.
        """
        check_text("prompt_a", prompt_a)
        check_text("prompt_b", prompt_b)
        if not isinstance(n, int) or n < 3:
            raise ValueError(f"n is a number of images, 3 or more with both ends, not {n!r}")
        c = beta_coefficients(n, *beta) if coefficients is None else list(coefficients)
        if len(c) != n:
            raise ValueError(f"coefficients are {n}, one for each image, not {c}")
        control = AttentionInterpolation(c, form, fused, noise, steps)
        if sites is not None:
            control.sites = sites
        controls: list[Any] = [control]
        if guide is None:
            controls.append(TextInterpolation(c))
        else:
            check_text("guide", guide)
        texts = [prompt_a, *[guide or prompt_a] * (n - 2), prompt_b]
        with attach(self.pipe, *controls) as run:
            result = self.pipe(texts, **self.for_prompts({**self.defaults, **kwargs}, n))[0]
        return InterpolationOutput(result, c, run.report())
