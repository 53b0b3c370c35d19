"""Give one image's structure another's appearance (Cross-Image Attention, arXiv:2311.03335), on any supported
pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from .. import attach
from ..controls import CrossImageAttention
from ..latents import Inversion, LatentAdaIN, LocalBlend, SharedNoise
from ..report import Report
from .base import ReadyPipeline, check_text, inverted

__all__ = ["CrossImageOutput", "CrossImagePipeline"]


@dataclass(frozen=True)
class CrossImageOutput:
    """What came of a transfer.

    images      the structure with the appearance
    structure, appearance   the two as the pipeline made them: generated, or rebuilt from their inversion
    inversion   of the two images; None where they were generated
    report      what attention control did
    """

    images: Any
    structure: Any
    appearance: Any
    inversion: Inversion | None
    report: Report


class CrossImagePipeline(ReadyPipeline):
    """`CrossImagePipeline(pipe)(appearance=zebra, structure=horse, prompt="a photo of an animal").images[0]`."""

    @torch.no_grad()
    def __call__(
        self,
        appearance: Image.Image | str,
        structure: Image.Image | str,
        prompt: str | None = None,
        *,
        control: CrossImageAttention | None = None,
        adain: LatentAdaIN | bool = True,
        blend: LocalBlend | None = None,
        inversion: str | None = None,
        inversion_options: Mapping[str, Any] | None = None,
        skip: float = 0.32,
        **kwargs: Any,
    ) -> CrossImageOutput:
        """Run structure, output and appearance, in this order, as three prompts of one call.

        appearance, structure   pictures, which are inverted, or prompts, which are generated; both of one kind
        prompt      of the output.  None: the structure's prompt; "" for pictures.  Pictures are inverted with it
        control     None: `CrossImageAttention` with the authors' settings
        adain       latent statistics of the appearance: True for `LatentAdaIN` with the authors' settings
        blend       a `LocalBlend` over [[structure, output], [appearance]], to keep the structure's background
        inversion   see `attnctrl.latents.invert`; None: edit_friendly (the authors'), for flow models midpoint
        skip        edit_friendly: fraction of the noisiest steps that are left out
        kwargs      anything else the pipeline takes.  Pictures are transferred without guidance unless it says so

        Raises ValueError, before the first step, when the two are not of one kind or cannot be encoded.
        """
        if isinstance(appearance, str) != isinstance(structure, str):
            raise ValueError(
                "appearance and structure are both pictures or both prompts, got "
                f"{type(appearance).__name__} and {type(structure).__name__}"
            )
        control = control or CrossImageAttention(structure=0, output=1, appearance=2)
        places = (control.structure, control.output, control.appearance)
        if places != (0, 1, 2):
            raise ValueError(f"control has structure, output and appearance {places}; here they are prompts 0, 1 and 2")
        if adain is True:
            adain = LatentAdaIN(output=1, appearance=2)
        controls: list[Any] = [blend] if blend is not None else []
        controls += [adain] if adain else []
        found = None
        if isinstance(structure, str) and isinstance(appearance, str):
            texts = [structure, structure if prompt is None else prompt, appearance]
            for name, text in zip(("structure", "prompt", "appearance"), texts, strict=True):
                check_text(name, text)
            controls.append(SharedNoise([texts[:2], texts[2:]]))
            arguments = {**self.defaults, **kwargs}
        else:
            texts = [prompt or ""] * 3
            images = {"structure": structure, "appearance": appearance}
            found, arguments = inverted(self, images, prompt or "", inversion, inversion_options, kwargs)
            options = {"skip": int(skip * arguments["num_inference_steps"])} if found.maps is not None else {}
            controls += found.controls([texts[:2], texts[2:]], **options)
        with attach(self.pipe, *controls, control) as run:
            result = self.pipe(texts, **self.for_prompts(arguments, 3))[0]
        count = len(result) // 3
        return CrossImageOutput(
            result[count : 2 * count], result[:count], result[2 * count :], found, run.report()
        )  # fmt: skip
