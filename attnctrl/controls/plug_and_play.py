"""Plug-and-play (arXiv:2211.12572): targets take a source image's self-attention and one feature map of its decoder.

    q, k    decoder self-attention, first half of the run:  out_t = att(q_s, k_s, v_t)     one fused call, no map
    f       one convolution, first 80 % of the run:         f_t = f_s
The source is prompt 0, pinned to the inversion of a real image (`latents.PinSource`), and its conditional row serves
both branches of the targets, as the authors' single source row does.  Where branches run as separate calls, each
branch has its own source row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..call import (
    Attend,
    AttentionCall,
    DenoiseCall,
    MissingRows,
    Module,
    ModuleCall,
    Rows,
    Site,
    Window,
    batch_index,
    in_window,
)
from ..sharing import Sharing, check_window

__all__ = ["FeatureSharing", "PlugAndPlay", "decoder_sites"]


def decoder_sites(sites: Sequence[Site]) -> list[Site]:
    """Self-attention of the up blocks but for the first attention module there: layers 4-11 of the authors' decoder in
    Stable Diffusion 1.5.  Transformers have no decoder: the second half of their self and joint sites, which is
    ours."""
    found = [site for site in sites if site.kind in ("self", "joint")]
    up = [site for site in found if site.place == "up"]
    if not up:
        return found[len(found) // 2 :]
    module = lambda site: site.name.rsplit(".transformer_blocks", 1)[0]  # noqa: E731
    return [site for site in up if module(site) != module(up[0])] or up


@dataclass(eq=False)
class PlugAndPlay:
    """The q, k part: keep the layout of the source image.  In joint attention the image's queries and keys are taken.

    steps  when: fractions of the run, or two step indices; (0.0, 0.5) as the authors
    sites  a selector, or a function choosing sites; the default is `decoder_sites`, the authors'

    Raises MissingRows when a target's source is not in the same call of the denoiser.
    """

    steps: Window = (0.0, 0.5)
    sites: str | Callable[[Sequence[Site]], list[Site]] = decoder_sites

    stage = "edit"
    kinds = frozenset({"self", "joint"})
    needs = frozenset({"all_rows", "segments"})

    _both: bool | None = field(default=None, init=False, repr=False)  # whether the denoiser runs branches together

    def __post_init__(self) -> None:
        check_window("steps", self.steps)
        self._sources: Sharing[Int[Tensor, "b"]] = Sharing(self._index, self.steps)

    def begin(self, call: DenoiseCall) -> None:
        self._both = len(set(call.rows.branch)) > 1
        self._sources.begin(call)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        index = self._sources(call)
        if index is None:
            return attend(call)
        if call.kind != "joint":
            return attend(call.borrow(index))
        queries, keys = call.query_tokens, call.key_tokens
        return attend(
            call.replace(
                query=queries.put(call.query, "image", queries.get(call.query, "image")[index]),
                key=keys.put(call.key, "image", keys.get(call.key, "image")[index]),
            )
        )

    def _index(self, rows: Rows, device: torch.device) -> Int[Tensor, "b"] | None:
        both = len(set(rows.branch)) > 1 if self._both is None else self._both
        return source_index(rows, both, device)


@dataclass(eq=False)
class FeatureSharing:
    """The f part: targets get the source's output of a module.  Give it together with PlugAndPlay.

    steps    when: fractions of the run, or two step indices; (0.0, 0.8) as the authors
    modules  a selector of submodules whose output has a row per batch entry; the second convolution of the second
             residual block of up_blocks.1, the authors' for Stable Diffusion: what it returns is copied before the skip
             connection is added.  Transformers have no such module, and refuse at attach

    Raises MissingRows when a target's source is not in the same call of the denoiser.
    """

    steps: Window = (0.0, 0.8)
    modules: str = "up_blocks.1.resnets.1.conv2"

    _on: bool = field(default=False, init=False, repr=False)
    _rows: Rows | None = field(default=None, init=False, repr=False)
    _both: bool = field(default=False, init=False, repr=False)
    _sources: Int[Tensor, "b"] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_window("steps", self.steps)

    def begin(self, call: DenoiseCall) -> None:
        self._on = in_window(call.step, self.steps)
        if self._rows != call.rows:
            self._rows, self._both = call.rows, len(set(call.rows.branch)) > 1
            self._sources = source_index(call.rows, self._both, call.latents.device)

    def module(self, call: ModuleCall, module: Module) -> Any:
        out = module(call)
        if not self._on:
            return out
        if self._rows == call.rows:
            index = self._sources
        else:  # a part of the rows, or frames folded into the batch
            index = source_index(call.rows, self._both, out.device)
        return out if index is None else out[index]


def source_index(rows: Rows, both: bool, device: torch.device) -> Int[Tensor, "b"] | None:
    """For every batch entry the one it copies: targets the source's conditional row (of the same image and variant), or
    where branches do not run together the source's row of their branch.  None without targets."""
    table = rows.table()
    at = {entry: i for i, entry in enumerate(table)}
    if not any(rows.prompt):
        return None
    own = []
    for i, (branch, prompt, image, variant) in enumerate(table):
        wanted = ("cond" if both else branch, 0, image, variant)
        if prompt and wanted not in at:
            raise MissingRows(
                f"row {i}, {table[i]}, copies the row {wanted} of prompt 0, and this call of the denoiser has (branch, "
                f"prompt, image, variant) {table}; run both prompts in one pipeline call, and hand inward the sources"
            )
        own.append(at[wanted] if prompt else i)
    return batch_index(tuple(own), rows.fold, device)
