"""Which source token each target token follows, how strongly, and when: the tables of prompt-to-prompt.

arXiv:2208.01626.  With A_s, A_t the attention of the source and of a target prompt (columns = tokens), the edit of the
authors' code is
    A* = R * alpha_i + A_t * (1 - alpha_i)          alpha_i in {0, 1} per target token and step: `schedule`
    R  = c * A_s M                                  replace: `replace_mapper`;  c: `equalizer`, 1 without
    R  = c * (a * A_s[:, map] + (1 - a) * A_t)      refine:  `refine_mapper`
Nothing is renormalised.  `mixing.py` turns these into edits of the values.

Several text encoders in one sequence (`tokens.concat`) are aligned each for itself: the mappers are block-diagonal.  T5
has no BOS and Qwen has template tokens around the prompt; both are tokens like others here and follow their
counterpart.  Pads follow pads. Tables are float64 by default: they are small, and exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tokens import Encoded, Part, Word, as_words, find, locate, positions, unknown, words

__all__ = [
    "Window",
    "Windows",
    "equalizer",
    "equalizers",
    "indicator",
    "refine_mapper",
    "replace_mapper",
    "schedule",
    "self_window",
    "window",
]

Window = float | tuple[float, float]
Windows = Window | Mapping[Word, Window]
DEFAULT = ("default", "default_")


def replace_mapper(
    source: Encoded,
    target: Encoded,
    tail: Literal["corrected", "official"] = "corrected",
    *,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "source target"]:
    """M (n_src, n_tgt) of word-by-word replacement.  The prompts need the same number of words.

    A changed word with source tokens S and target tokens T: M[S_k, T_k] = 1 if they are equally many, else M[s, t] =
    1/|T| for every pair, so that each source token hands on all of its attention.  All other tokens, pads too, are
    walked in step: M[i, j] = 1.  If |S| != |T|, the walk ends when one side does; the last pads of the other, as many
    as the difference, have no partner.

    `tail="official"`: the authors' code writes M[j, j] after the last changed word, so that all that follows reads the
    source token at its own position, which then belongs to another word.
    """
    if tail not in ("corrected", "official"):
        raise ValueError(f"tail is 'corrected' or 'official', not {tail!r}.")
    _same_parts(source, target)
    theirs, ours = words(source), words(target)
    if len(theirs) != len(ours):
        raise ValueError(
            f"Replacement goes word by word and needs equally many: {source.prompt!r} has {len(theirs)} words, "
            f"{target.prompt!r} has {len(ours)}. Use refine to add or remove words."
        )
    pairs = [(a.span, b.span, a.text != b.text) for a, b in zip(theirs, ours, strict=True)]
    for a, b, changed in pairs:
        if changed:  # one that no encoder holds is an error here, not a silent no-op
            positions(source, a)
            positions(target, b)

    mapper = torch.zeros(source.length, target.length, dtype=dtype)
    for x, y, part_x, part_y in zip(source.starts, target.starts, source.parts, target.parts, strict=True):
        here = [(part_x.tokens(a), part_y.tokens(b), new) for a, b, new in pairs if part_x.holds(a) and part_y.holds(b)]
        mapper[x : x + part_x.length, y : y + part_y.length] = _replace(part_x, part_y, here, tail, dtype)
    return mapper


def refine_mapper(
    source: Encoded, target: Encoded, *, dtype: torch.dtype = torch.float64
) -> tuple[Int[Tensor, "target"], Float[Tensor, "target"]]:
    """map (n_tgt,) and a (n_tgt,): the source position that each target token follows and 1; -1 and 0 if there is none.

    Needleman-Wunsch on the token ids: gap 0, match +1, mismatch -1; where several ways are equally good, the one that
    leaves the target token unmatched, then the one that skips the source token, then the match.  So different ids never
    pair: a new word keeps its own attention.  Pads of the target follow the same position of the source, whatever
    stands there, as in the authors' code.
    """
    _same_parts(source, target)
    index = torch.full((target.length,), -1, dtype=torch.int64)
    for x, y, part_x, part_y in zip(source.starts, target.starts, source.parts, target.parts, strict=True):
        pads = range(len(part_y.ids), min(part_x.length, part_y.length))
        for j, i in [*_align(part_x.ids, part_y.ids), *((n, n) for n in pads)]:
            index[y + j] = x + i
    return index, index.ge(0).to(dtype)


def equalizer(
    target: Encoded, scales: Mapping[Word, float], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "target"]:
    """c (n_tgt,): the factor of each word, any real number, on all its tokens; 1 elsewhere.  Of two words on one token
    the later wins.
    """
    return equalizers([target], scales, dtype=dtype)[0]


def equalizers(
    targets: Sequence[Encoded], scales: Mapping[Word, float], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "prompts target"]:
    """c (targets, n_tgt): as `equalizer`, in every target that has the word.  A word that no target has is an error."""
    table = torch.ones(len(targets), _length(targets), dtype=dtype)
    for word, scale in scales.items():
        for row, tokens in _in_targets(targets, word):
            table[row, tokens] = float(scale)
    return table


def indicator(
    encoded: Encoded, given: Word | Iterable[Word], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "n"]:
    """(n,): 1 on all tokens of the words, 0 elsewhere; as a value column it reads the words' summed attention."""
    column = torch.zeros(encoded.length, dtype=dtype)
    for word in as_words(given):
        column[list(find(encoded, word))] = 1
    return column


def window(given: Window, count: int) -> tuple[int, int]:
    """[start, stop) in indices: a fraction f is (0, f), a pair is (a, b); int(a * count) <= i < int(b * count)."""
    start, stop = (0.0, given) if isinstance(given, int | float) else given
    if not 0 <= start <= stop <= 1:
        raise ValueError(
            f"A window is a fraction of the run in [0, 1] or a pair of them, start <= stop; not {given!r}."
        )
    return int(start * count), int(stop * count)


def self_window(given: Window, steps: int) -> tuple[int, int]:
    """[start, stop) of self-attention replacement: counted with n (0.4 of 50 steps: 20)."""
    return window(given, steps)


def schedule(
    windows: Windows,
    targets: Sequence[Encoded],
    steps: int,
    *,
    skip: Word | Iterable[Word] = (),
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "steps+1 prompts target"]:
    """alpha (steps + 1, targets, n_tgt) of cross-attention edits: 1 when a target token follows the source.

    `windows`: a fraction, a pair, or {"default": ..., word: ...}, where a word's window replaces the default one (on
    and off) in every target that has the word; for a token in two words the later entry wins; without a default it is
    the whole run ("default_" is understood too).  `steps` is the number of inference steps asked for, n.  Windows are
    counted with n + 1, as in the authors' code, whose PNDM sampler calls the network n + 1 times: 0.8 of 50 is 40
    steps.  `skip` names words that keep their own attention throughout.
    """
    table: dict[Word, Window] = dict(windows) if isinstance(windows, Mapping) else {"default": windows}
    default: Window = (0.0, 1.0)
    for key in DEFAULT:
        default = table.pop(key, default)
    alpha = torch.zeros(steps + 1, len(targets), _length(targets), dtype=dtype)
    start, stop = window(default, steps + 1)
    alpha[start:stop] = 1
    for word, given in [*table.items(), *((word, 0.0) for word in as_words(skip))]:
        start, stop = window(given, steps + 1)
        for row, tokens in _in_targets(targets, word):
            alpha[:, row, tokens] = 0
            alpha[start:stop, row, tokens] = 1
    return alpha


def _replace(
    x: Part, y: Part, pairs: list[tuple[tuple[int, ...], tuple[int, ...], bool]], tail: str, dtype: torch.dtype
) -> Float[Tensor, "source target"]:
    """M of one text encoder.  Words anchor the walk, which so stays in step over white-space tokens (Qwen)."""
    mapper = torch.zeros(x.length, y.length, dtype=dtype)
    last = max((k for k, (_, _, changed) in enumerate(pairs) if changed), default=-1)
    official = tail == "official"
    i = j = 0
    for theirs, ours, _ in pairs[: last + 1] if official else pairs:
        while i < theirs[0] and j < ours[0]:
            mapper[i, j] = 1
            i, j = i + 1, j + 1
        if len(theirs) == len(ours):
            mapper[list(theirs), list(ours)] = 1
        else:
            mapper[theirs[0] : theirs[-1] + 1, ours[0] : ours[-1] + 1] = 1 / len(ours)
        i, j = theirs[-1] + 1, ours[-1] + 1
    while i < x.length and j < y.length:
        if not official:
            mapper[i, j] = 1
        elif j < x.length:
            mapper[j, j] = 1
        i, j = i + 1, j + 1
    return mapper


def _align(x: Sequence[Hashable], y: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Matched (target, source) positions of a global alignment; see `refine_mapper`."""
    gap, match, mismatch = 0, 1, -1
    score = [[gap * j for j in range(len(y) + 1)]]
    came = [["left"] * (len(y) + 1)]
    for i, a in enumerate(x, 1):
        row, last, path = [gap * i], score[-1], ["up"]
        for j, b in enumerate(y, 1):
            left, up, diagonal = row[j - 1] + gap, last[j] + gap, last[j - 1] + (match if a == b else mismatch)
            best = max(left, up, diagonal)
            row.append(best)
            path.append("left" if best == left else "up" if best == up else "diagonal")
        score.append(row)
        came.append(path)
    pairs, i, j = [], len(x), len(y)
    while i > 0 and j > 0:
        if came[i][j] == "diagonal":
            i, j = i - 1, j - 1
            pairs.append((j, i))
        elif came[i][j] == "left":
            j -= 1
        else:
            i -= 1
    return pairs


def _in_targets(targets: Sequence[Encoded], word: Word) -> list[tuple[int, list[int]]]:
    """(row, positions) in every target that has the word; ValueError if none has it."""
    found = [(row, list(find(target, word))) for row, target in enumerate(targets) if locate(target, word)]
    if not found:
        raise ValueError(unknown(word, *targets))
    return found


def _length(targets: Sequence[Encoded]) -> int:
    lengths = {target.length for target in targets}
    if len(lengths) != 1:
        raise ValueError(
            f"Target prompts need sequences of one length, got {sorted(lengths)}; pad them (Encoded.padded)."
        )
    return lengths.pop()


def _same_parts(source: Encoded, target: Encoded) -> None:
    if len(source.parts) != len(target.parts):
        raise ValueError(
            f"The source was read by {len(source.parts)} text encoder(s), the target by {len(target.parts)}."
        )
