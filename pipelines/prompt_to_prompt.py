"""Edit a generated image by editing its prompt (prompt-to-prompt, arXiv:2208.01626), on any supported diffusers pipeline."""

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
from .base import ReadyPipeline

__all__ = ["PromptToPromptOutput", "PromptToPromptPipeline", "changed_words"]

Blend = bool | Word | Sequence[Any]


@dataclass(frozen=True)
class PromptToPromptOutput:
    """images: the edited images, those of an edit next to each other; source: the unedited ones; masks: where each edited image could differ from its source
    (white), None without blend; report: what attention control did."""

    images: Any
    source: Any
    masks: list[Image.Image] | None
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
        num_images_per_prompt: int = 1,
        **kwargs: Any,
    ) -> PromptToPromptOutput:
        """Generate `prompt` and its `edits` with one noise and linked attention.

        words        {word of an edit: window} in which it follows the source, in place of the window `cross`
        strengths    {word of an edit: factor} on its attention
        blend        keep the source outside the words that differ (True), or outside the words given: one for all prompts, or one entry (a word or a list)
                     per prompt, the source first
        cross, self_, edit, joint    see `attnctrl.controls.PromptToPrompt`; None: the defaults of the model's family
        threshold, blend_start, blend_sites    see `attnctrl.latents.LocalBlend`
        kwargs       anything else the pipeline takes: generator, num_inference_steps, guidance_scale, negative_prompt, callback_on_step_end,
                     height, width, output_type ...

        Raises ValueError naming the argument, before anything is generated, when prompts or words do not fit.
        """
        edits = [edits] if isinstance(edits, str) else list(edits)
        if not prompt.strip() or not edits or not all(text.strip() for text in edits):
            raise ValueError(f"prompt and edits must not be empty, got prompt={prompt!r}, edits={edits!r}")
        if "prompt" in kwargs or "image" in kwargs:
            raise ValueError("prompt and image are not passed on: the edit starts from generated images")
        prompts = [prompt, *edits]
        if words:
            default = cross if cross is not None else {}
            cross = {**(default if isinstance(default, Mapping) else {"default": default}), **words}
            if "default" not in cross and "default_" not in cross:
                raise ValueError("words gives windows to single words; give the window of the others too, cross=0.8")
        control = PromptToPrompt(
            prompts, cross=cross, self_=self_, edit=edit, joint=joint, reweight=strengths
        )
        controls: list[Any] = [control]
        local: LocalBlend | None = None
        if blend is not False and blend is not None:
            local = LocalBlend(prompts, _blend_words(blend, prompts), threshold=threshold, start=blend_start)
            if blend_sites is not None:
                local.sites = blend_sites
            controls.insert(0, local)
        kwargs = {**self.defaults, **kwargs}
        for name, value in kwargs.items():  # diffusers takes one negative prompt per prompt
            if name.startswith("negative_prompt") and isinstance(value, str):
                kwargs[name] = [value] * len(prompts)
        with attach(self.pipe, *controls) as run:
            result = self.pipe(prompts, num_images_per_prompt=num_images_per_prompt, **kwargs)
        images = result.images if hasattr(result, "images") else result.frames if hasattr(result, "frames") else result[0]
        masks = None
        if local is not None and local.masks is not None:
            masks = [_picture(mask, images[0]) for mask in local.masks[num_images_per_prompt:]]
        return PromptToPromptOutput(images[num_images_per_prompt:], images[:num_images_per_prompt], masks, run.report())


def changed_words(prompt: str, edit: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The words in which two prompts differ, each with its occurrence; all words of a prompt that lost nothing are compared by longest match."""
    a, b = prompt.split(), edit.split()
    ours: list[tuple[str, int]] = []
    theirs: list[tuple[str, int]] = []
    for tag, i, j, k, n in SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        if tag != "equal":
            ours += [(a[x], a[:x].count(a[x])) for x in range(i, j)]
            theirs += [(b[x], b[:x].count(b[x])) for x in range(k, n)]
    return ours, theirs


def _blend_words(blend: Blend, prompts: Sequence[str]) -> list[Any]:
    """One entry of words per prompt."""
    if blend is True:
        pairs = [changed_words(prompts[0], edit) for edit in prompts[1:]]
        source = list(dict.fromkeys(word for ours, _ in pairs for word in ours))
        entries = [source, *(theirs for _, theirs in pairs)]
        if not any(entries):
            raise ValueError("blend=True takes the words that differ, and the prompts do not differ; name the words to blend")
        if not source:  # only additions: what the source has there is what the new words' region covers
            entries[0] = []
        return entries
    if isinstance(blend, Sequence) and not isinstance(blend, str) and as_words(blend) == list(blend) and len(blend) == len(prompts):
        return list(blend)
    if isinstance(blend, str | int | tuple):
        return [blend] * len(prompts)
    raise ValueError(f"blend is True, a word, or one entry per prompt ({len(prompts)}), not {blend!r}")


def _picture(mask: torch.Tensor, like: Any) -> Image.Image:
    """A mask as a black and white picture of the images' size (its own size for latents)."""
    picture = Image.fromarray(mask.cpu().numpy().astype(np.uint8) * 255)
    return picture.resize(like.size, Image.Resampling.NEAREST) if isinstance(like, Image.Image) else picture
