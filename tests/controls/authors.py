"""Prompt-to-prompt as its authors wrote it: maps formed, edited and multiplied.  A second statement to test against.

Tokens here are given by hand: a prompt is its words, `PIECES` splits some of them, and the sequence is BOS, tokens, EOS
and pads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnctrl.tokens import Encoded, from_pieces

PIECES = {
    "squirrel": ["squi", "rrel"],
    "hippopotamus": ["hip", "popo", "tamus"],
    "croutons": ["crou", "tons"],
    "lasagna": ["la", "sagna"],
    "watercolor": ["water", "color"],
}
Windows = Any  # a fraction, a pair, or {"default_": ..., word: ...}


def pieces(prompt: str) -> list[str]:
    return [piece for word in prompt.split(" ") for piece in PIECES.get(word, [word])]


def encoded(prompt: str, length: int = 77) -> Encoded:
    """What attnctrl is given for the same tokens."""
    return from_pieces(prompt, pieces(prompt), length)


def word_tokens(prompt: str, word: str | int) -> list[int]:
    """Positions of the word (by number) or of all equal words; BOS is 0."""
    positions, at = [], 1
    for number, own in enumerate(prompt.split(" ")):
        count = len(PIECES.get(own, [own]))
        if number == word if isinstance(word, int) else own == word:
            positions += range(at, at + count)
        at += count
    return positions


def replacement_mapper(source: str, target: str, length: int, corrected: bool) -> Tensor:
    """(source, target) for prompts of equally many words."""
    theirs, ours = source.split(" "), target.split(" ")
    assert len(theirs) == len(ours)
    changed = [k for k in range(len(ours)) if ours[k] != theirs[k]]
    sources = [word_tokens(source, k) for k in changed]
    targets = [word_tokens(target, k) for k in changed]
    mapper = torch.zeros(length, length, dtype=torch.float64)
    i = j = done = 0
    while i < length and j < length:
        if done < len(changed) and sources[done][0] == i:
            s, t = sources[done], targets[done]
            if len(s) == len(t):
                mapper[s, t] = 1
            else:
                for column in t:
                    mapper[s, column] = 1 / len(t)
            i, j, done = i + len(s), j + len(t), done + 1
        else:
            mapper[i if done < len(changed) or corrected else j, j] = 1
            i, j = i + 1, j + 1
    return mapper


def refinement_mapper(source: str, target: str, length: int) -> tuple[Tensor, Tensor]:
    """map (target,) and a (target,): global alignment, gap 0, match 1, mismatch -1, ties left > up > diagonal."""
    x, y = ["<bos>", *pieces(source), "<eos>"], ["<bos>", *pieces(target), "<eos>"]
    score = torch.zeros(len(x) + 1, len(y) + 1)
    trace = {(0, j): "left" for j in range(1, len(y) + 1)} | {(i, 0): "up" for i in range(1, len(x) + 1)}
    for i in range(1, len(x) + 1):
        for j in range(1, len(y) + 1):
            diagonal = score[i - 1, j - 1] + (1 if x[i - 1] == y[j - 1] else -1)
            ways = {"left": score[i, j - 1], "up": score[i - 1, j], "diagonal": diagonal}
            score[i, j] = max(ways.values())
            trace[i, j] = next(way for way, value in ways.items() if value == score[i, j])
    index, i, j = torch.arange(length), len(x), len(y)
    while i > 0 or j > 0:
        way = trace[i, j]
        i, j = i - (way != "left"), j - (way != "up")
        if way != "up":
            index[j] = i if way == "diagonal" else -1
    return index, index.ne(-1).double()


def alpha_words(prompts: Sequence[str], steps: int, cross: Windows, length: int) -> Tensor:
    """(steps + 1, targets, tokens)."""
    windows = dict(cross) if isinstance(cross, Mapping) else {"default_": cross}
    alpha = torch.zeros(steps + 1, len(prompts) - 1, length, dtype=torch.float64)
    every = list(range(length))
    for word, given in [("default_", windows.pop("default_", (0.0, 1.0))), *windows.items()]:
        start, stop = (0.0, given) if isinstance(given, int | float) else given
        for t, prompt in enumerate(prompts[1:]):
            tokens = every if word == "default_" else word_tokens(prompt, word)
            alpha[:, t, tokens] = 0
            alpha[int(start * (steps + 1)) : int(stop * (steps + 1)), t, tokens] = 1
    return alpha


@dataclass
class Controller:
    """Edits the maps (rows, heads, pixels, keys) of the conditional rows, source first."""

    prompts: Sequence[str]
    steps: int
    cross: Windows
    self_: Any
    edit: str | None = "replace"  # None: reweighting alone
    scales: Mapping[str, float] | None = None
    corrected: bool = True
    limit: int = 256
    length: int = 77

    def __post_init__(self) -> None:
        source, *targets = self.prompts
        if self.edit == "replace":
            self.mapper = torch.stack([replacement_mapper(source, t, self.length, self.corrected) for t in targets])
        elif self.edit == "refine":
            maps, matched = zip(*(refinement_mapper(source, t, self.length) for t in targets), strict=True)
            self.map, self.matched = torch.stack(maps), torch.stack(matched)
        self.alpha = alpha_words(self.prompts, self.steps, self.cross, self.length)
        self.c = torch.ones(len(targets), self.length, dtype=torch.float64)
        for word, factor in (self.scales or {}).items():
            for t, target in enumerate(targets):
                self.c[t, word_tokens(target, word)] = factor

    def replaced(self, base: Tensor, own: Tensor) -> Tensor:
        """base (heads, pixels, keys), own (targets, heads, pixels, keys)."""
        if self.edit == "replace":
            new = torch.einsum("hpw,bwn->bhpn", base, self.mapper.to(base))
        elif self.edit == "refine":
            taken = base[:, :, self.map].permute(2, 0, 1, 3)
            matched = self.matched.to(base)[:, None, None]
            new = taken * matched + own * (1 - matched)
        else:
            new = base.expand_as(own)
        return new * self.c.to(base)[:, None, None]

    def cross_maps(self, maps: Tensor, step: int) -> Tensor:
        base, own = maps[0], maps[1:]
        alpha = self.alpha[step].to(maps)[:, None, None]
        return torch.cat((maps[:1], self.replaced(base, own) * alpha + own * (1 - alpha)))

    def self_maps(self, maps: Tensor, step: int) -> Tensor:
        start, stop = (0.0, self.self_) if isinstance(self.self_, int | float) else self.self_
        inside = int(start * self.steps) <= step < int(stop * self.steps)
        if not inside or maps.shape[2] > self.limit:
            return maps
        return torch.cat((maps[:1], maps[:1].expand_as(maps[1:])))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, step: int, cross: bool, mask: Tensor | None = None) -> Tensor:
        """All rows, the conditional ones in the second half."""
        maps = softmax(q, k, mask)
        half = len(maps) // 2
        edited = (self.cross_maps if cross else self.self_maps)(maps[half:], step)
        return torch.cat((maps[:half], edited)) @ v


def softmax(q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1)


@dataclass
class Blend:
    """The null-text version of LocalBlend, given each layer's sum of edited maps (rows, heads, pixels, keys)."""

    prompts: Sequence[str]
    words: Sequence[Any]
    substruct: Sequence[Any] | None = None
    start: int = 0
    threshold: tuple[float, float] = (0.3, 0.3)
    length: int = 77
    counter: int = 0

    def mask(self, maps: Tensor, words: Sequence[Any], pool: bool, like: Tensor) -> Tensor:
        column = torch.zeros(len(self.prompts), 1, 1, 1, self.length, dtype=maps.dtype)
        for row, given in enumerate(words):
            for word in [given] if isinstance(given, str) else given:
                column[row, ..., word_tokens(self.prompts[row], word)] = 1
        found = (maps * column).sum(-1).mean(1, keepdim=True)  # (rows, 1, h, w)
        if pool:
            found = F.max_pool2d(found, 3, 1, padding=1)
        found = F.interpolate(found, size=like.shape[2:])
        found = found / found.amax((2, 3), keepdim=True)
        found = found > self.threshold[0 if pool else 1]
        return found[:1] | found

    def __call__(self, x: Tensor, sums: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        self.counter += 1
        if self.counter <= self.start:
            return x
        maps = torch.cat([s.unflatten(2, grid) for s in sums], 1)  # (rows, layers * heads, h, w, keys)
        mask = self.mask(maps, self.words, True, x)
        if self.substruct is not None:
            mask = mask & ~self.mask(maps, self.substruct, False, x)
        return x[:1] + mask.to(x) * (x - x[:1])
