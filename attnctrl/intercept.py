"""The only file that changes objects it does not own; everything it changes is put back, whatever happens.

 1. Hooked objects (modules, denoisers, the scheduler, the pipeline) get a *twin*: a cached subclass of their own class
 under the same name,
    with a few methods that report to a state the object carries.  `__dict__` is otherwise untouched, `isinstance`
    holds, processors and `forward` stay the user's, so LoRA, IP-Adapter, fused projections, accelerate and cache hooks
    go on working and may come and go while a run is open.  Without a state a twin acts as its base; copies and pickles
    of a hooked object are plain.
 2. `torch.nn.functional.scaled_dot_product_attention`, where every softmax attention of diffusers ends, asks the
 thread-local site while a run is open;
    without one it is the original.  Other backends are wrapped in diffusers' own table.

Nothing else is looked up inside a compiled graph: what depends on the step lies in plain attributes set before the
denoiser runs.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as _Backends
from torch import Tensor

__all__ = ["NATIVE", "here", "hook", "lock", "native", "patch_op", "put", "restore_op", "state_of", "unhook"]

NATIVE = "native"
lock = threading.RLock()


class _Here(threading.local):
    """Where this thread is: inside which site, at which of its operations, and the kernel its operation was meant
    for."""

    def __init__(self) -> None:  # in each thread: an attribute that appears later costs a compiled model another graph
        self.slot: Any = None
        self.part = 0
        self.backend: str = NATIVE
        self.kernel: Callable[..., Tensor] | None = None


here = _Here()


# --------------------------------------------------------------------------------------------------------------- twins


def hook(owner: Any, kind: str, state: Any) -> None:
    """Let `owner` (a "site", "module", "denoiser", "scheduler" or "pipeline") report to `state`."""
    owner.__dict__["_attnctrl"] = state
    if "_attnctrl_base" not in vars(type(owner)):
        object.__setattr__(owner, "__class__", _twin(type(owner), kind))  # type: ignore[arg-type]


def unhook(owner: Any) -> None:
    """Give `owner` its own class back.  If somebody derived from the twin meanwhile, it stays, as a pass-through."""
    owner.__dict__.pop("_attnctrl", None)
    base = vars(type(owner)).get("_attnctrl_base")
    if base is not None:
        object.__setattr__(owner, "__class__", base)


def state_of(owner: Any) -> Any:
    """What `owner` reports to; None where it is not hooked."""
    return owner.__dict__.get("_attnctrl")


def put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of `owner`, and nothing else: a pipeline would write it into its config, too."""
    owner.__dict__[name] = value


@functools.cache
def _twin(base: type, kind: str) -> type:
    own = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _plain_reduce(base),
        "_attnctrl": None,
        "_attnctrl_base": base,
    }
    return _equal_to_base(type(base))(base.__name__, (base,), {**own, **_METHODS[kind](base)})


@functools.cache
def _equal_to_base(meta: Any) -> type:
    """A metaclass whose classes equal their base: diffusers' `from_pipe` compares the types of components."""

    def __eq__(cls: Any, other: Any) -> bool:
        return other is cls or other is vars(cls).get("_attnctrl_base", cls)

    def __hash__(cls: Any) -> int:
        return hash(vars(cls).get("_attnctrl_base")) if "_attnctrl_base" in vars(cls) else meta.__hash__(cls)

    return type(meta.__name__, (meta,), {"__eq__": __eq__, "__hash__": __hash__})


def _plain_reduce(base: type) -> Callable[..., Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduce: Any = base.__reduce_ex__
        make, arguments, *rest = reduce(self, protocol)
        twin = type(self)
        make, *arguments = (base if x is twin else x for x in (make, *arguments))
        # pickle insists that this one makes the object's own class
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = base.__new__
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != "_attnctrl"}
        return (make, tuple(arguments), *rest)

    return __reduce_ex__


def _site(base: Any) -> dict[str, Any]:
    call = base.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = getattr(self, "_attnctrl", None)  # a bound __call__ may outlive the hook (torch.compile keeps one)
        if slot is None:
            return call(self, *args, **kwargs)
        if slot.around is not None:
            return slot.around.run(functools.partial(attention, self, slot), args, kwargs)
        return attention(self, slot, *args, **kwargs)

    def attention(self: Any, slot: Any, *args: Any, **kwargs: Any) -> Any:
        if not slot.controls:
            return call(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            slot.entered += 1
        outer, outer_part = here.slot, here.part
        here.slot, here.part = slot, 0
        try:
            return call(self, *args, **kwargs)
        finally:
            here.slot, here.part = outer, outer_part

    return {"__call__": __call__}


def _module(base: Any) -> dict[str, Any]:
    call = base.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = getattr(self, "_attnctrl", None)
        if place is None:
            return call(self, *args, **kwargs)
        return place.run(functools.partial(call, self), args, kwargs)

    return {"__call__": __call__}


def _denoiser(base: Any) -> dict[str, Any]:
    call = base.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, "_attnctrl", None)
        if state is None or state.inside:
            return call(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a denoiser with controls was traced from outside; compile the denoiser itself (or its blocks), not "
                "its caller"
            )
        return state.run(functools.partial(call, self), args, kwargs)

    methods: dict[str, Any] = {"__call__": __call__}
    if hasattr(base, "cache_context"):

        def cache_context(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if self._attnctrl is not None:
                self._attnctrl.context = name
            return base.cache_context(self, name, *args, **kwargs)

        methods["cache_context"] = functools.wraps(base.cache_context)(cache_context)
    return methods


def _scheduler(base: Any) -> dict[str, Any]:
    names = [name for name in ("set_timesteps", "scale_model_input", "step") if hasattr(base, name)]
    return {name: _Method(base, name) for name in names}


def _pipeline(base: Any) -> dict[str, Any]:
    @functools.wraps(base.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._attnctrl is None:
            return base.__call__(self, *args, **kwargs)
        return self._attnctrl.on_call(functools.partial(base.__call__, self), *args, **kwargs)

    methods: dict[str, Any] = {"__call__": __call__}
    if hasattr(base, "encode_prompt"):
        methods["encode_prompt"] = _Method(base, "encode_prompt")
    return methods


_METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "site": _site, "module": _module, "denoiser": _denoiser, "scheduler": _scheduler, "pipeline": _pipeline,
}  # fmt: skip


class _Method:
    """A method of a twin: the object's own (instance attributes others have set included), handed to `state.on_<name>`
    with its arguments."""

    def __init__(self, base: type, name: str) -> None:
        self.base, self.name = base, name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        original = getattr(self.base, self.name)
        if owner is None:
            return original
        original = vars(owner).get(self.name) or original.__get__(owner)
        if owner._attnctrl is None:
            return original

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            state = state_of(owner)  # asked anew: whoever keeps the method may call it after the run was closed
            return (
                original(*args, **kwargs)
                if state is None
                else getattr(state, f"on_{self.name}")(original, *args, **kwargs)
            )

        return method

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self.name] = value

    def __delete__(self, owner: Any) -> None:
        del owner.__dict__[self.name]


# -------------------------------------------------------------------------------------------------------------- the op

_runs: set[Any] = set()
_native: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention


def native() -> Callable[..., Tensor]:
    """What `scaled_dot_product_attention` was when the first open run was attached."""
    return _native


def patch_op(run: Any) -> None:
    """Let attention ask for its site, until every run has been given to `restore_op`."""
    global _native
    with lock:
        if not _runs:
            current = torch.nn.functional.scaled_dot_product_attention
            _native = _behind(current) or current
            torch.nn.functional.scaled_dot_product_attention = _op(_native)
            for name, function in list(_Backends._backends.items()):
                if name.value != NATIVE:  # that one calls the op
                    _Backends._backends[name] = _backend(name.value, _behind(function) or function)
        _runs.add(run)


def restore_op(run: Any) -> None:
    """What others put in place of ours meanwhile stays; ours passes through then."""
    with lock:
        if run not in _runs:
            return
        _runs.discard(run)
        if not _runs:
            current = torch.nn.functional.scaled_dot_product_attention
            torch.nn.functional.scaled_dot_product_attention = _behind(current) or current
            for name, function in list(_Backends._backends.items()):
                _Backends._backends[name] = _behind(function) or function


_replaced: dict[Any, Callable[..., Tensor]] = {}  # our functions -> what each stands for


def _behind(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    return _replaced.get(function)


@functools.cache
def _op(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if here.slot is None:
            return original(*args, **kwargs)
        return _enter(NATIVE, original, *args, **kwargs)

    _replaced[scaled_dot_product_attention] = original
    return scaled_dot_product_attention


@functools.cache
def _backend(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A backend of diffusers' table: tensors are (b, n, h, d), arguments those it takes."""
    takes = frozenset(inspect.signature(original).parameters)

    def kernel(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        kwargs = {name: value for name, value in kwargs.items() if name in takes}
        return original(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kwargs).transpose(1, 2)

    kernel.takes = takes  # type: ignore[attr-defined]

    @functools.wraps(original)
    def backend(*args: Any, **kwargs: Any) -> Tensor:
        if here.slot is None:
            return original(*args, **kwargs)
        return _enter_backend(name, kernel, *args, **kwargs)

    _replaced[backend] = original
    return backend


def _enter_backend(
    name: str,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    **kwargs: Any,
) -> Tensor:
    if isinstance(attn_mask, Tensor) and attn_mask.ndim == 2:
        attn_mask = attn_mask[:, None, None, :]
    kwargs.pop("_parallel_config", None)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return _enter(name, kernel, query, key, value, attn_mask, **kwargs).transpose(1, 2)


def _enter(
    backend: str,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor:
    slot, part = here.slot, here.part
    if others:
        raise ValueError(
            f"{slot.site.name} asks its attention kernel for {sorted(others)}, which controls cannot keep; choose "
            "other sites"
        )
    here.slot, here.backend, here.kernel = (
        None,
        backend,
        kernel,
    )  # what controls and kernels call is not this site's attention
    try:
        return slot.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, part)
    finally:
        here.slot, here.part, here.backend, here.kernel = slot, part + 1, NATIVE, None
