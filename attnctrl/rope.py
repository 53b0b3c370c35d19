"""Rotary position embedding of queries and keys, as data that can be turned back, forth and scaled.

A token at position p (one number per axis) has its channel pair (x1, x2) of frequency w rotated by the angle p w:
    (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos)
so tokens may be moved to other positions after the fact, and their channels scaled per frequency as if before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

__all__ = ["Rope", "frequencies"]


def frequencies(dim: int, theta: float = 10000.0) -> Float64[Tensor, "pairs"]:
    """theta^(-2i / dim) for i < dim / 2: the frequencies of an axis of `dim` channels."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


@dataclass(frozen=True, eq=False)
class Rope:
    """Where each token lies, and how its channels turn with it.

    positions  one row per token, text included
    omega      for each axis, the frequencies of its channel pairs; the axes' pairs follow each other
    layout     "interleaved": pairs are the channels (2i, 2i + 1); "half": (i, i + d / 2)
    plain      True for tokens that are not rotated; None where all are

    Angles are taken in float64 (float32 on devices without it); channels turn in float32, float64 ones in float64, and
    come back in their own dtype.  In half precision each turn rounds once more than the model does.
    """

    positions: Float64[Tensor, "n axes"]
    omega: tuple[Float64[Tensor, "pairs"], ...]
    layout: Literal["interleaved", "half"] = "interleaved"
    plain: Bool[Tensor, "n"] | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("interleaved", "half"):
            raise ValueError(f"layout {self.layout!r} of a Rope; the layouts are 'interleaved' and 'half'")
        if self.positions.ndim != 2 or self.positions.shape[1] != len(self.omega):
            raise ValueError(
                f"positions of shape {tuple(self.positions.shape)} with frequencies of {len(self.omega)} axes; they "
                "have the shape (tokens, axes)"
            )

    def __len__(self) -> int:
        return self.positions.shape[0]

    @property
    def pairs(self) -> int:
        """Channel pairs of all axes, half the channels of a head."""
        return sum(len(omega) for omega in self.omega)

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The axis each channel pair turns with."""
        return tuple(axis for axis, omega in enumerate(self.omega) for _ in omega)

    def rotate(
        self, x: Float[Tensor, "b h n d"], delta: Float[Tensor, "#n axes"] | Float[Tensor, "axes"] | Sequence[float]
    ) -> Float[Tensor, "b h n d"]:
        """`x`, moved by `delta` from where it is."""
        shift = torch.as_tensor(delta, device=self.positions.device).to(self.positions.dtype)
        if shift.ndim not in (1, 2) or shift.shape[-1] != len(self.omega):
            raise ValueError(
                f"delta of shape {tuple(shift.shape)} for {len(self.omega)} axes; give one number per axis, for all "
                "tokens or for each"
            )
        shift = shift.expand(len(self), -1)
        if self.plain is not None:
            shift = shift.masked_fill(self.plain[:, None], 0)
        return self._turn(x, shift)

    def unrotate(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """`x` as it was before the model rotated it."""
        return self.rotate(x, -self.positions)

    def rerotate(self, x: Float[Tensor, "b h n d"], to_positions: Float[Tensor, "n axes"]) -> Float[Tensor, "b h n d"]:
        """`x` as the model would have rotated it at `to_positions`."""
        return self.rotate(x, to_positions.to(self.positions) - self.positions)

    def scale(self, x: Float[Tensor, "b h n d"], m: Float[Tensor, "#n pairs"] | Float[Tensor, "pairs"]) -> Tensor:
        """`x` with both channels of each pair multiplied by `m`: the same before as after rotation."""
        if m.shape[-1] != self.pairs:
            raise ValueError(f"m of shape {tuple(m.shape)} for {self.pairs} channel pairs; give one factor per pair")
        factor = m.repeat_interleave(2, -1) if self.layout == "interleaved" else torch.cat((m, m), -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * factor.to(x.device, wide)).to(x.dtype)

    def take(self, index: Tensor | slice) -> Rope:
        """The Rope of the tokens at `index`."""
        return Rope(self.positions[index], self.omega, self.layout, None if self.plain is None else self.plain[index])

    def concat(self, other: Rope) -> Rope:
        """The Rope of these tokens and then those of `other`, which must turn alike."""
        same = self.omega is other.omega or (
            len(self.omega) == len(other.omega) and all(map(torch.equal, self.omega, other.omega))
        )
        if not (same and self.layout == other.layout):
            raise ValueError("tokens whose rotary embeddings have other frequencies or another layout cannot be joined")
        plain = None
        if self.plain is not None or other.plain is not None:
            plain = torch.cat([self._plain(), other._plain()])
        return Rope(torch.cat((self.positions, other.positions)), self.omega, self.layout, plain)

    def unrotated(self, count: int) -> Rope:
        """`count` tokens beside these that are not rotated."""
        return Rope(
            self.positions.new_zeros(count, len(self.omega)), self.omega, self.layout,
            torch.ones(count, dtype=torch.bool, device=self.positions.device),
        )  # fmt: skip

    def _plain(self) -> Tensor:
        if self.plain is not None:
            return self.plain
        return torch.zeros(len(self), dtype=torch.bool, device=self.positions.device)

    def _turn(self, x: Tensor, shift: Float[Tensor, "n axes"]) -> Tensor:
        if x.shape[-1] != 2 * self.pairs or x.shape[-2] != len(self):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} with the Rope of {len(self)} tokens and {2 * self.pairs} channels"
            )
        angles = torch.cat([shift[:, a, None] * omega.to(shift) for a, omega in enumerate(self.omega)], -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(x.device, wide), angles.sin().to(x.device, wide)  # (n, pairs)
        if self.layout == "interleaved":
            first, second = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = x.to(wide).chunk(2, -1)
        turned = first * cos - second * sin, first * sin + second * cos
        out = torch.stack(turned, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(turned, -1)
        return out.to(x.dtype)
