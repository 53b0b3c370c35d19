"""IR-Diffusion's reposition (arXiv:2411.19261): a target sees the reference's subjects at its own places and sizes.

For a target row i, with K_a, V_a the reference's tokens in the box of subject a, brought to the target's box:
    out_i = att(q_i, [k_i; K_1 ... K_s], [v_i; V_1 ... V_s])      queries in the box of a see no other subject's K
    UNets         K_a, V_a are resampled bilinearly from the reference's box to the size of the target's
    RoPE models   keys turn to the positions p' = t + (p - r) size_t / size_r, r and t the corners of the boxes; values
                  stay: exact, nothing is resampled
One fused call per target prompt and one for the other rows; what a query may not see is a bias of rank s.

The authors' code is not public: that keys and values move (not hidden states), the up blocks, all steps and boxes given
by hand are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..call import Attend, AttentionCall, Bias, DenoiseCall, Rows, Segment, Site, Tokens, Window, batch_index
from ..sharing import Part, Sharing, append_keys, check_window, image_of, keys_of, part, partner_rows
from .isolation import CLOSED, Box, cover
from .random_sharing import story_sites

__all__ = ["SubjectReposition"]

Span = tuple[int, int, int, int]  # first row, first column, rows, columns


@dataclass(frozen=True)
class _Plan:
    """For each target prompt its rows and the batch entries they read, and the rows of the others."""

    targets: tuple[tuple[int, Part, Int[Tensor, "t"]], ...]
    others: Part


@dataclass(eq=False)
class SubjectReposition:
    """Give targets the reference's subjects, where the targets have them.

    boxes      of each subject in the reference's image, (left, top, right, bottom) in fractions
    targets    {prompt: boxes of the same subjects there, None for one that is not there}
    reference  the prompt whose subjects they are; its rows stay plain
    steps      when: fractions of the run, or two step indices
    sites      a selector, or a function choosing sites

    Raises ValueError for boxes that do not fit; MissingRows when the reference is not in the call.
    """

    boxes: Sequence[Box]
    targets: Mapping[int, Sequence[Box | None]]
    reference: int = 0
    steps: Window = (0.0, 1.0)
    sites: str | Callable[[Sequence[Site]], list[Site]] = story_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows", "segments"})

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        for prompt, boxes in self.targets.items():
            if prompt == self.reference or len(boxes) != len(self.boxes):
                raise ValueError(
                    f"targets has {len(boxes)} boxes for prompt {prompt}; it needs one for each of the "
                    f"{len(self.boxes)} subjects, of prompts other than the reference, {self.reference}"
                )
        self._share: Sharing[_Plan] = Sharing(self._plan, self.steps)

    def begin(self, call: DenoiseCall) -> None:
        self._share.begin(call)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._share(call)
        if plan is None:
            return attend(call)
        if call.grid is None:
            name, segments = call.site.name or "this call", call.query_tokens.segments
            raise ValueError(f"reposition needs the image's grid, and query_tokens of {name} has {segments}")
        plain = attend(plan.others.of(call))
        out = plain.new_empty(call.query.shape[0], *plain.shape[1:]).index_copy(0, plan.others.index, plain)
        own = keys_of(call, image_of(call))
        for prompt, rows, read in plan.targets:
            moves = [
                (_span(box, call.grid), _span(there, call.grid))
                for box, there in zip(self.boxes, self.targets[prompt], strict=True)
                if there is not None
            ]
            placed = [_placed(own, read, call.grid, *move) for move in moves]
            shared = rows.of(call)
            for number, (key, value, tokens) in enumerate(placed):
                shared = append_keys(shared, key, value, tokens, name=f"subject:{number}")
            there = [to for _, to in moves]
            bias = _apart(call, there, [key.shape[2] for key, _, _ in placed])
            out = out.index_copy(0, rows.index, attend(shared.replace(bias=(*shared.bias, bias))))
        return out

    def _plan(self, rows: Rows, device: torch.device) -> _Plan | None:
        targets = []
        for prompt, boxes in self.targets.items():
            chosen = [i for i, p in enumerate(rows.prompt) if p == prompt]
            if chosen and any(box is not None for box in boxes):
                read = batch_index(tuple(partner_rows(rows, chosen, self.reference)), rows.fold, device)
                targets.append((prompt, part(rows, chosen, device), read))
        if not targets:
            return None
        moved = {prompt for prompt, _, _ in targets}
        rest = [i for i, prompt in enumerate(rows.prompt) if prompt not in moved]
        return _Plan(tuple(targets), part(rows, rest, device))


def _span(box: Box, grid: tuple[int, ...]) -> Span:
    """The rows and columns of tokens whose middle lies in a box."""
    height, width = grid[-2:]
    inside = cover(box, (height, width)).unflatten(0, (height, width))
    rows, columns = inside.any(1).nonzero()[:, 0].tolist(), inside.any(0).nonzero()[:, 0].tolist()
    return rows[0], columns[0], len(rows), len(columns)


def _placed(
    own: AttentionCall, read: Int[Tensor, "t"], grid: tuple[int, ...], source: Span, target: Span
) -> tuple[Tensor, Tensor, Tokens | None]:
    """Keys and values of the reference's box, at the target's box; and what the keys are, where they have positions."""
    row, column, rows, columns = source
    rope = own.key_tokens.rope

    def cut(x: Tensor) -> Tensor:  # (b, h, frames, rows, columns, d)
        whole = x[read].unflatten(2, (math.prod(grid[:-2]), *grid[-2:]))
        return whole[:, :, :, row : row + rows, column : column + columns]

    if rope is None:
        return _resized(cut(own.key), target[2:]), _resized(cut(own.value), target[2:]), None
    at = torch.arange(len(rope), device=rope.positions.device).reshape(-1, *grid[-2:])
    at = at[:, row : row + rows, column : column + columns].flatten()
    places = rope.take(at)
    down, right = at // grid[-1] % grid[-2], at % grid[-1]
    moved = places.positions.clone()
    moved[:, -2] += target[0] + (down - row) * (target[2] / rows) - down
    moved[:, -1] += target[1] + (right - column) * (target[3] / columns) - right
    key = places.rerotate(cut(own.key).flatten(2, 4), moved)
    tokens = Tokens((Segment("image", 0, len(at)),), replace(places, positions=moved))
    return key, cut(own.value).flatten(2, 4), tokens


def _resized(x: Float[Tensor, "b h f y x d"], size: tuple[int, int]) -> Float[Tensor, "b h s d"]:
    """Each frame resampled bilinearly to `size`, in float32 (float64 for float64)."""
    if x.shape[3:5] == size:
        return x.flatten(2, 4)
    _, h, f, _, _, d = x.shape
    flat = x.permute(0, 1, 2, 5, 3, 4).flatten(1, 3).to(torch.promote_types(x.dtype, torch.float32))
    resized = F.interpolate(flat, size=size, mode="bilinear").to(x.dtype).unflatten(1, (h, f, d))
    return resized.permute(0, 1, 2, 4, 5, 3).flatten(2, 4)


def _apart(call: AttentionCall, boxes: Sequence[Span], lengths: Sequence[int]) -> Bias:
    """Queries in the box of one subject do not see the keys appended for another."""
    grid, image, query = call.grid, call.query_tokens["image"], call.query
    assert grid is not None
    at = torch.arange(image.length, device=query.device)
    down, right = at // grid[-1] % grid[-2], at % grid[-1]
    inside = [
        (down >= row) & (down < row + rows) & (right >= column) & (right < column + columns)
        for row, column, rows, columns in boxes
    ]
    left = F.pad(
        torch.stack(inside, 1).to(query.dtype), (0, 0, image.start, query.shape[2] - image.start - image.length)
    )
    apart = CLOSED * (1 - torch.eye(len(boxes), dtype=query.dtype, device=query.device))
    own = apart.new_zeros(call.key.shape[2], len(boxes))
    right_side = torch.cat([own, *(apart[a].expand(length, -1) for a, length in enumerate(lengths))])
    return Bias(left[None, None], right_side[None, None])
