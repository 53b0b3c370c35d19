"""A prompt's tokens as the denoiser of a pipeline sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .families import Family
from .tokens import Encoded, concat, encode

__all__ = ["Prompts", "check_call", "check_count", "encode_for", "encode_in", "flatten", "source_images"]

Prompts = Sequence[str | Encoded] | Sequence[Sequence[str | Encoded]]
"""[source, target, ...], or several such edits [[source, target], [source, target, target], ...]."""


def encode_for(pipeline: Any, family: Family, prompt: str | Encoded, length: int) -> Encoded:
    """`prompt` through the tokenizers of `pipeline`, in a text sequence of `length` positions.

    An `Encoded` passes if its length is right.

    Raises ValueError when the pipeline has no tokenizer, or the lengths differ.
    """
    if isinstance(prompt, Encoded):
        if prompt.length != length:
            raise ValueError(
                f"{prompt.prompt!r} was encoded to {prompt.length} positions, the denoiser's text has {length}"
            )
        return prompt
    text = prompt.lower().strip() if family.lowers else prompt
    template = getattr(pipeline, "prompt_template_encode", "{}")
    drop = getattr(pipeline, "prompt_template_encode_start_idx", 0)
    parts: list[Encoded] = []
    for name, own in family.texts:
        tokenizer = getattr(pipeline, name, None)
        if tokenizer is None:
            raise ValueError(
                f"{type(pipeline).__name__} has no {name} to find the words of {prompt!r} with; "
                "pass prompts as attnctrl.tokens.encode(tokenizer, ...)"
            )
        rest = length - sum(part.length for part in parts)
        parts.append(encode(tokenizer, text, rest if own is None else own, template=template, drop=drop))
    return parts[0] if len(parts) == 1 else concat(*parts)


def encode_in(run: Any, prompt: str | Encoded, length: int | None) -> Encoded:
    """`prompt` as the pipeline of `run` encodes it.  Without a run, or a length, only an `Encoded` will do.

    Raises ValueError for a text there, and as `encode_for` does.
    """
    if run is not None and length is not None:
        return encode_for(run.pipeline, run.family(run.sites[0].denoiser), prompt, length)
    if isinstance(prompt, Encoded):
        return prompt
    raise ValueError(
        f"without a pipeline, prompts must be encoded: attnctrl.tokens.encode(tokenizer, {prompt!r}, length)"
    )


def flatten(prompts: Prompts, *, alone: bool = False) -> tuple[list[str | Encoded], list[int]]:
    """All prompts in the order of the pipeline call, and for each the index of its edit's source.

    alone: whether a source may have no target.

    Raises ValueError when an edit has no source, or no target where it must.
    """
    groups: list[Sequence[Any]]
    if isinstance(prompts, str):
        raise ValueError(f"prompts must hold a source and its targets, not one text {prompts!r}")
    if all(isinstance(prompt, str | Encoded) for prompt in prompts):
        groups = [prompts]
    else:
        groups = [group for group in prompts if not isinstance(group, str | Encoded)]
        if len(groups) != len(prompts):
            raise ValueError(f"prompts mixes texts with lists of texts: {prompts!r}")
    flat: list[str | Encoded] = []
    sources: list[int] = []
    for group in groups:
        if len(group) < (1 if alone else 2):
            target = "" if alone else " and at least one target"
            raise ValueError(f"an edit needs a source{target}, got {list(group)!r}")
        sources += [len(flat)] * len(group)
        flat += group
    return flat, sources


def check_call(name: str, prompts: Sequence[str | Encoded], texts: Sequence[str] | None) -> None:
    """Raises ValueError when a pipeline called with `texts` (None: unknown) has a control `name` made for others."""
    ours = [prompt.prompt if isinstance(prompt, Encoded) else prompt for prompt in prompts]
    if texts is not None and list(texts) != ours:
        raise ValueError(f"the pipeline was called with the prompts {list(texts)}, {name} was made for {ours}")


def check_count(name: str, prompts: int, column: Sequence[int]) -> None:
    """Raises ValueError when a pipeline whose rows have the prompts `column` runs another number of them than a control
    `name` was made for."""
    if (count := max(column) + 1) != prompts:
        raise ValueError(f"{name} was made for {prompts} prompts, the pipeline runs {count}")


def source_images(prompts: Sequence[int], images: Sequence[int], source_of: Sequence[int]) -> list[int]:
    """For each row, of one row per image with these prompts and images: the row of its source's same image."""
    at = {entry: i for i, entry in enumerate(zip(prompts, images, strict=True))}
    return [at[source_of[prompt], image] for prompt, image in zip(prompts, images, strict=True)]
