"""Choosing attention layers and heads by text.

A selector is made of words joined by `&`, `|`, `!` and parentheses:

    up & self              place and kind
    block 7-9, 12          block numbers within their place
    index 0-3              number over the whole denoiser
    scale >= 4             image tokens at latent/4 or coarser (also <=, <, >, ==, !=)
    *                      every site
    attn "transformer_blocks.3.attn"   an exact module name, quoted

Submodules are chosen by their names: `select_modules`.

A head set names heads per selector: "block 7-9: 3,5; mid: *".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .call import Site

__all__ = ["HeadSet", "select", "select_modules"]

Test = Callable[[Site], bool]

_KINDS = ("self", "cross", "joint", "temporal", "added", "refiner", "ip")
_PLACES = ("down", "mid", "up", "double", "single", "block")
_COMPARE = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_TOKEN = re.compile(
    r"""\s*(?:(?P<op>[&|!()*])
        |(?P<name>"[^"]+")
        |(?P<size>scale\s*(?P<cmp><=|>=|==|!=|<|>)\s*(?P<n>\d+))
        |(?P<range>(?:block|index)s?\s+\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*)
        |(?P<word>[a-z_]+))""",
    re.VERBOSE,
)


def select(sites: Sequence[Site], selector: str, *, missing_ok: bool = False) -> list[Site]:
    """The sites that `selector` matches, in their order.  Raises ValueError for a bad selector, and (unless missing_ok)
    when nothing matches."""
    test = _parse(selector)
    found = [site for site in sites if test(site)]
    if not found and not missing_ok:
        raise ValueError(f"no site matches {selector!r}; this model has {describe(sites)}")
    return found


def select_modules(names: Sequence[str], selector: str) -> list[str]:
    """The names that `selector` matches as a whole.

    A glob, in which `*` stands for one part of a name between dots and `**` for any number of them
    ("up_blocks.*.resnets.*.conv2"), or, where it has other special characters, a regular expression
    (r"up_blocks\\.[12]\\..*\\.conv2").  Raises ValueError for an expression that cannot be read.
    """
    expression = selector
    if re.fullmatch(r"[\w.*]*", selector):
        expression = re.escape(selector).replace(r"\*\*", ".*").replace(r"\*", "[^.]*")
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ValueError(f"cannot read the module selector {selector!r}: {error}") from error
    return [name for name in names if pattern.fullmatch(name)]


def describe(sites: Iterable[Site]) -> str:
    """One phrase per group of sites: 'down 0-2 cross (latent/1-4)', for error messages."""
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.place, site.kind), []).append(site)
    phrases = []
    for (place, kind), members in groups.items():
        blocks, scales = [s.block for s in members], [s.scale for s in members]
        phrases.append(
            f"{place} {_span(blocks)} {kind} ({len(members)} sites, scale {_span(scales)}, "
            f"{_span([s.heads for s in members])} heads)"
        )
    return "; ".join(phrases) or "no attention sites"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return numbers


def _parse(text: str) -> Test:
    """Recursive descent over  or := and ('|' and)*,  and := not ('&' not)*,  not := '!' not | '(' or ')' | term."""
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"cannot read the site selector {text!r} at {text[at:]!r}; {_HELP}")
        tokens.append(match)
        at = match.end()
    position = 0

    def peek() -> str | None:
        return tokens[position]["op"] if position < len(tokens) else None

    def take() -> re.Match[str]:
        nonlocal position
        if position >= len(tokens):
            raise ValueError(f"the site selector {text!r} ends too early; {_HELP}")
        position += 1
        return tokens[position - 1]

    def either() -> Test:
        tests = [both()]
        while peek() == "|":
            take()
            tests.append(both())
        return lambda site: any(test(site) for test in tests)

    def both() -> Test:
        tests = [unary()]
        while peek() == "&":
            take()
            tests.append(unary())
        return lambda site: all(test(site) for test in tests)

    def unary() -> Test:
        token = take()
        if token["op"] == "!":
            inner = unary()
            return lambda site: not inner(site)
        if token["op"] == "(":
            inner = either()
            if peek() != ")":
                raise ValueError(f"missing ')' in the site selector {text!r}")
            take()
            return inner
        return _term(token, text)

    test = either()
    if position < len(tokens):
        raise ValueError(f"cannot read the site selector {text!r} from {tokens[position][0]!r} on; {_HELP}")
    return test


_HELP = (
    f"use kinds {', '.join(_KINDS)}, places {', '.join(_PLACES)}, 'block 7-9', 'index 0-3', 'scale >= 4', "
    "a quoted module name or *, joined by & | ! ( )"
)


def _term(token: re.Match[str], text: str) -> Test:
    if token["op"] == "*":
        return lambda site: True
    if token["name"]:
        name = token["name"].strip('"')
        return lambda site: site.name == name
    if token["size"]:
        compare, n = _COMPARE[token["cmp"]], int(token["n"])
        return lambda site: compare(site.scale, n)
    if token["range"]:
        field, _, numbers = token["range"].partition(" ")
        wanted = _numbers(numbers)
        field = field.rstrip("s")
        return lambda site: getattr(site, field) in wanted
    word = token["word"]
    if word in _KINDS:
        return lambda site: site.kind == word
    if word in _PLACES:
        return lambda site: site.place == word
    raise ValueError(f"cannot read {token[0].strip()!r} in the site selector {text!r}; {_HELP}")


@dataclass(frozen=True)
class HeadSet:
    """Heads chosen per site: `HeadSet("block 7-9: 3,5; mid: *")`."""

    text: str

    def __post_init__(self) -> None:
        self._clauses()

    def _clauses(self) -> list[tuple[Test, set[int] | None]]:
        clauses = []
        for clause in filter(None, (part.strip() for part in self.text.split(";"))):
            selector, colon, heads = clause.rpartition(":")
            if not colon or not re.fullmatch(r"\*|\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*", heads.strip()):
                raise ValueError(
                    f"cannot read {clause!r} in the head set {self.text!r}; write 'selector: 3,5' or 'selector: *'"
                )
            clauses.append((_parse(selector), None if heads.strip() == "*" else _numbers(heads)))
        if not clauses:
            raise ValueError("an empty head set; write 'selector: 3,5' or 'selector: *'")
        return clauses

    def heads(self, site: Site) -> list[int]:
        """The chosen heads of this site, sorted.  Raises ValueError when a number is not one of its heads."""
        chosen: set[int] = set()
        for test, numbers in self._clauses():
            if test(site):
                chosen |= set(range(site.heads)) if numbers is None else numbers
        if chosen and max(chosen) >= site.heads:
            raise ValueError(f"head {max(chosen)} of {self.text!r}: {site.name} has heads 0-{site.heads - 1}")
        return sorted(chosen)

    def mask(self, site: Site, like: Tensor | None = None) -> Float[Tensor, "h 1 1"]:
        """1 for chosen heads, 0 for the others; in the dtype and on the device of `like`."""
        mask = torch.zeros(site.heads, 1, 1) if like is None else like.new_zeros(site.heads, 1, 1)
        mask[self.heads(site)] = 1
        return mask

    def __or__(self, other: HeadSet) -> HeadSet:
        return HeadSet(f"{self.text}; {other.text}")

    def check(self, sites: Sequence[Site]) -> None:
        """Raises ValueError when no site has a chosen head."""
        if not any([self.heads(site) for site in sites]):
            raise ValueError(f"the head set {self.text!r} chooses no head; this model has {describe(sites)}")
