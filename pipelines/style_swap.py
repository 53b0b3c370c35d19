"""Prompts in the style of a reference image (visual style prompting, arXiv:2402.12974), on any supported pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from .. import attach
from ..controls import StyleAligned, StyleSwap
from ..latents import Inversion, PinSource, Solver
from ..report import Report
from .base import ReadyPipeline, check_text, inverted

__all__ = ["StyleSwapOutput", "StyleSwapPipeline"]


@dataclass(frozen=True)
class StyleSwapOutput:
    """What came of it.

    images      one (or num_images_per_prompt) of each prompt
    reference   the reference as the pipeline made it: generated, or rebuilt from its inversion
    inversion   of the reference; None where it was generated
    report      what attention control did
    """

    images: Any
    reference: Any
    inversion: Inversion | None
    report: Report


class StyleSwapPipeline(ReadyPipeline):
    """`StyleSwapPipeline(pipe)(picture, ["a cat", "a lighthouse"]).images`."""

    @torch.no_grad()
    def __call__(
        self,
        reference: Image.Image | str,
        prompts: str | Sequence[str],
        *,
        reference_prompt: str = "",
        control: StyleSwap | StyleAligned | None = None,
        inversion: str | None = None,
        inversion_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StyleSwapOutput:
        """Generate `prompts` beside the reference, whose keys and values they read.

        reference         a picture, which is inverted and held to its trajectory, or a prompt, which is generated
        prompts           what to show in its style; each starts from noise of its own
        reference_prompt  describes the picture
        control           None: `StyleSwap` with the authors' settings; `StyleAligned` mixes the reference in instead
        inversion         see `attnctrl.latents.invert`; None: ddim, for flow models midpoint
        kwargs            anything else the pipeline takes

        Raises ValueError, before the first step, for an empty prompt or what is no picture.
        """
        targets = [prompts] if isinstance(prompts, str) else list(prompts)
        if not targets:
            raise ValueError("prompts must hold at least one text")
        for text in targets:
            check_text("each of prompts", text)
        control = control or StyleSwap()
        if control.reference != 0:
            raise ValueError(f"control has reference {control.reference}; here the reference is prompt 0")
        controls: tuple[Any, ...] = ()
        found = None
        if isinstance(reference, str):
            check_text("reference", reference)
            texts, arguments = [reference, *targets], {**self.defaults, **kwargs}
        else:
            texts = [reference_prompt, *targets]
            found, arguments = inverted(
                self, {"reference": reference}, reference_prompt, inversion, inversion_options, kwargs,
                default="ddim", guide=True,
            )  # fmt: skip
            if found.trajectory is None or found.trajectory.solver is None:
                raise ValueError(f"inversion {inversion!r} keeps no trajectory to hold the reference to")
            controls = (Solver(found.trajectory.solver), PinSource(found.trajectory, texts, start=False))
        with attach(self.pipe, *controls, control) as run:
            result = self.pipe(texts, **self.for_prompts(arguments, len(texts)))[0]
        count = len(result) // len(texts)
        return StyleSwapOutput(result[count:], result[:count], found, run.report())
