"""Edits on the tiny pipelines: the same two lines for families with text encoders and without."""

import functools

import torch
from tiny import FAMILIES, VARIANTS, Family, text_length

from attnctrl import attach
from attnctrl.controls import PromptToPrompt
from attnctrl.tokens import from_pieces

EDITABLE = [family for name, family in FAMILIES.items() if name != "mochi"]
SOURCE, TARGET, LONGER = "a red cat on grass", "a blue dog on grass", "a red cat on green grass"
STEPS = 5


def pipe_of(name: str, dtype: torch.dtype = torch.float32):
    """One pipeline for all tests of a process."""
    return _pipe(name, dtype)


@functools.cache
def _pipe(name: str, dtype: torch.dtype):
    family = FAMILIES.get(name) or VARIANTS[name]
    return family.build(dtype=dtype, with_text=family.text)


def prompts_for(family: Family, *prompts):
    """What PromptToPrompt is given: the texts, or where the pipeline has no tokenizer, tokens made by hand."""
    if family.text:
        return list(prompts)
    length = max(map(text_length, prompts)) if family.name == "qwen" else 8
    return [from_pieces(prompt, prompt.split(), length) for prompt in prompts]


def sample(family: Family, prompts, *controls, dtype=torch.float32, **options):
    """Latents of all prompts, row i from seed i, with these controls attached."""
    pipe = pipe_of(family.name, dtype)
    options = {"num_inference_steps": STEPS, **options, "prompts": tuple(prompts), "text": family.text}
    if not controls:
        return family.run(pipe, **options)
    with attach(pipe, *controls):
        return family.run(pipe, **options)


def edit(family: Family, *prompts, **settings):
    return PromptToPrompt(prompts_for(family, *prompts), **settings)
