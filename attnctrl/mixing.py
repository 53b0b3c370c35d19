"""Edited attention without a map: prompt-to-prompt as two products with the target's values (arXiv:2208.01626).

With the tables of `alignment.py`, P (n_src, n_tgt) = M, or a_n 1[map(n) = w], or the identity, and
    S = P diag(c alpha),    beta = (1 - a) c alpha + (1 - alpha)        (a = 1 but for refine)
the edited attention times the values is, since A* V = (A_s S + A_t diag(beta)) V and products are associative,
    out_t = att(q_s, k_s, S v_t) + att(q_t, k_t, diag(beta) v_t)
S is mostly a partial permutation.  Its product with v gathers rows, bit for bit, and multiplies matrices only for the
source tokens that are split over several target tokens; float32 (float64 for float64 values), cast back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Mixing", "Remap", "mix", "mixing", "reference", "remap"]

Refined = tuple[Int[Tensor, "target"], Float[Tensor, "target"]]  # (map, a) of `alignment.refine_mapper`


def reference(
    mapper: Float[Tensor, "source target"] | Refined, n_src: int | None = None
) -> tuple[Float[Tensor, "source target"], Float[Tensor, "target"]]:
    """P (n_src, n_tgt) and a (n_tgt,) of a replace or refine mapper.  `n_src` for refine, if it is not n_tgt."""
    if isinstance(mapper, Tensor):
        return mapper, torch.ones_like(mapper[0])
    index, matched = mapper
    rows = torch.arange(n_src or len(index), device=index.device)
    return (rows[:, None] == index) * matched, matched


def mix(
    mapper: Float[Tensor, "source target"] | Refined | None,
    alpha: Float[Tensor, "*b target"],
    scale: Float[Tensor, "*#b target"] | None = None,
    *,
    n_src: int | None = None,
) -> tuple[Float[Tensor, "*b source target"], Float[Tensor, "*b target"]]:
    """S (..., n_src, n_tgt) and beta (..., n_tgt) for alpha and the factors `scale` = c of an equalizer (..., n_tgt).

    `mapper`: M of replace, (map, a) of refine, None for reweighting alone.  With an equalizer the inner edit's own
    schedule is not used: alpha is the equalizer's.
    """
    if mapper is None:
        mapper = torch.eye(alpha.shape[-1], dtype=alpha.dtype, device=alpha.device)
    source, matched = reference(mapper, n_src)
    weight = alpha if scale is None else scale * alpha
    return source * weight[..., None, :], (1 - matched) * weight + (1 - alpha)


@dataclass(frozen=True)
class Remap:
    """v -> S v, in tensors only: nothing is decided when it is applied, so it compiles as one graph.  See `remap`."""

    index: Int[Tensor, "*b source"]  # the target token whose value the source token takes
    weight: Float[Tensor, "*b source"]  # its factor; 0 if it takes none
    rows: Int[Tensor, "r"]  # source tokens that are split over several target tokens, in some row of the batch
    split: Bool[Tensor, "*b r"]  # whether in this one
    columns: Int[Tensor, "c"]  # target tokens they are split over
    dense: Float[Tensor, "*b r c"]

    def __call__(self, v: Float[Tensor, "*h target d"]) -> Float[Tensor, "*h source d"]:
        """S v (..., n_src, d) for v (..., n_tgt, d); with a batched S, v is (b, h, n_tgt, d)."""
        exact = torch.promote_types(v.dtype, torch.float32)
        index, weight, split, dense = self.index, self.weight[..., None], self.split[..., None], self.dense
        if index.ndim == 2:  # one S per row: broadcast over heads
            weight, split, dense = weight[:, None], split[:, None], dense[:, None]
            taken = torch.take_along_dim(v, index[:, None, :, None], dim=-2)
        else:
            taken = v.index_select(-2, index)
        out = torch.where(weight == 0, 0, taken.to(exact) * weight.to(exact)).to(v.dtype)
        if self.rows.numel() == 0:
            return out
        mixed = (dense.to(exact) @ v.index_select(-2, self.columns).to(exact)).to(v.dtype)
        return out.index_copy(-2, self.rows, torch.where(split, mixed, out.index_select(-2, self.rows)))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Remap:
        """On `device`, ready for values of `dtype`."""
        exact = None if dtype is None else torch.promote_types(dtype, torch.float32)
        return replace(
            self,
            index=self.index.to(device),
            weight=self.weight.to(device=device, dtype=exact),
            rows=self.rows.to(device),
            split=self.split.to(device),
            columns=self.columns.to(device),
            dense=self.dense.to(device=device, dtype=exact),
        )


def remap(matrix: Float[Tensor, "*b source target"]) -> Remap:
    """The product with S (n_src, n_tgt) or (b, n_src, n_tgt).

    A source token with one entry takes that row of v times the entry: bit for bit if it is 1.  One without entries
    gives 0.  One with several is a float32 product over the target tokens concerned.
    """
    entries = matrix != 0
    split = entries.sum(-1) > 1  # (..., n_src)
    index = entries.to(torch.uint8).argmax(-1)
    weight = matrix.gather(-1, index[..., None])[..., 0]
    rows = split.reshape(-1, split.shape[-1]).any(0).nonzero()[:, 0]
    columns = (entries & split[..., None]).reshape(-1, matrix.shape[-1]).any(0).nonzero()[:, 0]
    dense = matrix.index_select(-2, rows).index_select(-1, columns)
    return Remap(index, weight, rows, split.index_select(-1, rows), columns, dense)


@dataclass(frozen=True)
class Mixing:
    """out_t = att(q_s, k_s, source(v_t)) + att(q_t, k_t, own(v_t)).  Made by `mixing`.

    `uses_source`, `uses_own`: whether each product is there at all; `plain`: whether nothing is edited.  Python
    booleans, set when it is made.
    """

    source: Remap
    beta: Float[Tensor, "*b target"]
    uses_source: bool
    uses_own: bool
    plain: bool

    def own(self, v: Float[Tensor, "*h target d"]) -> Float[Tensor, "*h target d"]:
        """diag(beta) v, for v (..., n_tgt, d); (b, h, n_tgt, d) if beta has a batch."""
        exact = torch.promote_types(v.dtype, torch.float32)
        beta = self.beta[..., None] if self.beta.ndim == 1 else self.beta[:, None, :, None]
        return (v.to(exact) * beta.to(exact)).to(v.dtype)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Mixing:
        """On `device`, ready for values of `dtype`."""
        exact = None if dtype is None else torch.promote_types(dtype, torch.float32)
        return replace(self, source=self.source.to(device, dtype), beta=self.beta.to(device=device, dtype=exact))


def mixing(matrix: Float[Tensor, "*b source target"], beta: Float[Tensor, "*b target"]) -> Mixing:
    """`mix`'s S and beta, for one target or a batch (b, ...) of them, ready to be applied to values."""
    uses_source, uses_own = bool((matrix != 0).any()), bool((beta != 0).any())
    return Mixing(remap(matrix), beta, uses_source, uses_own, plain=not uses_source and bool((beta == 1).all()))
