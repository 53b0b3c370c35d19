"""One attention module that is hooked: from its attention operation to the call object, through the controls, to the
kernel."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from . import attend as end
from . import intercept
from .call import Attend, AttentionCall, Site, Tokens
from .families import Family, Geometry, seen_kind, site_tokens
from .intercept import here

if TYPE_CHECKING:
    from .session import Denoiser

__all__ = ["STAGES", "Slot", "stage"]

STAGES = ("observe", "reuse", "edit", "kernel")
_UNKNOWN = Tokens()

# processors of diffusers whose attention never reaches the op, and what to do about each
_HIDDEN = {
    "Sliced": "it slices attention by hand; call pipe.disable_attention_slicing()",
    "XFormers": "it calls xformers directly; call pipe.disable_xformers_memory_efficient_attention()",
    "NPU": "it calls its own kernel; set an AttnProcessor2_0",
    "XLA": "it calls its own kernel; set an AttnProcessor2_0",
}
_EAGER = ("AttnProcessor", "AttnAddedKVProcessor", "IPAdapterAttnProcessor", "CustomDiffusionAttnProcessor")


def stage(control: Any) -> str:
    return getattr(control, "stage", "edit")


@functools.cache
def _hidden(processor: type) -> str | None:
    """Why the op does not see the attention of this processor; None where it does, or where only a run will tell."""
    name = processor.__name__
    if not processor.__module__.startswith("diffusers."):
        return None
    if name in _EAGER:
        return f"it multiplies attention maps by hand; set a {name}2_0, e.g. with set_attn_processor"
    return next((why for word, why in _HIDDEN.items() if word in name), None)


class _Link:
    """One control and the rest of the chain behind it."""

    def __init__(self, control: Any, rest: Attend) -> None:
        self.control, self.rest = control, rest

    def __call__(self, call: AttentionCall) -> Tensor:
        return self.control.attention(call, self.rest)


class Slot:
    """The state of one hooked attention module: its site, its chain of controls, the layouts of its tokens, and
    counters.

    entered counts forwards of the module and calls its operations, both outside of compiled graphs; compiled tells
    whether one ran inside.
    """

    def __init__(self, site: Site, module: torch.nn.Module, denoiser: Denoiser) -> None:
        self.site, self.module, self.denoiser = site, module, denoiser
        self.controls: tuple[Any, ...] = ()
        self.chain: Attend = self._kernel
        self.query_tokens = self.key_tokens = _UNKNOWN
        self.images: tuple[int, ...] | None = None  # of a model that is in no row: numbers of tokens an image may have
        self.text: int | None = None
        self.own_part: int | None = None  # where image prompts add operations to the module: which one is its own
        self.entered = self.calls = 0
        self.seen: type | None = None  # the processor whose operations were seen last
        self.compiled = False
        self.kernels: Counter[str] = Counter()

    def lay(self, controls: Sequence[Any]) -> None:
        """Make the chain of these controls, given outermost first: by stage, and in the order given within one."""
        self.controls = tuple(sorted(controls, key=lambda control: STAGES.index(stage(control))))
        self.chain = self._kernel
        for control in reversed(self.controls):
            self.chain = _Link(control, self.chain)
        hooked = intercept.state_of(self.module) is self
        if self.controls and not hooked:
            intercept.hook(self.module, "site", self)
        elif hooked and not self.controls:
            intercept.unhook(self.module)

    def measure(self, family: Family, geometry: Geometry) -> None:
        """Take the sizes of the denoiser calls to come."""
        self.query_tokens, self.key_tokens = site_tokens(self.site, family, geometry)
        self.images, self.text = None, geometry.text
        if family.assumed and self.site.place not in ("down", "mid", "up"):
            frames = geometry.latent[0] if len(geometry.latent) == 3 else 1
            self.images = (self.query_tokens.length, self.query_tokens.length // frames)

    def prepare(self) -> None:
        """Before a denoiser call: refuse a processor the op cannot see, and tell an image adapter's operations from the
        module's own."""
        processor: Any = type(self.module.processor)
        why = _hidden(processor)
        if why is not None:
            raise ValueError(f"the attention of {self.site.name} cannot be seen under {processor.__name__}: {why}")
        if self.site.kind == "cross" and getattr(self.module, "add_k_proj", None) is not None:
            self.own_part = 1  # Wan image-to-video: the image prompt comes first
        else:
            self.own_part = 0 if "IP" in processor.__name__ else None

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        dropout: float,
        causal: bool,
        scale: float | None,
        part: int,
    ) -> Tensor:
        """The attention operation `part` of a forward of the module."""
        if dropout:
            raise ValueError(
                f"attention dropout {dropout} at {self.site.name}: controls act on inference only; call .eval()"
            )
        if key.shape[1] != query.shape[1]:  # grouped queries: controls see one key head per query head
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if isinstance(mask, Tensor) and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.calls += 1
        kind = self.site.kind
        if self.images is not None:
            kind = seen_kind(kind, query.shape[2], key.shape[2], self.images, self.text)
        query_tokens = self.query_tokens if self.query_tokens.length == query.shape[2] else _UNKNOWN
        key_tokens = self.key_tokens if self.key_tokens.length == key.shape[2] else _UNKNOWN
        if self.own_part is not None and part != self.own_part:
            kind, key_tokens = "ip", _UNKNOWN
        denoiser = self.denoiser
        call = AttentionCall(
            query=query, key=key, value=value, mask=mask, scale=scale, causal=causal, kind=kind, part=part,
            site=self.site,
            rows=denoiser.op_rows(query.shape[0]), query_tokens=query_tokens, key_tokens=key_tokens,
            latent=denoiser.latent, step=denoiser.step,
        )  # fmt: skip
        return self.chain(call)

    def _kernel(self, call: AttentionCall) -> Tensor:
        backend, kernel = here.backend, here.kernel
        assert kernel is not None  # set with the operation
        name = backend
        if backend != intercept.NATIVE:
            reasons = end.reasons_against(backend, call, kernel)
            if reasons:
                kernel, name = intercept.native(), f"native instead of {backend}: {'; '.join(reasons)}"
        if kernel is intercept.native() and isinstance(call.mask, BlockMask):
            raise ValueError(
                f"the block mask of {self.site.name} needs the flex backend, which cannot run this call: {name}"
            )
        if not torch.compiler.is_compiling():
            self.kernels[name] += 1
        return end.attend(call, kernel)
