"""Where a pipeline with controls is: its clock, the rows and sizes of the current denoiser call, and the chains of its
denoisers and scheduler.

A run of the pipeline begins with its `__call__`; where someone writes the loop by hand, with `encode_prompt` or
`set_timesteps` after the last loop.  An iteration ends with `scheduler.step`.  Latents are never remembered from one
iteration to the next.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import intercept
from .call import DenoiseCall, Levels, Prediction, Rows, Site, Step, StepCall
from .chain import Place, Slot
from .families import Family, Geometry, family_of, find_sites, linear_layers
from .levels import Reading
from .rows import branches_of, fold, latents_of, rows_of, with_latents

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Denoiser", "Session", "denoisers_of"]

_DENOISERS = ("unet", "transformer", "transformer_2", "unconditional_transformer", "prior", "decoder")


def denoisers_of(target: Any) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline by the names of its components; of a bare denoiser, itself."""
    if isinstance(target, torch.nn.Module):
        return {"unet" if hasattr(target, "down_blocks") else "transformer": target}
    found = {name: getattr(target, name, None) for name in _DENOISERS}
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Module)}


def chain(controls: Sequence[Any], level: str, last: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first control's method `level` around the second's ... around `last`."""
    function = last
    for control in reversed([control for control in controls if hasattr(control, level)]):
        function = functools.partial(_around, getattr(control, level), function)
    return function


def _around(method: Callable[..., Any], rest: Callable[[Any], Any], call: Any) -> Any:
    return method(call, rest)


def with_first(output: Any, value: Tensor) -> Any:
    """A model's or scheduler's output, tuple or dataclass, with its first entry replaced."""
    if output[0] is value:
        return output
    if isinstance(output, tuple):
        return (value, *output[1:])
    first = next(iter(output.keys()))
    return type(output)(**{**dict(output.items()), first: value})


# ----------------------------------------------------------------------------------------------------------- denoisers


class Denoiser:
    """A hooked denoiser: its sites, the sessions that share it, and where the current call is."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name, self.model = name, model
        self.family: Family = family_of(model)
        self.slots = [Slot(site, module, self) for module, site in find_sites(model, self.family, name)]
        self.places: dict[str, Place] = {}  # submodules that controls wrap, by name
        self.linear = linear_layers(model)
        self.sessions: list[Session] = []
        self.hooked: list[torch.nn.Module] = []  # the model, and what torch.compile(model) returned
        self.context: str | None = None  # of diffusers' cache_context: cond or uncond
        self.inside = False
        self.calls = 0
        self.signature = inspect.signature(type(model).forward)
        self.geometry: Geometry | None = None
        self.latent: tuple[int, ...] | None = None
        self.rows = Rows.plain(1)
        self.step = Step()

    @property
    def sites(self) -> list[Site]:
        return [slot.site for slot in self.slots]

    @property
    def runs(self) -> list[Run]:
        return [run for session in self.sessions for run in session.runs]

    def op_rows(self, batch: int) -> Rows:
        """The row table of an operation with `batch` entries: folded where frames or pixels lie in the batch."""
        return self.rows if len(self.rows) == batch else fold(self.rows, batch)

    # -- hooking

    def open(self, session: Session, outer: torch.nn.Module) -> None:
        """Hook the model for this session; `outer` is the component, which may be a compiled wrapper of the model."""
        if session not in self.sessions:
            self.sessions.append(session)
            self.lay()
        for name, place in self.places.items():  # an adapter that was loaded meanwhile has taken the module's place
            module = self.model.get_submodule(name)
            if module is not place.module:
                controls = place.controls
                place.lay(())
                place.bind(module)
                place.lay(controls)
        for module in (self.model, outer):
            if intercept.state_of(module) is not self:
                intercept.hook(module, "denoiser", self)
                self.hooked.append(module)

    def close(self, session: Session) -> None:
        self.sessions.remove(session)
        self.lay()
        while not self.sessions and self.hooked:
            intercept.unhook(self.hooked.pop())

    def lay(self) -> None:
        """Lay the chains of all open runs anew."""
        for slot in self.slots:
            slot.lay([control for run in self.runs for control in run.controls if run.reaches(control, slot.site)])
        wanted: dict[str, list[Any]] = {}
        for run in self.runs:
            for control in run.controls:
                for name in run.wraps(control, self):
                    wanted.setdefault(name, []).append(control)
        for name in [*wanted, *self.places]:
            if name not in self.places:
                self.places[name] = Place(name, self.model.get_submodule(name), self)
            self.places[name].lay(wanted.get(name, ()))
        self.places = {name: place for name, place in self.places.items() if place.controls}

    # -- one call

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model, through the controls' `denoise`."""
        if not self.sessions:
            return forward(*args, **kwargs)
        session = _latest(self.sessions)
        own = self._bind(args, kwargs)
        call = session.denoise_call(self, own)
        runs = self.runs
        for run in runs:
            run.begin(call)
        outputs: list[Any] = []
        told = call.rows  # those that controls were told of

        def last(inner: DenoiseCall) -> Prediction:
            nonlocal told
            if inner.rows != told:
                told = inner.rows
                for run in runs:
                    run.begin(inner)
            inputs = inner.inputs
            if inner.latents is not call.latents:
                inputs = with_latents(inputs, self.family, inner.latents, inner.rows, len(call.latents), session.scaled)
            self.rows = inner.rows
            if inputs is own:
                outputs.append(forward(*args, **kwargs))
            else:  # by position what was given by position: another way of calling costs a compiled model another graph
                given = dict(inputs)
                positional = [given.pop(name) for name in list(self.signature.parameters)[1 : len(args) + 1]]
                outputs.append(forward(*positional, **given))
            return Prediction(outputs[-1][0])

        before = [(slot, slot.entered, slot.calls) for slot in self.slots if slot.controls]
        self.inside = True
        try:
            prediction = chain([control for run in runs for control in run.controls], "denoise", last)(call)
        finally:
            self.inside = False
            self.rows = call.rows
        for slot, entered, calls in before:
            processor = type(slot.module.processor)
            if slot.calls > calls:
                slot.seen = processor
            elif slot.entered > entered and not slot.compiled and slot.seen is not processor:  # else a cache skipped it
                raise RuntimeError(
                    f"{slot.site.name} ran, but no attention operation was seen: its processor {processor.__name__} "
                    "computes attention by itself; set a processor that calls torch's scaled_dot_product_attention, "
                    "or choose other sites"
                )
        if not outputs:
            raise RuntimeError("no control called the denoiser; call it and change what it returns")
        if len(prediction.value) != len(call.rows):
            raise ValueError(
                f"the controls returned a prediction of {len(prediction.value)} rows for the {len(call.rows)} of the "
                f"{self.name}; a control that adds or leaves out rows hands outward those it was given"
            )
        if prediction.latents is not None:
            session.commit(prediction.latents, call)
        session.calls += 1
        self.calls += 1
        return with_first(outputs[-1], prediction.value)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of forward by name."""
        bound = self.signature.bind(self.model, *args, **kwargs).arguments
        bound.pop("self")
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return dict(bound)


# ------------------------------------------------------------------------------------------------------------ sessions


@dataclass(frozen=True)
class _Asked:
    """What `encode_prompt` was asked: how many prompts, how many images of each, and the texts where it was given
    texts."""

    prompts: int
    images: int
    texts: list[str] | None


_starts = itertools.count(1)


def _latest(sessions: Iterable[Session]) -> Session:
    """The one whose pipeline began to run last."""
    return max(sessions, key=lambda session: session.started)


class Scheduler:
    """A hooked scheduler and the sessions of the pipelines that share it."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def on_set_timesteps(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _latest(self.sessions).on_set_timesteps(original, *args, **kwargs)

    def on_scale_model_input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _latest(self.sessions).on_scale_model_input(original, *args, **kwargs)

    def on_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _latest(self.sessions).on_step(original, *args, **kwargs)


class Session:
    """A pipeline (or a bare denoiser) with open runs."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.pipeline = None if isinstance(target, torch.nn.Module) else target
        self.runs: list[Run] = []
        self.denoisers: dict[str, Denoiser] = {}
        self.scheduler: Any = None
        self.started = 0
        self.in_call = False  # inside the pipeline's __call__
        self.stepping = False  # inside the scheduler's step
        self.used = False  # this run of the pipeline is over, or at least a denoiser has run
        self.asked: _Asked | None = None
        self.index = self.calls = 0
        self.total: int | None = None  # set by hand
        self.levels: Levels | None = None  # by hand, too
        self.told: Any = None  # the timestep that scale_model_input was given, in this iteration
        self.ran: Denoiser | None = None  # the last one that did
        self.unscaled: Tensor | None = None  # what scale_model_input was given, in this iteration
        self.scaled: Callable[[Tensor], Tensor] | None = None
        self.committed: Tensor | None = None  # latents that a control put in place of the pipeline's, in this iteration

    @property
    def now(self) -> Session:
        """The session in charge: of those that share a denoiser with this one, the one whose pipeline began to run
        last."""
        return _latest([self, *(session for denoiser in self.denoisers.values() for session in denoiser.sessions)])

    @property
    def sharing(self) -> list[Run]:
        """Open runs whose controls act on this pipeline: its own, and those of pipelines that share a denoiser with
        it."""
        return list(dict.fromkeys(run for denoiser in self.denoisers.values() for run in denoiser.runs))

    # -- hooks

    def open(self) -> None:
        """Hook what the target has now; called again at the beginning of each run, for components replaced
        meanwhile."""
        for name, outer in denoisers_of(self.target).items():
            model: Any = getattr(outer, "_orig_mod", outer)
            denoiser = self.denoisers.get(name)
            if denoiser is None or denoiser.model is not model:
                if denoiser is not None:
                    self.denoisers.pop(name).close(self)
                denoiser = intercept.state_of(model) or Denoiser(name, model)
                for run in self.runs:
                    run.resolve(denoiser)
                self.denoisers[name] = denoiser
            denoiser.open(self, outer)
        if self.pipeline is None:
            return
        if intercept.state_of(self.pipeline) is not self:
            intercept.hook(self.pipeline, "pipeline", self)
        scheduler = getattr(self.pipeline, "scheduler", None)
        if scheduler is not self.scheduler:
            self._release_scheduler()
            if scheduler is not None:
                state = intercept.state_of(scheduler) or Scheduler()
                state.sessions.append(self)
                intercept.hook(scheduler, "scheduler", state)
                self.scheduler = scheduler

    def put_scheduler(self, put: Any, instead_of: Any) -> None:
        """Let the pipeline step by `put`, if it still does by `instead_of`: others may have replaced that."""
        if getattr(self.pipeline, "scheduler", None) is instead_of:
            intercept.put(self.pipeline, "scheduler", put)

    def close(self) -> None:
        for denoiser in self.denoisers.values():
            denoiser.close(self)
        self.denoisers.clear()
        self._release_scheduler()
        if self.pipeline is not None:
            intercept.unhook(self.pipeline)

    def _release_scheduler(self) -> None:
        if self.scheduler is not None:
            state = intercept.state_of(self.scheduler)
            state.sessions.remove(self)
            if not state.sessions:
                intercept.unhook(self.scheduler)
            self.scheduler = None

    # -- the clock

    def _start(self) -> None:
        self.open()
        self.started = next(_starts)
        self.asked, self.ran, self.used = None, None, False
        self._restart()
        for run in self.sharing:
            run.begun = False

    def _start_by_hand(self) -> None:
        """Where someone writes the loop without the pipeline's call: what comes first after the last loop begins it."""
        if not self.in_call and (self.used or not self.started):
            self._start()

    def _restart(self) -> None:
        self.index = self.calls = 0
        self.unscaled = self.scaled = self.committed = self.told = None

    def on_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start()
        self.in_call = True
        try:
            return original(*args, **kwargs)
        finally:
            self.in_call = False
            self.used = True

    def on_encode_prompt(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start_by_hand()
        out = original(*args, **kwargs)
        if self.asked is None:
            kind: Any = type(self.pipeline)
            names = list(inspect.signature(kind.encode_prompt).parameters)[1 : len(args) + 1]
            self.asked = _asked({**dict(zip(names, args, strict=True)), **kwargs})
        return out

    def on_set_timesteps(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start_by_hand()
        self._restart()
        return original(*args, **kwargs)

    def on_scale_model_input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sample, *rest = args if args else (kwargs["sample"],)
        named = {name: value for name, value in kwargs.items() if name != "sample"}
        self.told = rest[0] if rest else kwargs.get("timestep")
        self.unscaled, self.scaled = sample, lambda latents: original(latents, *rest, **named)
        return original(*args, **kwargs)

    def on_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step of the scheduler, through the controls' `step`."""
        if self.stepping:  # by a function that somebody put around the hooked one
            return original(*args, **kwargs)
        if self.ran is None and self.denoisers:
            raise RuntimeError(
                f"the scheduler stepped, but none of {', '.join(self.denoisers)} ran: the pipeline's denoiser was "
                "replaced or compiled since "
                "its call began; attach again"
            )
        controls = [control for run in self.sharing for control in run.controls if hasattr(control, "step")]
        self.stepping = True
        try:
            through = controls or self.committed is not None
            out = self._step(controls, original, args, kwargs) if through else original(*args, **kwargs)
        finally:
            self.stepping = False
        self.index += 1
        self.calls = 0
        self.unscaled = self.scaled = self.committed = self.told = None
        return out

    def _step(
        self, controls: Sequence[Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names = list(inspect.signature(type(self.scheduler).step).parameters)[1 : len(args) + 1]
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        if self.committed is not None:
            given["sample"] = self.committed
        outputs: list[Any] = []

        def last(call: StepCall) -> Tensor:  # by position what was given by position: others may have replaced `step`
            named = {**call.kwargs, "model_output": call.prediction, "sample": call.sample}
            outputs.append(original(*[named.pop(name) for name in names], **named))
            return outputs[-1][0]

        latents = chain(controls, "step", last)(self._step_call(given))
        if not outputs:
            raise RuntimeError(
                "a control replaced scheduler.step without calling it; pin latents after calling it instead"
            )
        return with_first(outputs[-1], latents)

    # -- calls

    def denoise_call(self, denoiser: Denoiser, inputs: Mapping[str, Any]) -> DenoiseCall:
        """The call object of a denoiser call, and the state its attention operations read."""
        if getattr(self.pipeline, "scheduler", None) is not self.scheduler:
            self.open()
        self.used, self.ran = True, denoiser
        family, model = denoiser.family, denoiser.model
        given = inputs.get(family.latent_input)
        if not isinstance(given, Tensor):
            raise ValueError(
                f"{type(model).__name__} takes {family.latent_input!r} as {type(given).__name__}, not as one tensor "
                "with a row per image: "
                "controls cannot tell its rows"
            )
        geometry = family.measure(inputs, model)
        before = denoiser.geometry
        changed = before is None or geometry != before or geometry.rope is not before.rope
        denoiser.geometry, denoiser.latent = geometry, geometry.latent
        for slot in denoiser.slots:
            if changed:
                slot.measure(family, geometry)
            if slot.controls:
                slot.prepare()
        guided = bool(getattr(self.pipeline, "do_classifier_free_guidance", False))
        denoiser.rows = rows_of(
            len(given), branches=branches_of(self.pipeline, family), own=self._branch(denoiser, len(given), guided),
            prompts=self.asked.prompts if self.asked else None,
            images=self.asked.images if self.asked else 1,
            guided=guided,
        )  # fmt: skip
        denoiser.step = self._step_now(inputs.get("timestep"))
        images = len(set(zip(denoiser.rows.prompt, denoiser.rows.image, strict=True)))
        latents = latents_of(given if self.unscaled is None else self.unscaled, images, family, geometry, model)
        if self.committed is not None:
            latents = self.committed
            inputs = with_latents(inputs, family, latents, denoiser.rows, images, self.scaled)
        return DenoiseCall(
            latents=latents, inputs=inputs, rows=denoiser.rows, step=denoiser.step, denoiser=denoiser.name,
            along=family.along,
        )  # fmt: skip

    def commit(self, latents: Tensor, call: DenoiseCall) -> None:
        """From now on, in this iteration, these are the latents."""
        if self.scheduler is None:
            raise RuntimeError("a control commits latents, but a bare denoiser has no scheduler that steps from them")
        if latents.shape != call.latents.shape:
            raise ValueError(
                f"a control commits latents of shape {tuple(latents.shape)} in place of {tuple(call.latents.shape)}"
            )
        if latents is not call.latents:
            self.committed = latents.to(call.latents.dtype)

    def _branch(self, denoiser: Denoiser, count: int, guided: bool) -> str | None:
        """The branch of this call where guidance runs as separate calls: by its cache context, else by its number."""
        family, context, denoiser.context = denoiser.family, denoiser.context, None
        calls = family.calls
        if context in (calls or ("cond", "uncond")):
            return context
        if family.assumed and guided and self.asked and count == self.asked.prompts * self.asked.images:
            calls = ("cond", "uncond")
        return calls[min(self.calls, len(calls) - 1)] if calls else None

    def _step_now(self, timestep: Any) -> Step:
        """Where the loop is.  A timestep that lies on an accelerator is not read, which would wait for it: it is
        nan."""
        if isinstance(timestep, Tensor):
            timestep = timestep.flatten()[0].item() if timestep.device.type == "cpu" else float("nan")
        schedule, scheduler = getattr(self.scheduler, "timesteps", None), self.scheduler
        begin = getattr(scheduler, "begin_index", None)
        total = self.total
        if total is None and self.in_call:
            total = getattr(self.pipeline, "_num_timesteps", None)
        if total is None:
            total = 1 if schedule is None else len(schedule) - (begin or 0)
        skipped = 0
        read: Any = self.levels
        if self.total is None and schedule is not None:
            part = hasattr(self.pipeline, "get_timesteps")  # pipelines with a strength; others may stop early instead
            skipped = begin if begin is not None else max(0, len(schedule) - total) if part else 0
            read = Reading(scheduler, skipped + self.index, self.told)
        return Step(
            index=self.index, total=int(total), call=self.calls, timestep=float(timestep or 0.0), skipped=skipped,
            levels=read,
        )  # fmt: skip

    def _step_call(self, given: Mapping[str, Any]) -> StepCall:
        denoiser, sample = self.ran, given["sample"]
        assert denoiser is not None and denoiser.geometry is not None  # it has run
        geometry = denoiser.geometry
        packed = sample.ndim == 3
        own = tuple(size for dim, size in enumerate(sample.shape) if dim not in (0, geometry.axis))
        table = dict.fromkeys(zip(denoiser.rows.prompt, denoiser.rows.image, strict=True))
        rows = Rows(
            ("cond",) * len(table),
            tuple(p for p, _ in table),
            tuple(i for _, i in table),
            ("",) * len(table),
            tuple(range(len(table))),
        )
        return StepCall(
            prediction=given["model_output"], sample=sample, rows=rows, step=denoiser.step, packed=packed,
            grid=geometry.grid if packed else own, kwargs=given,
        )  # fmt: skip


def _asked(given: Mapping[str, Any]) -> _Asked | None:
    prompt, embeds = given.get("prompt"), given.get("prompt_embeds")
    texts = None if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)
    images = given.get("num_images_per_prompt") or given.get("num_videos_per_prompt") or 1
    if texts is not None:
        return _Asked(len(texts), images, texts)
    return _Asked(len(embeds), images, None) if isinstance(embeds, Tensor) else None
