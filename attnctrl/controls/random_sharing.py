"""StoryDiffusion's consistent self-attention (arXiv:2405.01434): images of a story see random tokens of each other.

For row i with the identity images j = 1 ... g, same branch and image number, and kept tokens R_j of each:
    out_i = att(q_i, [k_i; k_j[R_j] for j != i], [v_i; v_j[R_j] for j != i])
Images after the identity ones read all of these and are read by none.  R_j is drawn anew in each step at each site, one
for all queries, heads and branches.  Keys are gathered, not masked: n + p (g - 1) n of them; two fused calls at most.

The authors toss a coin per token; here exactly round(p n) tokens of each image are kept, so that all rows have equally
many keys.  Their draws come from one global generator; here from one keyed by (seed, step, site).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, Bias, DenoiseCall, Rows, Site, Step, batch_index
from ..families import site_tokens
from ..sharing import Part, Sharing, append_keys, image_of, keys_of, part, partner_rows

__all__ = ["Group", "RandomSharing", "drawn", "group_of", "shared_tokens", "story_sites"]


_CLOSED = -1e4  # added to a score, its weight is 0 in any dtype


def story_sites(sites: Sequence[Site]) -> list[Site]:
    """Self-attention of the up blocks, the authors'; of transformers, which have none, the second half of the self and
    joint sites, which is ours."""
    found = [site for site in sites if site.kind in ("self", "joint")]
    return [site for site in found if site.place == "up"] or found[len(found) // 2 :]


@dataclass(frozen=True)
class Group:
    """Rows that read equally many others: who they are, and for each the batch entries it reads."""

    readers: Part
    others: Int[Tensor, "t g"]


def group_of(rows: Rows, device: torch.device, identities: int) -> tuple[Group, ...] | None:
    """The rows of the first `identities` prompts, which read each other, and the rows of later ones, which read all of
    these.  None where nobody reads anybody.  Raises MissingRows when an identity is not in the call."""
    groups = []
    for first in (True, False):
        chosen = [i for i, prompt in enumerate(rows.prompt) if (prompt < identities) == first]
        columns: list[list[int]] = []
        for offset in range(identities - 1 if first else identities):
            read = [  # the reader's own prompt is left out
                partner_rows(rows, [i], offset + (first and offset >= rows.prompt[i]))[0] for i in chosen
            ]
            columns.append(read)
        if chosen and columns:
            entries = [batch_index(tuple(column), rows.fold, device) for column in columns]
            groups.append(Group(part(rows, chosen, device), torch.stack(entries, 1)))
    return tuple(groups) or None


def drawn(seed: int, step: Step, site: Site) -> torch.Generator:
    """A generator keyed by (seed, step, site)."""
    key = f"{seed}/{step.index}/{site.denoiser}/{site.name}"
    return torch.Generator("cpu").manual_seed(zlib.crc32(key.encode()))


@dataclass(frozen=True)
class _Draw:
    """Whether a site shares in this step, the same as a shift of the shared scores, and which tokens of each entry."""

    on: bool
    shift: Float[Tensor, ""]
    kept: Int[Tensor, "b k"]


def shared_tokens(
    x: Float[Tensor, "b h n d"], kept: Int[Tensor, "b k"], others: Int[Tensor, "t g"]
) -> Float[Tensor, "t h s d"]:
    """The kept tokens of the entries that each reader reads, one after the other: s = g k."""
    taken = torch.take_along_dim(x, kept[:, None, :, None], dim=2)[others]  # (t, g, h, k, d)
    return taken.transpose(1, 2).flatten(2, 3)


@dataclass(eq=False)
class RandomSharing:
    """The same characters in all images of one pipeline call.

    identities  how many of the first prompts are read by others, the authors' id_length (they advise 3 or more); None:
                all of them
    keep        p, which part of another image's tokens is seen; a function of the site where resolutions differ
    chance      ((start, probability), ...): from this fraction of the run on, a site shares with this probability; the
                authors' 0.7 from step 5 of 50 and 0.9 from step 20 on
    seed        of the draws
    sites       a selector, or a function choosing sites

    The story is one pipeline call: the authors' bank of hidden states for images made later is not kept.
    Raises MissingRows when the other images are not in the same call of the denoiser.
    """

    identities: int | None = None
    keep: float | Callable[[Site], float] = 0.5
    chance: tuple[tuple[float, float], ...] = ((0.1, 0.7), (0.4, 0.9))
    seed: int = 0
    sites: str | Callable[[Sequence[Site]], list[Site]] = story_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows", "segments"})

    _run: Any = field(default=None, init=False, repr=False)
    _now: dict[tuple[str, str], _Draw] = field(default_factory=dict, init=False, repr=False)
    _count: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.identities is not None and self.identities < 1:
            raise ValueError(f"identities is a number of prompts, 1 or more, not {self.identities!r}")
        if not callable(self.keep) and not 0 <= self.keep <= 1:
            raise ValueError(f"keep is a part of the tokens, 0 to 1, not {self.keep!r}")
        if any(not (0 <= start <= 1 and 0 <= p <= 1) for start, p in self.chance):
            raise ValueError(f"chance is pairs (start, probability), each 0 to 1, not {self.chance!r}")
        self._groups: Sharing[tuple[Group, ...]] = Sharing(self._group, (0.0, 1.0))

    def begin_run(self, run: Any) -> None:
        self._run = run

    def begin(self, call: DenoiseCall) -> None:
        """Tokens are drawn outside any compiled graph."""
        if (count := max(call.rows.prompt) + 1) != self._count:
            self._count = count
            self._groups = Sharing(self._group, (0.0, 1.0))
        self._groups.begin(call)
        family, geometry = self._run.family(call.denoiser), self._run.geometry(call.denoiser)
        self._now = {}
        for site in self._run.sites_of(self):
            if site.denoiser == call.denoiser:
                n = site_tokens(site, family, geometry)[1]["image"].length
                self._now[site.denoiser, site.name] = self._draw(call.rows, call.step, site, n, call.latents.device)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        groups = self._groups(call)
        if groups is None:
            return attend(call)
        own = keys_of(call, image_of(call))
        now = self._now.get((call.site.denoiser, call.site.name))
        if now is None or now.kept.shape[0] != call.query.shape[0]:  # a part of the rows, folded rows, or made by hand
            now = self._draw(call.table, call.step, call.site, own.key.shape[2], call.query.device)
        compiling = torch.compiler.is_compiling()  # a graph for all steps: where a site is off its scores say so
        if now.kept.shape[1] == 0 or not (compiling or now.on):
            return attend(call)
        everyone = sum(len(group.readers.rows) for group in groups) == len(call.table)
        out = None if everyone else attend(call)
        for group in groups:
            key, value = (shared_tokens(x, now.kept, group.others) for x in (own.key, own.value))
            shared = append_keys(group.readers.of(call), key, value)
            if compiling:
                own_part = call.key.new_zeros(1, 1, call.key.shape[2], 1)
                right = torch.cat((own_part, now.shift.to(key.dtype).expand(1, 1, key.shape[2], 1)), dim=2)
                shared = shared.replace(bias=(*shared.bias, Bias(None, right)))
            done = attend(shared)
            out = done.new_empty(call.query.shape[0], *done.shape[1:]) if out is None else out
            out = out.index_copy(0, group.readers.index, done)
        assert out is not None
        return out

    def _draw(self, rows: Rows, step: Step, site: Site, n: int, device: torch.device) -> _Draw:
        generator = drawn(self.seed, step, site)
        chance = max(((start, p) for start, p in self.chance if int(start * step.total) <= step.index), default=(0, 0))
        on = bool(torch.rand((), generator=generator) < chance[1])
        p = self.keep(site) if callable(self.keep) else self.keep
        prompts = self._count or max(rows.prompt) + 1
        kept = torch.stack([torch.randperm(n, generator=generator)[: round(p * n)] for _ in range(prompts)])
        entries = [prompt for prompt in rows.prompt for _ in range(rows.fold)]
        return _Draw(on, torch.tensor(0.0 if on else _CLOSED, device=device), kept[entries].to(device))

    def _group(self, rows: Rows, device: torch.device) -> tuple[Group, ...] | None:
        prompts = self._count or max(rows.prompt) + 1
        return group_of(rows, device, min(self.identities or prompts, prompts))
