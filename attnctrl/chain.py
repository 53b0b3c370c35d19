"""One module that is hooked.  An attention module (`Slot`): from its attention operation to the call object, through
the controls, to the kernel.  Any submodule (`Place`): from its arguments through the controls to its forward."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from . import attend as end
from . import intercept
from .call import Attend, AttentionCall, ModuleCall, Site, Tokens
from .families import Family, Geometry, seen_kind, site_tokens
from .intercept import here

if TYPE_CHECKING:
    from .session import Denoiser

__all__ = ["STAGES", "Place", "Slot", "stage"]

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


def _hook(module: torch.nn.Module, kind: str, state: Any, wanted: bool) -> None:
    hooked = intercept.state_of(module) is state
    if wanted and not hooked:
        intercept.hook(module, kind, state)
    elif hooked and not wanted:
        intercept.unhook(module)


class Slot:
    """The state of one hooked attention module: its site, its chain of controls, the layouts of its tokens, and
    counters.

    entered counts forwards of the module, calls its operations, and skipped how often a control left out a module it is
    in, all outside of compiled graphs; compiled tells whether one ran inside.  around is the module as a `Place`, where
    controls wrap it as a whole.
    """

    def __init__(self, site: Site, module: torch.nn.Module, denoiser: Denoiser) -> None:
        self.site, self.module, self.denoiser = site, module, denoiser
        self.controls: tuple[Any, ...] = ()
        self.chain: Attend = self._kernel
        self.query_tokens = self.key_tokens = _UNKNOWN
        self.images: tuple[int, ...] | None = None  # of a model that is in no row: numbers of tokens an image may have
        self.text: int | None = None
        self.own_part: int | None = None  # where image prompts add operations to the module: which one is its own
        self.entered = self.calls = self.skipped = 0
        self.around: Place | None = None
        self.seen: type | None = None  # the processor whose operations were seen last
        self.compiled = False
        self.kernels: Counter[str] = Counter()

    def lay(self, controls: Sequence[Any]) -> None:
        """Make the chain of these controls, given outermost first: by stage, and in the order given within one."""
        self.controls = tuple(sorted(controls, key=lambda control: STAGES.index(stage(control))))
        self.chain = self._kernel
        for control in reversed(self.controls):
            self.chain = _Link(control, self.chain)
        _hook(self.module, "site", self, bool(self.controls or self.around))

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


class _Around:
    """One control and the rest of the chain behind it, at a submodule."""

    def __init__(self, control: Any, rest: Callable[[ModuleCall], Any]) -> None:
        self.control, self.rest = control, rest

    def __call__(self, call: ModuleCall) -> Any:
        return self.control.module(call, self.rest)


@dataclass(frozen=True)
class _Given(ModuleCall):
    """A call, and how to call the forward it came from."""

    forward: Callable[[Mapping[str, Any]], Any] = dict


class Place:
    """The state of one submodule that controls wrap: its chain, in the order given, and counters as in `Slot`.

    within are the attention modules in it, which do not run where a control leaves it out.
    """

    def __init__(self, name: str, module: torch.nn.Module, denoiser: Denoiser) -> None:
        self.name, self.denoiser = name, denoiser
        self.controls: tuple[Any, ...] = ()
        self.calls = 0
        self.compiled = False
        self.within = [slot for slot in denoiser.slots if f"{slot.site.name}.".startswith(f"{name}.")]
        self.site = next((slot for slot in self.within if slot.site.name == name), None)
        self.bind(module)

    def bind(self, module: torch.nn.Module) -> None:
        """Wrap this module, which has the name now."""
        self.module = module
        parameters = inspect.signature(type(module).forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [parameter.name for parameter in parameters if parameter.kind in kinds][1:]

    def lay(self, controls: Sequence[Any]) -> None:
        """Make the chain of these controls, given outermost first."""
        self.controls = tuple(controls)
        self.chain: Callable[[Any], Any] = _forward
        for control in reversed(self.controls):
            self.chain = _Around(control, self.chain)
        if self.site is not None:  # an attention module has one state
            self.site.around = self if self.controls else None
            self.site.lay(self.site.controls)
        else:
            _hook(self.module, "module", self, bool(self.controls))

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the module, through the controls' `module`."""
        names, count = self.names, len(args)
        if count > len(names):
            raise TypeError(f"{self.name} was called with {count} arguments by position; its forward names {names}")
        compiling = torch.compiler.is_compiling()
        if compiling:
            self.compiled = True
        else:
            self.calls += 1
        ran = False

        def last(inputs: Mapping[str, Any]) -> Any:
            nonlocal ran
            ran = True
            named = dict(inputs)
            return forward(*[named.pop(name) for name in names[:count]], **named)

        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        rows, batch = self.denoiser.rows, _batch(inputs)
        if batch != len(rows) and batch and batch % len(rows) == 0:
            rows = self.denoiser.op_rows(batch)
        out = self.chain(_Given(self.name, inputs, rows, self.denoiser.step, self.denoiser.name, last))
        if not (ran or compiling):
            for slot in self.within:
                slot.skipped += 1
        return out


def _forward(call: Any) -> Any:  # a _Given, or what controls made of it
    return call.forward(call.inputs)


def _batch(inputs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor."""
    return next((value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 0)
