"""Where the words of a prompt are in the text sequence that the denoiser sees.

Words are found by character spans.  A fast tokenizer tells which characters each token stands for, so the same code
reads CLIP (BOS, EOS, pads after it), T5 (EOS only) and Qwen (a chat template around the prompt whose first tokens the
pipeline drops), with accents, capitals, punctuation and double spaces; nothing is decoded and measured.

    source = encode(pipe.tokenizer, "a cat, asleep", 77)
    find(source, "cat")              # (2,)   positions in the denoiser's text sequence; BOS is 0
    find(source, 1)                  # (2, 3) the second word as written, "cat,", with its comma
    find(source, "cat", occurrence=0)

SDXL joins two CLIP encoders channel by channel: encode with the first tokenizer, the positions hold for both.
SD3 joins 77 CLIP tokens and 256 T5 tokens one after the other: `concat(clip, t5)`; a word then has positions in both.
Give the prompt as the pipeline hands it to the tokenizer (PixArt lower-cases and strips it first).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

__all__ = [
    "Encoded",
    "Found",
    "Part",
    "Span",
    "Word",
    "as_words",
    "concat",
    "encode",
    "find",
    "from_pieces",
    "locate",
    "positions",
    "unknown",
    "words",
]

Span = tuple[int, int]
Word = str | int | tuple[str, int]
"""A word or phrase (every occurrence), the position of a word, or (word, occurrence), both counted from 0."""


@dataclass(frozen=True)
class Part:
    """The tokens of one text encoder: token k stands at position k, the positions after the last token are pads."""

    ids: tuple[Hashable, ...]
    spans: tuple[Span | None, ...]  # characters of the prompt; None for BOS, EOS and the template's own tokens
    length: int
    lost: tuple[Span, ...] = ()  # characters whose tokens were cut off by truncation, or dropped with the template

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.spans):
            raise ValueError(f"{len(self.ids)} token ids but {len(self.spans)} spans.")
        if len(self.ids) > self.length:
            raise ValueError(f"{len(self.ids)} tokens do not fit a sequence of {self.length}.")

    def tokens(self, span: Span) -> tuple[int, ...]:
        """Positions, within the part, of the tokens that stand for some character of `span`."""
        return tuple(k for k, own in enumerate(self.spans) if own is not None and _overlap(own, span))

    def holds(self, span: Span) -> bool:
        """Whether every token of `span` is in the part."""
        return bool(self.tokens(span)) and not any(_overlap(cut, span) for cut in self.lost)


@dataclass(frozen=True)
class Encoded:
    """A prompt and its tokens as they stand in the denoiser's text sequence: one part per text encoder, in order."""

    prompt: str
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """Positions of the whole sequence, pads included."""
        return sum(part.length for part in self.parts)

    @property
    def starts(self) -> tuple[int, ...]:
        """First position of each part."""
        return tuple(accumulate((part.length for part in self.parts[:-1]), initial=0))

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """Ids of the real tokens (BOS, EOS and kept template tokens are real, pads are not)."""
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def spans(self) -> tuple[Span | None, ...]:
        """Characters of the prompt that each real token stands for."""
        return tuple(span for part in self.parts for span in part.spans)

    @property
    def positions(self) -> tuple[int, ...]:
        """Position of each real token in the denoiser's sequence."""
        return tuple(
            start + k for start, part in zip(self.starts, self.parts, strict=True) for k in range(len(part.ids))
        )

    @property
    def count(self) -> int:
        """Number of real tokens."""
        return sum(len(part.ids) for part in self.parts)

    def padded(self, length: int) -> Encoded:
        """The same tokens with pads up to `length` (prompts of different lengths in one batch).  One part only."""
        if len(self.parts) != 1:
            raise ValueError("padded() extends a single part; pad the parts before concat().")
        return replace(self, parts=(replace(self.parts[0], length=length),))


@dataclass(frozen=True)
class Found:
    """A word as written in the prompt."""

    text: str
    span: Span


def encode(tokenizer: Any, prompt: str, length: int | None, *, template: str = "{}", drop: int = 0) -> Encoded:
    """Tokens of `prompt` in a sequence of `length` positions, from a fast tokenizer of transformers.

    `template` is the chat template around the prompt, with one `{}`; the first `drop` tokens of the result are those
    the pipeline removes (QwenImagePipeline: `prompt_template_encode`, `prompt_template_encode_start_idx`).  What is
    longer than `length` is cut as the tokenizer cuts it.  `length=None` takes the tokens there are (see
    `Encoded.padded`).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for. Use its fast version: "
            "AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    if template.count("{}") != 1:
        raise ValueError(f"The template must hold exactly one {{}} for the prompt: {template!r}.")
    before, after = template.split("{}")
    text = before + prompt + after

    def run(**options: Any) -> tuple[list[int], list[Span | None]]:
        out = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False, **options)
        spans = [
            None if special else _within(start - len(before), end - len(before), len(prompt))
            for (start, end), special in zip(out["offset_mapping"], out["special_tokens_mask"], strict=True)
        ]
        return list(out["input_ids"]), _with_space(prompt, spans)

    ids, spans = run()
    there = Counter(span for span in spans if span is not None)
    if length is not None and len(ids) > length + drop:
        ids, spans = run(truncation=True, max_length=length + drop)
    ids, spans = ids[drop:], spans[drop:]
    there.subtract(span for span in spans if span is not None)
    part = Part(tuple(ids), tuple(spans), len(ids) if length is None else length, tuple(sorted((+there).elements())))
    return Encoded(prompt, (part,))


def from_pieces(
    prompt: str,
    pieces: Sequence[str],
    length: int | None = None,
    *,
    bos: Hashable | None = "<bos>",
    eos: Hashable | None = "<eos>",
) -> Encoded:
    """Tokens given by hand, in order: ["a", "squi", "rrel"].  A piece is its own id; bos=None and eos=None: without."""
    text = prompt.lower() if len(prompt.lower()) == len(prompt) else prompt
    ids: list[Hashable] = []
    spans: list[Span | None] = []
    at = 0
    for piece in pieces:
        start = text.find(piece if text is prompt else piece.lower(), at)
        if start < 0 or prompt[at:start].strip():
            raise ValueError(f"Piece {piece!r} does not continue the prompt {prompt!r} after {prompt[:at]!r}.")
        at = start + len(piece)
        ids.append(piece)
        spans.append((start, at))
    if prompt[at:].strip():
        raise ValueError(f"The pieces end before {prompt[at:]!r} of the prompt {prompt!r}.")
    if bos is not None:
        ids.insert(0, bos)
        spans.insert(0, None)
    if eos is not None:
        ids.append(eos)
        spans.append(None)
    return Encoded(prompt, (Part(tuple(ids), tuple(spans), len(ids) if length is None else length),))


def concat(*encoded: Encoded) -> Encoded:
    """The same prompt read by several text encoders whose tokens stand one after the other (SD3: CLIP, then T5)."""
    prompts = {one.prompt for one in encoded}
    if len(prompts) != 1:
        raise ValueError(f"concat joins encodings of one prompt, got {len(prompts)}: {sorted(prompts)}.")
    return Encoded(encoded[0].prompt, tuple(part for one in encoded for part in one.parts))


def words(encoded: Encoded) -> list[Found]:
    """The words of the prompt as written: what stands between white space, punctuation included."""
    return [Found(match.group(), match.span()) for match in re.finditer(r"\S+", encoded.prompt)]


def locate(encoded: Encoded, word: Word) -> list[Span]:
    """Characters of every occurrence of `word`; empty if there is none.

    A word or phrase matches whole words, with the punctuation around them or without ("cat" finds "cat,"), in its own
    case; if there is none, in any case; if there is none, inside a word at its inner boundaries ("cat" finds "cat's";
    Chinese, Japanese, Korean and Thai have none, so any place does).
    """
    if isinstance(word, tuple):
        name, occurrence = word
        spans = locate(encoded, name)
        return [spans[occurrence]] if -len(spans) <= occurrence < len(spans) else []
    there = words(encoded)
    if isinstance(word, int):
        return [there[word].span] if 0 <= word < len(there) else []
    asked = " ".join(word.split())
    if not asked:
        raise ValueError("An empty word was asked for.")
    for fold in (_same, _any_case):
        for wanted in dict.fromkeys((asked, _bare(asked) or asked)):
            spans = _whole_words(encoded.prompt, there, wanted, fold)
            if spans:
                return spans
    pattern = r"\s+".join(re.escape(piece) for piece in asked.split())
    for flags in (0, re.IGNORECASE):
        spans = [m.span() for m in re.finditer(pattern, encoded.prompt, flags) if _bounded(encoded.prompt, m.span())]
        if spans:
            return spans
    return []


def find(encoded: Encoded, word: Word, occurrence: int | None = None) -> tuple[int, ...]:
    """Positions, in the denoiser's text sequence, of all tokens of `word` (see `locate`); one occurrence or all.

    ValueError if the prompt has no such word, or if its tokens were cut off by truncation.
    """
    if occurrence is not None:
        if not isinstance(word, str):
            raise ValueError(f"occurrence goes with a word given as text, not with {word!r}.")
        word = (word, occurrence)
    spans = locate(encoded, word)
    if not spans:
        raise ValueError(unknown(word, encoded))
    return tuple(sorted({position for span in spans for position in positions(encoded, span)}))


def positions(encoded: Encoded, span: Span) -> tuple[int, ...]:
    """Positions of the tokens of the characters `span`, in every part that holds them all.  ValueError if none does."""
    found = tuple(
        start + k
        for start, part in zip(encoded.starts, encoded.parts, strict=True)
        if part.holds(span)
        for k in part.tokens(span)
    )
    if not found:
        text = encoded.prompt[slice(*span)]
        if any(_overlap(cut, span) for part in encoded.parts for cut in part.lost):
            raise ValueError(
                f"{text!r} is cut off: the prompt is longer than the {encoded.length} tokens the denoiser sees. "
                f"Shorten the prompt {encoded.prompt!r}, or move the word forward."
            )
        raise ValueError(f"The tokenizer makes no token of {text!r} in the prompt {encoded.prompt!r}.")
    return found


def unknown(word: Word, *encoded: Encoded) -> str:
    """The message about a word that none of the prompts has."""
    if isinstance(word, tuple):
        times = ", ".join(str(len(locate(one, word[0]))) for one in encoded)
        asked = f"occurrence {word[1]} (counted from 0) of {word[0]!r}, which is there {times} time(s),"
    else:
        asked = f"word number {word} (counted from 0)" if isinstance(word, int) else repr(word)
    there = "; ".join(
        f"{one.prompt!r} has the words " + ", ".join(found.text for found in words(one)) for one in encoded
    )
    return f"No {asked} in the prompt{'s' if len(encoded) > 1 else ''}: {there}."


def as_words(given: Word | Iterable[Word]) -> list[Word]:
    """One word, or several, as a list.  A pair (text, number) is one word, an occurrence."""
    if isinstance(given, str | int):
        return [given]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int):
        return [(given[0], given[1])]
    return list(given)


def _overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _within(start: int, end: int, length: int) -> Span | None:
    start, end = max(start, 0), min(end, length)
    return (start, end) if start < end else None


def _with_space(prompt: str, spans: list[Span | None]) -> list[Span | None]:
    """A token that is only the space before a word (Qwen, before a digit) counts to the word, as T5's mark does."""
    out = list(spans)
    for k, (span, after) in enumerate(pairwise(spans)):
        if span and after and prompt[slice(*span)].isspace() and span[1] == after[0] and not prompt[after[0]].isspace():
            out[k] = (span[0], after[0] + 1)
    return out


def _same(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _any_case(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _bare_span(text: str, span: Span) -> Span:
    """The span without punctuation at its ends (all of it if there is nothing else)."""
    start, end = span
    while start < end and _is_punctuation(text[start]):
        start += 1
    while start < end and _is_punctuation(text[end - 1]):
        end -= 1
    return (start, end) if start < end else span


def _bare(text: str) -> str:
    return text[slice(*_bare_span(text, (0, len(text))))]


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _whole_words(prompt: str, there: list[Found], wanted: str, fold: Any) -> list[Span]:
    size, wanted, spans = len(wanted.split()), fold(wanted), []
    for k in range(len(there) - size + 1):
        written = (there[k].span[0], there[k + size - 1].span[1])
        for span in (written, _bare_span(prompt, written)):
            if fold(" ".join(prompt[slice(*span)].split())) == wanted:
                spans.append(span)
                break
    return spans


def _bounded(prompt: str, span: Span) -> bool:
    """Whether no letter or digit goes on across an end of the span, in a script that writes spaces between words."""

    def joined(at: int) -> bool:
        return 0 < at < len(prompt) and all(c.isalnum() and not _spaceless(c) for c in (prompt[at - 1], prompt[at]))

    return not joined(span[0]) and not joined(span[1])


def _spaceless(character: str) -> bool:
    """Scripts that join words (or words and particles): wide East Asian characters, Thai, Lao, Myanmar, Khmer."""
    return (
        unicodedata.east_asian_width(character) in "WF"
        or "\u0e00" <= character <= "\u0eff"
        or "\u1000" <= character <= "\u109f"
        or "\u1780" <= character <= "\u17ff"
    )
