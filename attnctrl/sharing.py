"""What the methods that share keys and values between rows are made of.

A target row reads keys and values of a reference row.  Its reference is the row of another prompt with the same branch,
image and variant, so that conditional and unconditional rows never mix.  In joint attention the image tokens are
shared and the text stays each row's own, unless a method says otherwise.

Every function takes a call and returns a call (or an output); none forms a map but `contrast`, which needs its entries.

Shapes: b batch entries, h heads, n queries, m keys, d channels of queries and keys, c of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .attend import chunks
from .call import (
    Attend,
    AttentionCall,
    Bias,
    DenoiseCall,
    MissingRows,
    Rows,
    Site,
    Step,
    Tokens,
    Window,
    batch_index,
    in_window,
)

__all__ = [
    "UNSHARED",
    "Pairs",
    "Part",
    "Sharing",
    "append_keys",
    "check_window",
    "contrast",
    "from_rows",
    "gather_keys",
    "gather_rows",
    "image_of",
    "join_keys",
    "keys_of",
    "late_sites",
    "outer_mix",
    "pairs",
    "part",
    "partner_rows",
    "queries_from",
    "shift_keys",
    "token_adain",
]

T = TypeVar("T")

UNSHARED = "unshared"  # variant of rows that a guidance adds to see what sharing changes: they share nothing


# ----------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Part:
    """Some batch entries of a call, and the table of their rows."""

    index: Int[Tensor, "t"]
    rows: Rows

    def of(self, call: AttentionCall) -> AttentionCall:
        """The call for these batch entries only."""
        return call.borrow(self.index).replace(value=call.value[self.index], rows=self.rows)


@dataclass(frozen=True)
class Pairs:
    """Who reads whom: for every batch entry the one it reads (itself, where it is no target), the targets, and the
    others."""

    reference: Int[Tensor, "b"]
    targets: Part
    others: Part

    @property
    def of_targets(self) -> Int[Tensor, "t"]:
        """The entry that each target reads."""
        return self.reference[self.targets.index]


def partner_rows(rows: Rows, of: Iterable[int], prompt: int) -> list[int]:
    """For each row of the table in `of`, the row of `prompt` with its branch, image and variant.  Raises
    MissingRows."""
    table = rows.table()
    at = {entry: i for i, entry in enumerate(table)}
    found = []
    for row in of:
        branch, _, image, variant = table[row]
        wanted = (branch, prompt, image, variant)
        if wanted not in at:
            raise MissingRows(
                f"row {row}, {table[row]}, shares with prompt {prompt}, and no row {wanted} is in this call of the "
                f"denoiser, which has (branch, prompt, image, variant) {table}; run both prompts in one pipeline call, "
                "and hand inward the rows that others read"
            )
        found.append(at[wanted])
    return found


def part(rows: Rows, chosen: Sequence[int], device: torch.device) -> Part:
    """The batch entries of the rows `chosen` of the table."""
    return Part(batch_index(tuple(chosen), rows.fold, device), rows.take(chosen))


def pairs(
    rows: Rows,
    device: torch.device,
    reference: int,
    *,
    targets: Callable[[str, int, str], bool] = lambda branch, prompt, variant: True,
) -> Pairs | None:
    """Rows that read the row of prompt `reference`: all of other prompts that `targets(branch, prompt, variant)`
    chooses.  None where there are none."""
    chosen = [
        i for i, (b, p, _, variant) in enumerate(rows.table()) if p != reference and targets(b, p, variant)
    ]  # fmt: skip
    if not chosen:
        return None
    return _paired(rows, chosen, partner_rows(rows, chosen, reference), device)


def _paired(rows: Rows, chosen: Sequence[int], read: Sequence[int], device: torch.device) -> Pairs:
    own = list(range(len(rows)))
    for row, reference in zip(chosen, read, strict=True):
        own[row] = reference
    others = [i for i in range(len(rows)) if i not in chosen]
    return Pairs(batch_index(tuple(own), rows.fold, device), part(rows, chosen, device), part(rows, others, device))


class Sharing(Generic[T]):
    """What the rows of a call share, worked out before each denoiser call, outside compiled graphs, and kept; a call
    made by hand works it out itself.

    make   (rows, device) -> what is shared, or None for nothing
    steps  when
    """

    def __init__(self, make: Callable[[Rows, torch.device], T | None], steps: Window) -> None:
        self._make, self.steps = make, steps
        self._kept: dict[tuple[Rows, torch.device], T | None] = {}
        self._now: tuple[tuple[Rows, T | None], ...] = ()
        self._on = False

    def begin(self, call: DenoiseCall, step: Step | None = None) -> None:
        """For all rows of the denoiser call, and for its conditional ones, as observers ask; `step` where it is to be
        counted otherwise."""
        self._on = in_window(step or call.step, self.steps)
        cond = call.rows.take(call.rows.where(branch="cond").tolist())
        tables = dict.fromkeys(rows for rows in (call.rows, cond) if len(rows))
        self._now = tuple((rows, self._get(rows, call.latents.device)) for rows in tables)

    def __call__(self, call: AttentionCall, step: Step | None = None) -> T | None:
        """What is shared at this step; None for nothing."""
        return self.among(call.rows or call.table, step or call.step, call.query.device)

    def among(self, rows: Rows, step: Step, device: torch.device) -> T | None:
        """The same for these rows."""
        if not (self._on if self._now else in_window(step, self.steps)):
            return None
        for known, plan in self._now:
            if known == rows:
                return plan
        return self._get(rows, device)

    def _get(self, rows: Rows, device: torch.device) -> T | None:
        key = (rows, device)
        if key not in self._kept:
            self._kept[key] = self._make(rows, device)
        return self._kept[key]


def check_window(name: str, window: Window) -> None:
    """Raises ValueError when a step window is not (start, stop) with 0 <= start <= stop."""
    if len(window) != 2 or not 0 <= window[0] <= window[1]:
        raise ValueError(f"{name} is a window (start, stop), fractions of the run or two step indices, not {window!r}")


# ---------------------------------------------------------------------------------------------------------------- sites


def late_sites(sites: Sequence[Site]) -> list[Site]:
    """Where appearance is decided and layout is not: up-block self-attention at the latent's side and half of it.

    In Stable Diffusion 1.5 these are the six layers of up_blocks.2 and up_blocks.3, which MasaCtrl (layers from 10 on),
    Cross-Image Attention (32x32 and 64x64) and StyleID (output blocks 6-11) name; in SDXL the six of up_blocks.1,
    which Visual Style Prompting names.  A UNet without any there: its finest ones.  Transformers have no such split:
    the second half of their self and joint sites, which is ours.
    """
    found = [site for site in sites if site.kind in ("self", "joint")]
    up = [site for site in found if site.place == "up"]
    if up:
        limit = max(2, min(site.scale for site in up))
        return [site for site in up if site.scale <= limit]
    return found[len(found) // 2 :]


def image_of(call: AttentionCall) -> str | None:
    """The segment whose keys rows share: the image's in joint attention, else None for all.

    Raises ValueError for joint attention whose segments are not known.
    """
    if call.kind != "joint":
        return None
    if "image" not in call.key_tokens:
        raise ValueError(
            f"sharing needs to know the image's keys of joint attention; key_tokens of {call.site.name or 'this call'} "
            f"has the segments {[segment.name for segment in call.key_tokens.segments]}"
        )
    return "image"


# ----------------------------------------------------------------------------------------------------------------- keys


def from_rows(call: AttentionCall, index: Int[Tensor, "b"], segment: str | None = None) -> AttentionCall:
    """The call whose keys and values, with their side of mask and bias, are those of the batch entries `index`; with a
    `segment`, only the keys of that one."""
    if segment is None:
        taken = lambda x, dim: x[index]  # noqa: E731
    else:
        keys = call.key_tokens[segment]

        def taken(x: Tensor, dim: int) -> Tensor:
            stop = keys.start + keys.length
            parts = (x.narrow(dim, 0, keys.start), x.narrow(dim, keys.start, keys.length)[index],
                     x.narrow(dim, stop, x.shape[dim] - stop))  # fmt: skip
            return torch.cat(parts, dim)

    mask = call.mask
    if mask is not None and mask.shape[0] > 1:
        mask = taken(mask, 3)
    bias = tuple(Bias(b.left, b.right if b.right.shape[0] == 1 else taken(b.right, 2)) for b in call.bias)
    return call.replace(key=taken(call.key, 2), value=taken(call.value, 2), mask=mask, bias=bias)


def keys_of(call: AttentionCall, segment: str | None) -> AttentionCall:
    """The call over the keys of `segment` only; None: all of them."""
    if segment is None:
        return call
    keys = call.key_tokens[segment]
    cut = lambda x, dim: x.narrow(dim, keys.start, keys.length)  # noqa: E731
    return call.replace(
        key=cut(call.key, 2),
        value=cut(call.value, 2),
        mask=None if call.mask is None else cut(call.mask, 3),
        bias=tuple(Bias(bias.left, cut(bias.right, 2)) for bias in call.bias),
        key_tokens=call.key_tokens.only(segment),
    )


def shift_keys(
    call: AttentionCall, shift: float | Float[Tensor, "#b #h n"], segment: str | None = None
) -> AttentionCall:
    """The call with `shift`, one number or one per query, added to the scores of the keys of `segment` (None: of
    all)."""
    ones = call.key.new_ones(1, 1, call.key.shape[2], 1)
    if segment is not None:
        ones = call.key_tokens.put(torch.zeros_like(ones), segment, call.key_tokens.get(ones, segment))
    if isinstance(shift, Tensor):
        added = Bias(shift[..., None], ones)
    elif shift == 0:
        return call
    else:
        added = Bias(None, ones * shift)
    return call.replace(bias=(*call.bias, added))


def join_keys(call: AttentionCall, other: AttentionCall, name: str = "shared") -> AttentionCall:
    """The queries of `call` over its keys and then those of `other`, each with its own mask and bias: one softmax.

    Segments of the other's keys are called "<name>:<segment>".
    """
    return call.replace(
        key=torch.cat((call.key, other.key), dim=2),
        value=torch.cat((call.value, other.value), dim=2),
        mask=_join_masks(call, other),
        bias=_join_biases(call, other),
        key_tokens=_join_tokens(call.key_tokens, other.key_tokens, name),
    )


def append_keys(
    call: AttentionCall,
    key: Float[Tensor, "b h s d"],
    value: Float[Tensor, "b h s c"],
    tokens: Tokens | None = None,
    shift: float = 0.0,
    name: str = "shared",
) -> AttentionCall:
    """The call over its keys and `key`, whose scores are raised by `shift`; -inf leaves them out.

    softmax([scale q k^T, scale q key^T + shift]) [v, value].  They have no mask; `tokens` describes them.
    """
    if math.isnan(shift) or shift == math.inf:
        raise ValueError(f"shift is added to the scores of the appended keys: a number or -inf, not {shift}")
    if shift == -math.inf:
        return call
    other = call.replace(key=key, value=value, mask=None, bias=(), key_tokens=tokens or Tokens())
    return join_keys(call, shift_keys(other, shift), name)


def gather_keys(call: AttentionCall, keep: Bool[Tensor, "#b m"] | Int[Tensor, "#b s"]) -> AttentionCall:
    """The call over some of its keys, the same for all queries and heads of a row: fewer keys instead of a mask.

    keep  which keys, True or False, or their numbers.  Rows that keep fewer than others are filled up by keys that are
          masked.

    Raises ValueError when a row keeps no key.
    """
    rows, m = call.key.shape[0], call.key.shape[2]
    valid: Tensor | None = None
    if keep.dtype == torch.bool:
        if keep.shape[-1] != m:
            raise ValueError(f"keep says of {keep.shape[-1]} keys whether they stay; the call has {m}")
        counts = keep.sum(-1)
        most = int(counts.max())
        if int(counts.min()) == 0:
            raise ValueError(f"row {int(counts.argmin())} keeps none of its {m} keys: its softmax would be empty")
        valid = torch.arange(most, device=keep.device) < counts[:, None]
        keep = keep.to(torch.uint8).argsort(stable=True, dim=-1, descending=True)[:, :most]
        valid = None if bool(valid.all()) else valid
    index = keep.expand(rows, -1)  # (b, s)

    def taken(x: Tensor, dim: int) -> Tensor:
        shape = [1] * x.ndim
        shape[0], shape[dim] = index.shape
        return torch.take_along_dim(x, index.reshape(shape), dim)

    new = call.replace(
        key=taken(call.key, 2),
        value=taken(call.value, 2),
        mask=None if call.mask is None else taken(call.mask, 3),
        bias=tuple(Bias(bias.left, taken(bias.right, 2)) for bias in call.bias),
        key_tokens=Tokens(),
    )
    return new if valid is None else new.forbid(~valid[:, None, None])


def _join_masks(call: AttentionCall, other: AttentionCall) -> Tensor | None:
    if call.mask is None and other.mask is None:
        return None
    masks = [
        side.key.new_ones((1, 1, 1, side.key.shape[2]), dtype=torch.bool) if side.mask is None else side.mask
        for side in (call, other)
    ]
    if any(mask.dtype != torch.bool for mask in masks):
        masks = [
            torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else mask
            for mask in masks
        ]
    lead = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    return torch.cat([mask.expand(*lead, -1) for mask in masks], dim=-1)


def _join_biases(call: AttentionCall, other: AttentionCall) -> tuple[Bias, ...]:
    """Biases that both sides have (by their left) become one; of the rest, the other side's keys have none."""
    same = 0
    for a, b in zip(call.bias, other.bias, strict=False):
        if a.left is not b.left or a.right.shape[-1] != b.right.shape[-1]:
            break
        same += 1
    joined = [_cat(a.left, a.right, b.right) for a, b in zip(call.bias[:same], other.bias[:same], strict=True)]
    nothing = lambda side, right: right.new_zeros(1, 1, side.key.shape[2], right.shape[-1])  # noqa: E731
    joined += [_cat(a.left, a.right, nothing(other, a.right)) for a in call.bias[same:]]
    joined += [_cat(b.left, nothing(call, b.right), b.right) for b in other.bias[same:]]
    return tuple(joined)


def _cat(left: Tensor | None, first: Tensor, second: Tensor) -> Bias:
    lead = torch.broadcast_shapes(first.shape[:2], second.shape[:2])
    return Bias(left, torch.cat([x.expand(*lead, -1, -1) for x in (first, second)], dim=2))


def _join_tokens(first: Tokens, second: Tokens, name: str) -> Tokens:
    renamed = tuple(replace(segment, name=f"{name}:{segment.name}") for segment in second.segments)
    return first.concat(replace(second, segments=renamed))


# ----------------------------------------------------------------------------------------------- statistics and outputs


def token_adain(
    x: Float[Tensor, "b h n d"],
    index: Int[Tensor, "b"],
    *,
    tokens: Tokens | None = None,
    segment: str | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "b h n d"]:
    """`x` with mean and deviation over its tokens, per row, head and channel, of the batch entries `index`.

    (x - mean) / std * std_ref + mean_ref with std = sqrt(var + eps), var unbiased, in float32 (float64 for float64).
    Entries that are their own reference keep their bits.  With a `segment` of `tokens` only those tokens count and
    change.
    """
    if segment is not None:
        if tokens is None:
            raise ValueError(f"segment {segment!r} of which tokens? Give tokens=call.query_tokens or call.key_tokens")
        return tokens.put(x, segment, token_adain(tokens.get(x, segment), index, eps=eps))
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = torch.var_mean(exact, dim=2, keepdim=True)
    std = (var + eps).sqrt()
    out = ((exact - mean) / std * std[index] + mean[index]).to(x.dtype)
    own = index == torch.arange(len(index), device=index.device)
    return torch.where(own[:, None, None, None], x, out)


def queries_from(call: AttentionCall, query: Float[Tensor, "b h n d"], segment: str | None) -> Float[Tensor, "b h n d"]:
    """The call's queries with those of `segment` (None: all) taken from `query`."""
    if segment is None:
        return query
    tokens = call.query_tokens
    return tokens.put(call.query, segment, tokens.get(query, segment))


def gather_rows(*outputs: tuple[Part, Float[Tensor, "t h n c"]]) -> Float[Tensor, "b h n c"]:
    """The outputs of parts of the rows, which together are all, in the order of the batch."""
    first = outputs[0][1]
    whole = first.new_empty(sum(len(out) for _, out in outputs), *first.shape[1:])
    for rows, out in outputs:
        whole = whole.index_copy(0, rows.index, out)
    return whole


def outer_mix(
    attend: Attend, first: AttentionCall, second: AttentionCall, weight: float | Float[Tensor, "#b #h #n 1"]
) -> Float[Tensor, "b h n c"]:
    """weight att(first) + (1 - weight) att(second)."""
    return attend(first) * weight + attend(second) * (1 - weight)


def contrast(call: AttentionCall, strength: float) -> Float[Tensor, "b h n c"]:
    """A' V with A' = clip(s A + (1 - s) / m, 0, 1): each row of the map is stretched around its mean 1 / m, not
    renormalised (arXiv:2311.03335).

    The clip acts on entries, so the map is formed, for some queries after the others, in float32 (float64 for
    float64).
    """
    if not 1 <= strength < math.inf:
        raise ValueError(f"contrast strength is 1 (none) or more, not {strength}")
    m = call.key.shape[2]
    out = []
    for _, logits in chunks(call):
        edited = (logits.softmax(-1) * strength + (1 - strength) / m).clamp(0, 1)
        out.append(edited @ call.value.to(edited.dtype))
    return torch.cat(out, dim=2).to(call.value.dtype)
