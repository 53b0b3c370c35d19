"""The only file that changes objects it does not own; everything it changes is put back, whatever happens.

What is changed while a run is open:
 1. attention modules of the denoiser, and the denoiser itself, get a cached subclass of their own class with another `__call__` (same name, same
    `__dict__`, `isinstance` holds).  Processors and `forward` stay the user's: LoRA, IP-Adapter, fused projections, accelerate and cache hooks go on working.
 2. `torch.nn.functional.scaled_dot_product_attention`, where every softmax attention of diffusers ends, is replaced by a function that asks the
    thread-local site; without one it is the original.  Other backends are wrapped in diffusers' own table of backends.
 3. `scheduler.step`, `set_timesteps` and `scale_model_input`, and the pipeline's `encode_prompt`, become instance attributes with the same signature.

Nothing else is looked up inside a compiled graph: what depends on the step lies in plain attributes set before the denoiser runs.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as _Backends
from torch import Tensor

from . import attend as end
from .call import AttentionCall, DenoiseCall, Prediction, Rows, Site, Step, StepCall, Tokens
from .families import Family, Geometry, family_of, find_sites, site_tokens
from .report import ControlReport, Report, SiteReport
from .rows import branches_of, latents_of, rows_of, with_latents
from .sites import HeadSet, describe, select

__all__ = ["Run", "attach"]

STAGES = ("observe", "reuse", "edit", "kernel")
LEVELS = ("attention", "denoise", "step")
_DENOISERS = ("unet", "transformer", "transformer_2", "unconditional_transformer", "prior", "decoder")
_NATIVE = "native"

# processors whose attention never reaches the op, and what to do about each
_OPAQUE: tuple[tuple[str, str], ...] = (
    ("Sliced", "it slices attention by hand; call pipe.disable_attention_slicing()"),
    ("XFormers", "it calls xformers directly; call pipe.disable_xformers_memory_efficient_attention()"),
    ("Linear", "it has no softmax: these layers cannot be controlled; choose others with sites=..."),
    ("NPU", "it calls its own kernel; set an AttnProcessor2_0"),
    ("XLA", "it calls its own kernel; set an AttnProcessor2_0"),
)
_EAGER = (
    "AttnProcessor", "AttnAddedKVProcessor", "IPAdapterAttnProcessor", "CustomDiffusionAttnProcessor",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the op and its site


class _Here(threading.local):
    """Where this thread is: inside which site's module, at which of its operations, under which backend."""

    slot: _Slot | None = None
    part: int = 0
    backend: str = _NATIVE


class _Slot:
    """The state of one hooked attention module: its site, the chain of controls, and counters."""

    def __init__(self, site: Site, module: torch.nn.Module, hook: _Denoiser) -> None:
        self.site, self.module, self.hook = site, module, hook
        self.controls: tuple[Any, ...] = ()
        self.chain: _Link = _Link(None, None)
        self.query_tokens = self.key_tokens = Tokens()
        self.first_is_image = False  # of a cross site with an image prompt (Wan image to video)
        self.entered = self.calls = 0
        self.compiled = False
        self.kernels: dict[str, int] = {}


class _Link:
    """One control and the rest of the chain behind it; the last link runs the kernel."""

    def __init__(self, control: Any, rest: _Link | None) -> None:
        self.control, self.rest = control, rest

    def __call__(self, call: AttentionCall) -> Tensor:
        if self.rest is None:
            return _kernel(call)
        return self.control.attention(call, self.rest)


_here = _Here()
_original: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
_original_backends: dict[Any, Callable[..., Tensor]] = {}
_open = 0
_lock = threading.RLock()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands for torch.nn.functional.scaled_dot_product_attention while a run is open."""
    slot = _here.slot
    if slot is None:
        return _original(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return _enter_chain(slot, query, key, value, attn_mask, dropout_p, is_causal, scale)


def _enter_chain(
    slot: _Slot, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if dropout:
        raise ValueError(f"attention dropout {dropout} at {slot.site.name}: controls act on inference only; call .eval()")
    if key.shape[1] != query.shape[1]:  # grouped queries: controls see one key head per query head
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    part = _here.part
    _here.part = part + 1
    kind, query_tokens, key_tokens = slot.site.kind, slot.query_tokens, slot.key_tokens
    if (part == 0) == slot.first_is_image and (part or slot.first_is_image):
        kind, key_tokens = "ip", Tokens()
    call = AttentionCall(
        query=query, key=key, value=value, mask=mask, scale=scale, causal=causal, kind=kind, part=part, site=slot.site,
        rows=slot.hook.op_rows(query.shape[0]), query_tokens=query_tokens, key_tokens=key_tokens,
        latent=slot.hook.latent, step=slot.hook.step,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        slot.compiled = True
    else:
        slot.calls += 1
    return slot.chain(call)


def _kernel(call: AttentionCall) -> Tensor:
    backend = _here.backend
    if backend != _NATIVE:
        reasons = end.reasons_against(backend, call)
        if not reasons:
            _count(f"{backend}")
            return end.attend(call, _swap_layout(_original_backends[backend]))
        _count(f"native instead of {backend}: {'; '.join(reasons)}")
        return end.attend(call, _original)
    _count(_NATIVE)
    return end.attend(call, _original)


def _count(kernel: str) -> None:
    if not torch.compiler.is_compiling() and _here.slot is not None:
        _here.slot.kernels[kernel] = _here.slot.kernels.get(kernel, 0) + 1


def _swap_layout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """diffusers' backends take (b, n, h, d); the chain ends in (b, h, n, d)."""
    takes = set(inspect.signature(function).parameters)

    def kernel(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        kwargs = {name: v for name, v in kwargs.items() if name in takes}
        return function(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kwargs).transpose(1, 2)

    return kernel


def _wrap_backend(name: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def backend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, scale: float | None = None, **kwargs: Any
    ) -> Tensor:
        slot = _here.slot
        if slot is None:
            takes = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, **kwargs}
            known = inspect.signature(function).parameters
            return function(query, key, value, **{k: v for k, v in takes.items() if k in known})
        outer, _here.backend = _here.backend, str(getattr(name, "value", name))
        if attn_mask is not None and attn_mask.ndim == 2:
            attn_mask = attn_mask[:, None, None, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = _enter_chain(slot, query, key, value, attn_mask, 0.0, is_causal, scale).transpose(1, 2)
        _here.backend = outer
        return out

    return backend


def _open_op() -> None:
    global _open, _original
    with _lock:
        if _open == 0:
            current = torch.nn.functional.scaled_dot_product_attention
            if current is not _attention:
                _original = current
            torch.nn.functional.scaled_dot_product_attention = _attention
            for name, function in list(_Backends._backends.items()):
                if str(getattr(name, "value", name)) != _NATIVE:
                    _original_backends[str(getattr(name, "value", name))] = function
                    _Backends._backends[name] = _wrap_backend(name, function)
        _open += 1


def _close_op() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            if torch.nn.functional.scaled_dot_product_attention is _attention:
                torch.nn.functional.scaled_dot_product_attention = _original  # else somebody wrapped ours: it passes through
            for name in list(_Backends._backends):
                original = _original_backends.get(str(getattr(name, "value", name)))
                if original is not None and getattr(_Backends._backends[name], "__wrapped__", None) is original:
                    _Backends._backends[name] = original
            _original_backends.clear()


# ------------------------------------------------------------------------------------------------------- hooked modules


def _become(module: torch.nn.Module, cls: type) -> None:
    object.__setattr__(module, "__class__", cls)


def _twin(cls: type, name: str, **methods: Any) -> type:
    """A subclass that passes for `cls`: same name, module and documentation."""
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_attnctrl_twin": name}
    return type(cls.__name__, (cls,), {**own, **methods})


@functools.cache
def _site_class(cls: type) -> type:
    own_call = cls.__call__  # type: ignore[operator]

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = self._attnctrl_slot
        if not torch.compiler.is_compiling():
            slot.entered += 1
        outer, outer_part = _here.slot, _here.part
        _here.slot, _here.part = slot, 0
        out = own_call(self, *args, **kwargs)
        _here.slot, _here.part = outer, outer_part
        return out

    return _twin(cls, "site", __call__=__call__)


@functools.cache
def _denoiser_class(cls: type) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = self.__dict__.get("_attnctrl_denoiser")
        if torch.compiler.is_compiling() or hook is None or hook.inside:
            return cls.__call__(self, *args, **kwargs)  # type: ignore[operator]
        return hook(functools.partial(cls.__call__, self), args, kwargs)  # type: ignore[operator]

    methods: dict[str, Any] = {"__call__": __call__}
    if hasattr(cls, "cache_context") and not issubclass(cls, torch._dynamo.OptimizedModule):

        def cache_context(self: Any, name: str, **kwargs: Any) -> Any:
            self._attnctrl_denoiser.context = name
            return cls.cache_context(self, name, **kwargs)  # type: ignore[attr-defined]

        methods["cache_context"] = cache_context
    return _twin(cls, "denoiser", **methods)


class _Denoiser:
    """A hooked denoiser: its sites, the sessions that share it, and where the current call is."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.outer = name, module
        self.model: torch.nn.Module = getattr(module, "_orig_mod", module)
        self.family: Family = family_of(self.model)
        self.slots = [_Slot(site, part, self) for part, site in find_sites(self.model, self.family, name)]
        self.sessions: list[_Session] = []
        self.context: str | None = None
        self.inside = False
        self.hooked = False
        self.signature = inspect.signature(type(self.model).forward)
        self.geometry: Geometry | None = None
        self.rows = Rows.plain(1)
        self.folded: dict[int, Rows] = {}
        self.step = Step()
        self.latent: tuple[int, ...] | None = None
        self.calls = 0

    @property
    def sites(self) -> list[Site]:
        return [slot.site for slot in self.slots]

    def op_rows(self, batch: int) -> Rows:
        """The row table for an operation whose batch is `batch`: folded when frames or pixels lie in the batch."""
        rows = self.rows
        if len(rows) == batch:
            return rows
        if batch % len(rows):
            raise ValueError(
                f"an attention operation has {batch} batch entries for the denoiser's {len(rows)} rows: this model does not keep rows together"
            )
        if batch not in self.folded:
            self.folded[batch] = Rows(rows.branch, rows.prompt, rows.image, rows.variant, rows.origin, batch // len(rows))
        return self.folded[batch]

    # -- hooking

    def rebuild(self) -> None:
        """Lay the chains of all open runs anew and hook exactly the modules that have one."""
        runs = [run for session in self.sessions for run in session.runs]
        for slot in self.slots:
            reached = [c for run in runs for c in run.controls if slot.site in run.reach.get((id(c), self.name), ())]
            slot.controls = tuple(sorted(reached, key=lambda control: STAGES.index(_stage(control))))
            link = _Link(None, None)
            for control in reversed(slot.controls):
                link = _Link(control, link)
            slot.chain = link
            twin = getattr(type(slot.module), "_attnctrl_twin", None) == "site"
            if slot.controls and not twin:
                slot.module.__dict__["_attnctrl_slot"] = slot
                _become(slot.module, _site_class(type(slot.module)))
            elif twin and not slot.controls:
                _become(slot.module, type(slot.module).__mro__[1])
                del slot.module.__dict__["_attnctrl_slot"]
        for module in {id(m): m for m in (self.outer, self.model)}.values():
            twin = getattr(type(module), "_attnctrl_twin", None) == "denoiser"
            if runs and not twin:
                module.__dict__["_attnctrl_denoiser"] = self
                _become(module, _denoiser_class(type(module)))
            elif twin and not runs:
                _become(module, type(module).__mro__[1])
                del module.__dict__["_attnctrl_denoiser"]

    def check_visible(self) -> None:
        """Raise when a controlled site's processor computes attention where the op cannot see it."""
        for slot in self.slots:
            if not slot.controls:
                continue
            name = type(slot.module.processor).__name__
            reason = next((why for word, why in _OPAQUE if word in name), None)
            if name in _EAGER:
                reason = "it multiplies attention maps by hand; set an AttnProcessor2_0 (call set_attn_processor, or torch >= 2's default)"
            if reason:
                raise ValueError(f"the attention of {slot.site.name} cannot be seen under {name}: {reason}")
        parallel = getattr(self.model, "_parallel_config", None)
        if parallel is not None:
            raise ValueError(f"{type(self.model).__name__} runs with {parallel}: attention sees only a shard of the tokens; disable it")

    # -- one call

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = max(self.sessions, key=lambda s: s.started)
        inputs = self._bind(args, kwargs)
        call = session.denoise_call(self, inputs)
        controls = [c for s in self.sessions for run in s.runs for c in run.controls]
        for run in [run for s in self.sessions for run in s.runs]:
            run.begin(call, self)
        raw: list[Any] = []

        def last(inner: DenoiseCall) -> Prediction:
            fed = inner.inputs
            if inner.latents is not call.latents:
                images = len(call.latents)
                fed = with_latents(fed, self.family.latent_input, inner.latents, inner.rows, images, session.scale_for(inner))
            raw.append(forward(**fed))
            return Prediction(raw[-1][0])

        before = [(slot, slot.entered, slot.calls) for slot in self.slots if slot.controls]
        self.inside, outer = True, (_here.slot, _here.part, _here.backend)
        _here.slot, _here.backend = None, _NATIVE
        try:
            prediction = _chain([c for c in controls if hasattr(c, "denoise")], "denoise", last)(call)
        finally:
            self.inside = False
            _here.slot, _here.part, _here.backend = outer
        for slot, entered, calls in before:
            if slot.entered > entered and slot.calls == calls and not slot.compiled:
                raise RuntimeError(
                    f"{slot.site.name} ran, but no attention operation was seen: its processor {type(slot.module.processor).__name__} "
                    "computes attention by itself; set a processor that calls torch's scaled_dot_product_attention"
                )
        session.calls_in_step += 1
        self.calls += 1
        return _with_first(raw[-1], prediction.value)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(self.model, *args, **kwargs).arguments
        bound.pop("self", None)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return dict(bound)


def _with_first(output: Any, value: Tensor) -> Any:
    """A model's output, tuple or dataclass, with its first entry replaced."""
    if output[0] is value:
        return output
    if isinstance(output, tuple):
        return (value, *output[1:])
    first = next(iter(output.keys()))
    return type(output)(**{**dict(output.items()), first: value})


def _chain(controls: Sequence[Any], level: str, last: Callable[[Any], Any]) -> Callable[[Any], Any]:
    function = last
    for control in reversed(controls):
        function = functools.partial(_around, getattr(control, level), function)
    return function


def _around(method: Callable[..., Any], rest: Callable[[Any], Any], call: Any) -> Any:
    return method(call, rest)


# ------------------------------------------------------------------------------------------------- pipelines and schedulers


_started = 0


class _Session:
    """A pipeline (or a bare denoiser) with open runs: its clock, its prompts, its hooks."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.pipeline = None if isinstance(target, torch.nn.Module) else target
        self.runs: list[Run] = []
        self.started = 0
        self.index = self.calls_in_step = 0
        self.total: int | None = None
        self.timestep = 0.0
        self.prompts: int | None = None
        self.images = 1
        self.texts: list[str] | None = None
        self.unscaled: Tensor | None = None
        self.scheduler: Any = None
        self.denoisers: dict[str, _Denoiser] = {}

    # -- hooks

    def open(self) -> None:
        self.bind_denoisers()
        if self.pipeline is None:
            return
        self.bind_scheduler()
        if hasattr(self.pipeline, "encode_prompt"):
            _hook(self.pipeline, "encode_prompt", self._encode_prompt)

    def close(self) -> None:
        for hook in self.denoisers.values():
            hook.sessions.remove(self)
            hook.rebuild()
            if not hook.sessions:
                _denoisers.pop(id(hook.outer), None)
        self.denoisers.clear()
        if self.pipeline is not None:
            _unhook(self.pipeline, "encode_prompt")
            self._release_scheduler()

    def bind_denoisers(self) -> None:
        """Hook the denoisers the target has now (they may have been compiled or replaced since)."""
        for name, module in _denoisers_of(self.target).items():
            hook = self.denoisers.get(name)
            if hook is not None and hook.outer is module:
                continue
            if hook is not None:
                hook.sessions.remove(self)
                hook.rebuild()
                _denoisers.pop(id(hook.outer), None)
            hook = _denoisers.setdefault(id(module), _Denoiser(name, module))
            hook.sessions.append(self)
            self.denoisers[name] = hook

    def bind_scheduler(self) -> None:
        scheduler = getattr(self.pipeline, "scheduler", None)
        if scheduler is self.scheduler:
            return
        self._release_scheduler()
        self.scheduler = scheduler
        for name, replacement in (("step", self._step), ("set_timesteps", self._set_timesteps), ("scale_model_input", self._scale)):
            if hasattr(scheduler, name):
                _hook(scheduler, name, replacement)

    def _release_scheduler(self) -> None:
        for name in ("step", "set_timesteps", "scale_model_input"):
            if self.scheduler is not None:
                _unhook(self.scheduler, name)
        self.scheduler = None

    # -- what the hooks do

    def _encode_prompt(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.rescan()
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        images = given.get("num_images_per_prompt", given.get("num_videos_per_prompt", 1)) or 1
        prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
        if prompt is not None:
            texts = [prompt] if isinstance(prompt, str) else list(prompt)
            count: int | None = len(texts)
        else:
            texts, count = None, None if embeds is None else len(embeds)
        if count is not None and self._encoded != (count, images):
            self.prompts, self.images = count, images
        if count is not None and not self._texts_known:
            self.texts, self._texts_known = texts, True
        return original(*args, **kwargs)

    _encoded: tuple[int, int] | None = None
    _texts_known = False

    def _set_timesteps(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _started
        self.rescan()
        out = original(*args, **kwargs)
        _started += 1
        self.started = _started
        self.index = self.calls_in_step = 0
        self.unscaled = None
        self._texts_known = False
        for run in self.runs:
            run.begun = False
        return out

    def _scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.unscaled = args[0] if args else kwargs["sample"]
        return original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.calls_in_step == 0 and self.denoisers:
            raise RuntimeError(
                "the scheduler stepped, but no attached denoiser ran: the pipeline's denoiser was replaced or compiled after attach; "
                "attach again, after that"
            )
        controls = [c for run in self.runs for c in run.controls if hasattr(c, "step")]
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        names = list(bound)
        raw: list[Any] = []

        def last(call: StepCall) -> Tensor:
            given = dict(bound)
            given[names[0]], given["sample"] = call.prediction, call.sample
            extra = given.pop("kwargs", {})
            raw.append(original(**given, **extra))
            return raw[-1][0]

        if controls:
            latents = _chain(controls, "step", last)(self.step_call(bound[names[0]], bound["sample"], bound))
            if not raw:
                raise RuntimeError("a control replaced scheduler.step without calling it; pin latents after calling it instead")
            out = _with_first(raw[-1], latents)
        else:
            out = original(*args, **kwargs)
        self.index += 1
        self.calls_in_step = 0
        self.unscaled = None
        return out

    def rescan(self) -> None:
        """At the start of a pipeline call: hook what was replaced since attach, refuse what became invisible."""
        self.bind_denoisers()
        for hook in self.denoisers.values():
            hook.rebuild()
            hook.check_visible()

    # -- calls

    def denoise_call(self, hook: _Denoiser, inputs: Mapping[str, Any]) -> DenoiseCall:
        if self.pipeline is not None and getattr(self.pipeline, "scheduler", None) is not self.scheduler:
            self.bind_scheduler()
            self.index = self.calls_in_step = 0
        family, geometry = hook.family, hook.family.measure(inputs, hook.model)
        if geometry != hook.geometry:
            hook.geometry = geometry
            hook.latent = geometry.latent
            for slot in hook.slots:
                slot.query_tokens, slot.key_tokens = site_tokens(slot.site, family, geometry)
        for slot in hook.slots:
            slot.first_is_image = slot.site.kind == "cross" and inputs.get("encoder_hidden_states_image") is not None
        given = inputs[family.latent_input]
        own = None
        if family.calls:
            own = hook.context if hook.context in family.calls else family.calls[min(self.calls_in_step, len(family.calls) - 1)]
        guided = bool(getattr(self.pipeline, "do_classifier_free_guidance", False))
        rows = rows_of(
            len(given), branches=branches_of(self.pipeline, family), own=own, prompts=self.prompts, images=self.images, guided=guided
        )
        hook.context = None
        if rows != hook.rows:
            hook.rows, hook.folded = rows, {}
        hook.step = self.step_now(inputs.get("timestep"))
        images = len(set(zip(rows.prompt, rows.image, strict=True)))
        fed = given if self.unscaled is None else self.unscaled
        tokens = None
        if family.packed and geometry.grid is not None:
            tokens = 1
            for size in geometry.grid:
                tokens *= size
        channels = getattr(hook.model.config, "out_channels", None)
        if family.packed:  # the denoiser's own out_channels may be before packing
            channels = None if channels is None or channels < 16 or hook.family.name == "qwen" else channels
        latents = latents_of(fed, images, channels, tokens)
        return DenoiseCall(latents=latents, inputs=inputs, rows=rows, step=hook.step, denoiser=hook.name)

    def step_now(self, timestep: Any) -> Step:
        if isinstance(timestep, Tensor):
            timestep = timestep.flatten()[0].item() if timestep.device.type == "cpu" else 0.0
        total = getattr(self.pipeline, "_num_timesteps", None) if self.total is None else self.total
        if total is None:
            schedule = getattr(self.scheduler, "timesteps", None)
            total = 1 if schedule is None else len(schedule) - (getattr(self.scheduler, "begin_index", None) or 0)
        return Step(index=self.index, total=int(total), call=self.calls_in_step, timestep=float(timestep or 0.0))

    def step_call(self, prediction: Tensor, sample: Tensor, given: Mapping[str, Any]) -> StepCall:
        hook = max(self.denoisers.values(), key=lambda h: h.calls)
        geometry, packed = hook.geometry, hook.family.packed
        assert geometry is not None  # the denoiser has run in this iteration
        table = dict.fromkeys(zip(hook.rows.prompt, hook.rows.image, strict=True))
        rows = Rows(
            ("cond",) * len(table), tuple(p for p, _ in table), tuple(i for _, i in table), ("",) * len(table), tuple(range(len(table)))
        )
        return StepCall(
            prediction=prediction, sample=sample, rows=rows, step=hook.step, packed=packed,
            grid=geometry.grid if packed else tuple(sample.shape[2:]), kwargs=given,
        )  # fmt: skip

    def scale_for(self, call: DenoiseCall) -> Callable[[Tensor], Tensor] | None:
        if self.unscaled is None:
            return None
        schedule, original = self.scheduler, type(self.scheduler).scale_model_input
        timestep = call.inputs["timestep"]
        timestep = timestep.flatten()[0] if isinstance(timestep, Tensor) else timestep
        return lambda latents: original(schedule, latents, timestep)


def _hook(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, "_attnctrl_hook", False):
        raise RuntimeError(f"{type(owner).__name__}.{name} is hooked by another pipeline that is attached; attach to one of them")

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    hooked._attnctrl_hook = True  # type: ignore[attr-defined]
    hooked._attnctrl_before = owner.__dict__.get(name)  # type: ignore[attr-defined]
    owner.__dict__[name] = hooked


def _unhook(owner: Any, name: str) -> None:
    hooked = owner.__dict__.get(name)
    if not getattr(hooked, "_attnctrl_hook", False):
        return
    before = hooked._attnctrl_before  # type: ignore[union-attr]
    if before is None:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = before


_sessions: dict[int, _Session] = {}
_denoisers: dict[int, _Denoiser] = {}


def _denoisers_of(target: Any) -> dict[str, torch.nn.Module]:
    if isinstance(target, torch.nn.Module):
        return {"unet" if hasattr(target, "down_blocks") else "transformer": target}
    found = {name: getattr(target, name, None) for name in _DENOISERS}
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Module)}


# ------------------------------------------------------------------------------------------------------------------ runs


def _stage(control: Any) -> str:
    return getattr(control, "stage", "edit")


class Run:
    """Controls attached to a pipeline.  Use it as a context manager, or call `close()`."""

    def __init__(self, session: _Session, controls: Sequence[Any]) -> None:
        self._session = session
        self.controls = tuple(controls)
        self.reach: dict[tuple[int, str], frozenset[Site]] = {}
        self.begun = False
        self.closed = False
        self._used: set[int] = set()

    # -- what controls may ask

    @property
    def pipeline(self) -> Any:
        """The pipeline attached to; None for a bare denoiser."""
        return self._session.pipeline

    @property
    def prompts(self) -> list[str] | None:
        """The texts of the current pipeline call, where it was given texts."""
        return self._session.texts

    @property
    def sites(self) -> list[Site]:
        """All attention layers of the pipeline's denoisers."""
        return [site for hook in self._session.denoisers.values() for site in hook.sites]

    def family(self, denoiser: str) -> Family:
        return self._session.denoisers[denoiser].family

    def geometry(self, denoiser: str) -> Geometry:
        """Sizes of the current call of this denoiser."""
        geometry = self._session.denoisers[denoiser].geometry
        if geometry is None:
            raise RuntimeError(f"{denoiser} has not run yet")
        return geometry

    def sites_of(self, control: Any) -> list[Site]:
        """The sites this control reaches."""
        return [site for site in self.sites if site in self.reach.get((id(control), site.denoiser), ())]

    def at(self, index: int, total: int) -> None:
        """Set the step by hand, where a denoiser is used without a pipeline."""
        self._session.index, self._session.total, self._session.calls_in_step = index, total, 0
        if index == 0:
            self.begun = False

    def begin(self, call: DenoiseCall, hook: _Denoiser) -> None:
        """Called by the engine before each call of a denoiser, outside any compiled graph."""
        if not self.begun:
            self.begun = True
            for control in self.controls:
                if hasattr(control, "begin_run"):
                    control.begin_run(self)
        for control in self.controls:
            if hasattr(control, "begin"):
                control.begin(call)

    # -- life

    def close(self) -> None:
        """Take the controls off; the pipeline is as it was.  Calling it again does nothing."""
        for message in self._close():
            warnings.warn(message, stacklevel=2)

    def _close(self) -> list[str]:
        """Close, and say which controls were never called."""
        if self.closed:
            return []
        self.closed = True
        session = self._session
        unused = self._unused()
        self._final = self.report()
        session.runs.remove(self)
        if session.runs:
            for hook in session.denoisers.values():
                hook.rebuild()
        else:
            session.close()
            _sessions.pop(id(session.target), None)
        _close_op()
        return unused

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        unused = self._close()
        if error is None:  # else the error is the news
            for message in unused:
                warnings.warn(message, stacklevel=2)

    def _unused(self) -> list[str]:
        unused = []
        hooks = list(self._session.denoisers.values())
        for control in self.controls:
            if not hasattr(control, "attention"):
                continue
            slots = [slot for hook in hooks for slot in hook.slots if control in slot.controls]
            if not any(slot.calls or slot.compiled for slot in slots):
                ran = "the denoiser never ran" if not any(hook.calls for hook in hooks) else "its sites never ran"
                unused.append(f"{_name(control)} was attached but never called: {ran}")
        return unused

    def report(self) -> Report:
        """What happened so far: order of controls, sites, calls, kernels and reasons; printable."""
        if self.closed and hasattr(self, "_final"):
            return self._final
        hooks = self._session.denoisers
        order = sorted(self.controls, key=lambda control: STAGES.index(_stage(control)))
        controls = tuple(
            ControlReport(
                _name(c), _stage(c), tuple(level for level in LEVELS if hasattr(c, level)),
                len(self.sites_of(c)), len(self.sites), bool(getattr(c, "forms_maps", False)),
            )
            for c in order
        )  # fmt: skip
        sites = tuple(
            SiteReport(slot.site, slot.calls, tuple(_name(c) for c in slot.controls), dict(slot.kernels), slot.compiled)
            for hook in hooks.values()
            for slot in hook.slots
            if slot.controls
        )
        assumed = tuple(f"{hook.family.name}: {text}" for hook in hooks.values() for text in hook.family.assumed)
        calls = {name: hook.calls for name, hook in hooks.items()}
        return Report(controls, sites, calls, assumed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.controls)


def _name(control: Any) -> str:
    return type(control).__name__


def attach(target: Any, *controls: Any) -> Run:
    """Attach controls to a diffusers pipeline, or to a bare denoiser, until the returned run is closed.

    The first control is the outermost; controls are sorted by stage (observe, reuse, edit, kernel), the order given holding within one.

    Raises TypeError when an object has none of the methods attention, denoise, step; ValueError when the model cannot be controlled, when a control's sites
    match nothing, when it needs what the model does not have, or when two `kernel` controls meet at a site.
    """
    if not controls:
        raise ValueError("attach needs at least one control, e.g. attach(pipe, PromptToPrompt(prompts))")
    for control in controls:
        if isinstance(control, type):
            raise TypeError(f"{control.__name__} is a class; attach an instance, {control.__name__}(...)")
        if not any(callable(getattr(control, level, None)) for level in LEVELS):
            raise TypeError(f"{control!r} is no control: it has none of the methods {', '.join(LEVELS)}")
        if _stage(control) not in STAGES:
            raise ValueError(f"stage {_stage(control)!r} of {_name(control)}; the stages are {', '.join(STAGES)}")
    modules = _denoisers_of(target)
    if not modules:
        raise ValueError(
            f"{type(target).__name__} has no denoiser (looked for {', '.join(_DENOISERS)}); pass a diffusers pipeline, or its UNet or transformer"
        )
    with _lock:
        session = _sessions.get(id(target)) or _Session(target)
        run = Run(session, controls)
        _check(run, modules)
        session.runs.append(run)
        _open_op()
        try:
            session.open() if id(target) not in _sessions else session.bind_denoisers()
            _sessions[id(target)] = session
            for hook in session.denoisers.values():
                hook.rebuild()
            for hook in session.denoisers.values():
                hook.check_visible()
                _check_kernels(hook)
        except BaseException:
            _sessions[id(target)] = session
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.close()
            raise
    _warn_shared(session)
    return run


def _check(run: Run, modules: Mapping[str, torch.nn.Module]) -> None:
    """Resolve each control's sites and match its needs with the families."""
    hooks = {name: _denoisers.get(id(module)) or _Denoiser(name, module) for name, module in modules.items()}
    for hook in hooks.values():
        if hook.family.refused:
            raise ValueError(f"{type(hook.model).__name__} cannot be controlled: {hook.family.refused}")
        for control in run.controls:
            for need in sorted(getattr(control, "needs", ())):
                if need in hook.family.lacks:
                    raise ValueError(f"{_name(control)} needs {need}, which {hook.family.name} lacks: {hook.family.lacks[need]}")
        if hook.family.assumed:
            warnings.warn(f"{hook.family.name} is not in the table; assumed: {'; '.join(hook.family.assumed)}", stacklevel=4)
    everything = [site for hook in hooks.values() for site in hook.sites]
    for control in run.controls:
        if not hasattr(control, "attention"):
            continue
        if not everything:
            raise ValueError(f"{type(run._session.target).__name__} has no attention sites: {_name(control)} would do nothing")
        heads = getattr(control, "heads", None)
        if isinstance(heads, HeadSet):
            heads.check(everything)
        chosen = getattr(control, "sites", None)
        if callable(chosen):
            found = list(chosen(everything))
        else:
            found = everything if chosen is None else select(everything, chosen)
        kinds = getattr(control, "kinds", None)
        if kinds is not None:
            found = [site for site in found if site.kind in kinds]
            if not found:
                raise ValueError(f"{_name(control)} acts on {', '.join(sorted(kinds))} sites, and none is left; this model has {describe(everything)}")
        for name in hooks:
            run.reach[id(control), name] = frozenset(site for site in found if site.denoiser == name)


def _check_kernels(hook: _Denoiser) -> None:
    for slot in hook.slots:
        kernels = [_name(c) for c in slot.controls if _stage(c) == "kernel"]
        if len(kernels) > 1:
            raise ValueError(f"{' and '.join(kernels)} both compute the softmax at {slot.site.name}; give them different sites")


def _warn_shared(session: _Session) -> None:
    for hook in session.denoisers.values():
        if len(hook.sessions) > 1:
            warnings.warn(
                f"the {hook.name} is shared with another attached pipeline: the controls of both act on both while they are open", stacklevel=4
            )
