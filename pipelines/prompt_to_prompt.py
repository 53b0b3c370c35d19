"""Edit a generated or a real image by editing its prompt (prompt-to-prompt, arXiv:2208.01626), on any supported
pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from .. import attach
from ..alignment import Window, Windows
from ..controls import PromptToPrompt
from ..latents import LocalBlend
from ..report import Report
from ..tokens import Word, as_words
from .base import ReadyPipeline, check_text, inverted

__all__ = ["PromptToPromptOutput", "PromptToPromptPipeline", "changed_words"]

Blend = bool | Word | Sequence[Any]


@dataclass(frozen=True)
class PromptToPromptOutput:
    """What came of an edit.

    images   the edited images, those of an edit next to each other
    source   the unedited images; of a picture, what its inversion rebuilds
    masks    where each edited image could differ from its source (white), for videos a list of frames; None without
             blend
    report   what attention control did
    """

    images: Any
    source: Any
    masks: list[Any] | None
    report: Report


class PromptToPromptPipeline(ReadyPipeline):
    """`PromptToPromptPipeline(pipe)("a red circle", "a green circle").images[0]`."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        edits: str | Sequence[str],
        words: Mapping[Word, Window] | None = None,
        strengths: Mapping[Word, float] | None = None,
        blend: Blend = False,
        *,
        cross: Windows | None = None,
        self_: Window | None = None,
        edit: Literal["auto", "replace", "refine"] = "auto",
        joint: Literal["exact", "image_qk"] | None = None,
        threshold: float | tuple[float, float] = 0.3,
        blend_start: float = 0.2,
        blend_sites: str | None = None,
        image: Image.Image | None = None,
        inversion: str | None = None,
        inversion_options: Mapping[str, Any] | None = None,
        num_images_per_prompt: int = 1,
        **kwargs: Any,
    ) -> PromptToPromptOutput:
        """Generate `prompt` and its `edits` with one noise and linked attention.

        image        a picture to edit, which `prompt` describes; None: one is generated
        inversion    of the picture, see `attnctrl.latents.invert`; None: ddim, for flow models midpoint.  The source is
                     held to its trajectory, so `source` is the picture itself
        inversion_options    of that method, and guidance_scale, the inversion's own
        words        {word of an edit: window} in which it follows the source, in place of the window `cross`
        strengths    {word of an edit: factor} on its attention
        blend        keep the source outside the words that differ (True), or outside the words given: one for all
                     prompts, or one entry (a word or a list) per prompt, the source first
        cross, self_, edit, joint    see `attnctrl.controls.PromptToPrompt`; None: the defaults of the model's family
        threshold, blend_start, blend_sites    see `attnctrl.latents.LocalBlend`
        kwargs       anything else the pipeline takes: generator (one, or one for each of `num_images_per_prompt`),
                     num_inference_steps, guidance_scale, negative_prompt, callback_on_step_end, height, width ...

        Raises ValueError, before the first step, when prompts or words do not fit.
        """
        prompts = [prompt, *([edits] if isinstance(edits, str) else edits)]
        for text in prompts:
            check_text("prompt, and each of edits,", text)
        if len(prompts) == 1:
            raise ValueError("edits must hold at least one prompt")
        if image is None and (inversion is not None or inversion_options is not None):
            raise ValueError("inversion is that of a picture to edit; give it as image=...")
        if image is not None and num_images_per_prompt != 1:
            raise ValueError(
                f"num_images_per_prompt is 1 with an image, which is one source, not {num_images_per_prompt}"
            )
        if words:
            cross = {**(cross if isinstance(cross, Mapping) else {"default": cross}), **words}  # type: ignore[dict-item]
        controls: list[Any] = [
            PromptToPrompt(prompts, cross=cross, self_=self_, edit=edit, joint=joint, reweight=strengths)
        ]
        local = None
        if blend is not False and blend is not None:
            local = LocalBlend(prompts, _blend_words(blend, prompts), threshold=threshold, start=blend_start)
            if blend_sites is not None:
                local.sites = blend_sites
            controls.insert(0, local)
        if image is None:
            kwargs = {**self.defaults, **kwargs}
        else:
            found, kwargs = inverted(
                self, {"image": image}, prompt, inversion, inversion_options, kwargs, default="ddim", guide=True
            )
            controls[-1:-1] = found.controls(prompts)
        kwargs = self.for_prompts(kwargs, len(prompts))
        generator = kwargs.get("generator")
        if isinstance(generator, list) and len(generator) == num_images_per_prompt:
            kwargs["generator"] = [*generator, *(_copy(g) for _ in prompts[1:] for g in generator)]
        with attach(self.pipe, *controls) as run:
            result = self.pipe(prompts, num_images_per_prompt=num_images_per_prompt, **kwargs)
        images = result[0]  # `images` or `frames`, or the first entry with return_dict=False
        count, masks = num_images_per_prompt, None
        if local is not None and local.masks is not None:
            masks = [_picture(mask, images[0]) for mask in local.masks[count:].cpu()]
        return PromptToPromptOutput(images[count:], images[:count], masks, run.report())


def changed_words(prompt: str, edit: str) -> tuple[list[int], list[int]]:
    """Numbers of the words in which two prompts differ, in the one and in the other."""
    ours: list[int] = []
    theirs: list[int] = []
    for tag, i, j, k, n in SequenceMatcher(a=prompt.split(), b=edit.split(), autojunk=False).get_opcodes():
        if tag != "equal":
            ours += range(i, j)
            theirs += range(k, n)
    return ours, theirs


def _blend_words(blend: Blend, prompts: Sequence[str]) -> list[Any]:
    """One entry of words per prompt."""
    if blend is True:
        pairs = [changed_words(prompts[0], edit) for edit in prompts[1:]]
        entries = [sorted({word for ours, _ in pairs for word in ours}), *(theirs for _, theirs in pairs)]
        if not any(entries):
            raise ValueError("blend=True takes the words that differ, and the prompts do not; name the words to blend")
        return entries
    if isinstance(blend, str | int) or (isinstance(blend, tuple) and as_words(blend) == [blend]):
        return [blend] * len(prompts)
    if isinstance(blend, Sequence) and len(blend) == len(prompts):
        return list(blend)
    raise ValueError(f"blend is True, a word, or one entry per prompt ({len(prompts)}), not {blend!r}")


def _copy(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy


def _picture(mask: torch.Tensor, like: Any) -> Any:
    """A mask as a black and white picture of the images' size (its own size for latents); frames as a list of them."""
    if mask.ndim == 3:
        return [_picture(frame, like) for frame in mask]
    picture = Image.fromarray(mask.numpy().astype(np.uint8) * 255)
    return picture.resize(like.size, Image.Resampling.NEAREST) if isinstance(like, Image.Image) else picture
