"""Tokenizers of the demo models: the fast CLIP and T5 classes with one token for each word of the caption grammar.

Other words are spelled letter by letter: they run, they are several tokens long, and the models do not know them."""

from __future__ import annotations

import itertools
import string
from typing import Any

from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Tokenizer

from .scene import BACKGROUNDS, COLOURS, PLACES, RELATIONS, SHAPES, SIZES, STYLES, TEXTURES

LENGTH = 24  # tokens of a prompt, specials included; the longest caption has 18
_GROUPS = (SHAPES, COLOURS, BACKGROUNDS, TEXTURES, STYLES, SIZES)
WORDS = sorted(
    {word for group in _GROUPS for word in group}
    | {word for phrases in (PLACES, RELATIONS) for phrase in phrases.values() for word in phrase.split()}
    | {"a", "an", "the", "and", "on", "background"}
)


# diffusers looks for this name here when it loads a pipeline that has a ShortT5Tokenizer
assert issubclass(T5Tokenizer, PreTrainedTokenizerFast)


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair encoding whose merges build each word from its letters, left to right."""
    letters = list(string.ascii_lowercase + string.digits + string.punctuation)
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    merges = [merge for word in _merge_order() for merge in _chain(word)]
    vocabulary += [left + right for left, right in merges]
    unique: Any = list(dict.fromkeys(merges))
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    return CLIPTokenizer(vocab=ids, merges=unique, model_max_length=LENGTH)


def _chain(word: str) -> list[tuple[str, str]]:
    """The merges c+i, ci+r, ... that build a word."""
    symbols = [*word[:-1], word[-1] + "</w>"]
    return [("".join(symbols[:i]), symbol) for i, symbol in enumerate(symbols) if i]


def _merge_order() -> list[str]:
    """The words, ordered so that no merge of an earlier word ("tri" of triangle) breaks a later one ("striped")."""
    order = list(WORDS)
    for _ in range(len(WORDS)):
        rank: dict[tuple[str, str], int] = {}
        for merge in (merge for word in order for merge in _chain(word)):
            rank.setdefault(merge, len(rank))
        broken = [word for word in order if len(_apply(word, rank)) > 1]
        if not broken:
            return order
        order = broken + [word for word in order if word not in broken]
    raise RuntimeError(f"no order of merges keeps these words whole: {broken}")


def _apply(word: str, rank: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding of one word: always the pair that ranks first."""
    symbols = [*word[:-1], word[-1] + "</w>"]
    while pairs := [pair for pair in itertools.pairwise(symbols) if pair in rank]:
        best = min(pairs, key=rank.__getitem__)
        i = next(i for i in range(len(symbols)) if tuple(symbols[i : i + 2]) == best)
        symbols[i : i + 2] = ["".join(best)]
    return symbols


class ShortT5Tokenizer(T5Tokenizer):
    """T5's tokenizer that never pads or cuts to more than `model_max_length` tokens.

    FLUX pipelines ask for 512 tokens unless told otherwise and attend to the padding; the demo model has seen 24."""

    def __call__(self, text=None, *args, max_length: int | None = None, **kwargs):
        if max_length is not None:
            max_length = min(max_length, self.model_max_length)
        return super().__call__(text, *args, max_length=max_length, **kwargs)


def t5_tokenizer() -> ShortT5Tokenizer:
    """A unigram model in which each word is one piece."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS] + [(",", -3.0)]
    pieces += [(c, -12.0) for c in string.ascii_lowercase + string.digits + string.punctuation if c != ","]
    return ShortT5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)
