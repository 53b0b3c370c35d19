"""`attach`: controls on a pipeline until the run is closed."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from . import intercept
from .call import DenoiseCall, Levels, Site
from .chain import STAGES, Slot, stage
from .families import Family, Geometry
from .report import ControlReport, Report, SiteReport
from .session import Denoiser, Session, denoisers_of
from .sites import HeadSet, describe, select, select_modules

__all__ = ["Run", "attach"]

LEVELS = ("attention", "module", "denoise", "step", "scheduler")


class Run:
    """Controls attached to a pipeline.  Use it as a context manager, or call `close()`."""

    def __init__(self, session: Session, controls: Sequence[Any]) -> None:
        self._session = session
        self._chosen: dict[int, set[Site]] = {}
        self._wrapped: dict[tuple[int, str], list[str]] = {}  # by control and name of the denoiser
        self._final: Report | None = None
        self._before: dict[int, Any] = {}  # of sites and denoisers: what their counters were when this run came
        self._schedulers: tuple[Any, Any] | None = None  # the pipeline's, and the one put in its place
        self.controls = tuple(controls)
        self.begun = False  # whether controls were told that the pipeline runs
        self.closed = False

    # -- what controls may ask

    @property
    def pipeline(self) -> Any:
        """The pipeline attached to; None for a bare denoiser."""
        return self._session.pipeline

    @property
    def prompts(self) -> list[str] | None:
        """The texts of the current pipeline call, where it was given texts."""
        asked = self._session.now.asked
        return None if asked is None else asked.texts

    @property
    def sites(self) -> list[Site]:
        """All softmax-attention layers of the pipeline's denoisers."""
        return [site for denoiser in self._session.denoisers.values() for site in denoiser.sites]

    def family(self, denoiser: str) -> Family:
        """The table's row of a denoiser, by the name of the component."""
        return self._session.denoisers[denoiser].family

    def geometry(self, denoiser: str) -> Geometry:
        """Sizes of the current call of this denoiser."""
        geometry = self._session.denoisers[denoiser].geometry
        if geometry is None:
            raise RuntimeError(f"{denoiser} has not run yet")
        return geometry

    def sites_of(self, control: Any) -> list[Site]:
        """The sites this control reaches."""
        return [site for site in self.sites if self.reaches(control, site)]

    def reaches(self, control: Any, site: Site) -> bool:
        return site in self._chosen.get(id(control), ())

    def modules_of(self, control: Any) -> list[str]:
        """The names of the submodules this control wraps, in all denoisers, each once."""
        names = [name for denoiser in self._session.denoisers.values() for name in self.wraps(control, denoiser)]
        return list(dict.fromkeys(names))

    def wraps(self, control: Any, denoiser: Denoiser) -> list[str]:
        return self._wrapped.get((id(control), denoiser.name), [])

    def at(self, index: int, total: int, levels: Levels | None = None) -> None:
        """Say where the loop is, for a denoiser that is used without a pipeline; index 0 begins a run.  Controls that
        ask for noise levels need them, too."""
        self._session.index, self._session.total, self._session.calls = index, total, 0
        self._session.levels = levels
        if index == 0:
            self.begun = False

    # -- called by the session

    def start_counting(self) -> None:
        """Count from here on: an earlier run may have used the same sites."""
        for denoiser in self._session.denoisers.values():
            self._before[id(denoiser)] = denoiser.calls
            for slot in denoiser.slots:
                self._before[id(slot)] = (slot.calls, Counter(slot.kernels), slot.skipped)

    def resolve(self, denoiser: Denoiser) -> None:
        """Choose each control's sites in a denoiser that came to the pipeline."""
        _refuse(self.controls, denoiser)
        for control in self.controls:
            if hasattr(control, "attention"):
                self._chosen.setdefault(id(control), set()).update(_matching(control, denoiser.sites))
            if hasattr(control, "module"):
                self._wrapped[id(control), denoiser.name] = select_modules(_names(denoiser), control.modules)

    def put_scheduler(self) -> None:
        """Let a solver's scheduler take the place of the pipeline's."""
        solver = next((control for control in self.controls if _is_solver(control)), None)
        if solver is None:
            return
        current = self.pipeline.scheduler
        new = solver.scheduler(current)
        lacking = [name for name in ("set_timesteps", "step") if not callable(getattr(new, name, None))]
        if lacking:
            raise TypeError(
                f"{_name(solver)}.scheduler returned a {type(new).__name__}, which has no {' and no '.join(lacking)}; "
                "it returns a diffusers scheduler"
            )
        self._schedulers = current, new
        self._session.put_scheduler(new, instead_of=current)

    def begin(self, call: DenoiseCall) -> None:
        """Before each call of a denoiser, and where controls change its rows before the model runs; outside any
        compiled graph."""
        if not self.begun:
            for control in self.controls:
                if hasattr(control, "begin_run"):
                    control.begin_run(self)
            self.begun = True
        for control in self.controls:
            if hasattr(control, "begin"):
                control.begin(call)

    # -- life

    def close(self) -> None:
        """Take the controls off: the pipeline is as it was.  Calling it again does nothing."""
        if self.closed:
            return
        with intercept.lock:
            self.closed = True
            self._final = self._report()
            session = self._session
            if self in session.runs:
                session.runs.remove(self)
            try:
                if self._schedulers is not None:
                    current, new = self._schedulers
                    session.put_scheduler(current, instead_of=new)
                if session.runs:
                    session.open()
                    for denoiser in session.denoisers.values():
                        denoiser.lay()
                else:
                    session.close()
            finally:
                intercept.restore_op(self)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unused = [] if error is not None or self.closed else self._unused()
        self.close()
        for message in unused:
            warnings.warn(message, stacklevel=2)

    def _unused(self) -> list[str]:
        """What to say about controls that were never called."""
        denoisers = self._session.denoisers.values()
        ran = any(self._denoiser_calls(denoiser) for denoiser in denoisers)
        messages = []
        for control in self.controls:
            slots = [
                slot for denoiser in denoisers for slot in denoiser.slots if any(c is control for c in slot.controls)
            ]
            places = [
                place for denoiser in denoisers for place in denoiser.places.values() if control in place.controls
            ]
            if hasattr(control, "module") and not any(place.calls or place.compiled for place in places):
                messages.append(f"{_name(control)} was attached but never called: its modules did not run")
            if hasattr(control, "attention") and not any(self._counts(slot)[0] or slot.compiled for slot in slots):
                why = "its sites did not run" if ran else "the denoiser did not run"
                messages.append(f"{_name(control)} was attached but never called: {why}")
        return messages

    def _denoiser_calls(self, denoiser: Denoiser) -> int:
        return denoiser.calls - self._before.get(id(denoiser), 0)

    def _counts(self, slot: Slot) -> tuple[int, Counter[str], int]:
        """Operations of this site, by which kernel, and how often it was left out, since this run came."""
        calls, kernels, skipped = self._before.get(id(slot), (0, Counter(), 0))
        return slot.calls - calls, slot.kernels - kernels, slot.skipped - skipped

    def report(self) -> Report:
        """What happened so far: order of controls, sites, calls, kernels and reasons; printable."""
        return self._final or self._report()

    def _report(self) -> Report:
        denoisers = self._session.denoisers.values()
        order = sorted(self.controls, key=lambda control: STAGES.index(stage(control)))
        controls = tuple(
            ControlReport(
                name=_name(control),
                stage=stage(control),
                levels=tuple(level for level in LEVELS if callable(getattr(control, level, None))),
                sites=len(self.sites_of(control)),
                of=len(self.sites),
                modules=len(self.modules_of(control)),
                forms_maps=bool(getattr(control, "forms_maps", False)),
            )
            for control in order
        )
        sites = tuple(
            SiteReport(
                site=slot.site,
                calls=self._counts(slot)[0],
                controls=tuple(_name(control) for control in slot.controls),
                kernels=dict(self._counts(slot)[1]),
                compiled=slot.compiled,
                skipped=self._counts(slot)[2],
            )
            for denoiser in denoisers
            for slot in denoiser.slots
            if slot.controls or self._counts(slot)[2]
        )
        assumed = tuple(f"{denoiser.family.name}: {text}" for denoiser in denoisers for text in denoiser.family.assumed)
        return Report(
            controls, sites, {denoiser.name: self._denoiser_calls(denoiser) for denoiser in denoisers}, assumed
        )


def attach(target: Any, *controls: Any) -> Run:
    """Attach controls to a diffusers pipeline, or to a bare denoiser, until the returned run is closed.

    The first control is the outermost; controls are sorted by stage (observe, reuse, edit, kernel), the order given
    holding within one.

    An object with `scheduler(current)` is a solver: the scheduler it returns steps in place of the pipeline's while the
    run is open.

    Raises TypeError when an object has none of the methods attention, module, denoise, step,
    scheduler; ValueError when the
    model cannot be controlled, when a control's sites match nothing, when it needs what the model does not have, when
    two `kernel` controls meet at a site, or when there are two solvers, or one without a pipeline.
    """
    _check_controls(controls)
    models = denoisers_of(target)
    if not models:
        raise ValueError(
            f"{type(target).__name__} has no denoiser; pass a diffusers pipeline, or its UNet or transformer"
        )
    with intercept.lock:
        known = {name: getattr(outer, "_orig_mod", outer) for name, outer in models.items()}
        denoisers = [intercept.state_of(model) or Denoiser(name, model) for name, model in known.items()]
        for denoiser in denoisers:
            _refuse(controls, denoiser)
        _check_sites(controls, denoisers)
        _check_modules(controls, denoisers)
        session = _session_of(target, denoisers) or Session(target)
        _check_solvers(target, [*controls, *(control for run in session.runs for control in run.controls)])
        run = Run(session, controls)
        session.runs.append(run)
        try:
            intercept.patch_op(run)
            for denoiser in session.denoisers.values():
                run.resolve(denoiser)
            run.put_scheduler()
            session.open()
            run.start_counting()
            for denoiser in session.denoisers.values():
                denoiser.lay()
                for slot in denoiser.slots:
                    if slot.controls:
                        slot.prepare()
                _check_kernels(denoiser)
        except BaseException:
            run.close()
            raise
    for denoiser in denoisers:
        if denoiser.family.assumed:
            warnings.warn(
                f"{denoiser.family.name} is not in the table; assumed: {'; '.join(denoiser.family.assumed)}",
                stacklevel=2,
            )
    for denoiser in session.denoisers.values():
        for message in _limits(denoiser):
            warnings.warn(message, stacklevel=2)
    return run


def _limits(denoiser: Denoiser) -> list[str]:
    """What the user should know of this denoiser."""
    limits = []
    if len(denoiser.sessions) > 1:
        limits.append(
            f"the {denoiser.name} is shared with another attached pipeline: the controls of both act on both while "
            "they are open"
        )
    if denoiser.linear:
        limits.append(
            f"{len(denoiser.linear)} layers of the {denoiser.name} have linear attention, without a softmax, and stay "
            f"as they are: {denoiser.linear[0]}, ..."
        )
    if getattr(denoiser.model, "is_cache_enabled", False):
        limits.append(f"the {denoiser.name} has a cache: layers that it skips are not controlled in that call")
    return limits


def _session_of(target: Any, denoisers: Sequence[Denoiser]) -> Session | None:
    """The session this target has already."""
    return next((session for denoiser in denoisers for session in denoiser.sessions if session.target is target), None)


def _check_controls(controls: Sequence[Any]) -> None:
    if not controls:
        raise ValueError("attach needs at least one control, e.g. attach(pipe, PromptToPrompt(prompts))")
    for control in controls:
        if isinstance(control, type):
            raise TypeError(f"{control.__name__} is a class; attach an instance, {control.__name__}(...)")
        if not any(callable(getattr(control, level, None)) for level in LEVELS):
            raise TypeError(f"{control!r} is no control: it has none of the methods {', '.join(LEVELS)}")
        if stage(control) not in STAGES:
            raise ValueError(f"stage {stage(control)!r} of {_name(control)}; the stages are {', '.join(STAGES)}")
    if len({id(control) for control in controls}) < len(controls):
        raise ValueError("the same control was given twice")


def _is_solver(control: Any) -> bool:
    return callable(getattr(control, "scheduler", None))


def _check_solvers(target: Any, controls: Sequence[Any]) -> None:
    solvers = [_name(control) for control in controls if _is_solver(control)]
    if len(solvers) > 1:
        raise ValueError(f"{' and '.join(solvers)} both bring a scheduler; a pipeline steps by one")
    if solvers and "scheduler" not in getattr(target, "__dict__", {}):
        raise ValueError(
            f"{solvers[0]} brings a scheduler, and {type(target).__name__} has none to take the place of; attach it to "
            "a pipeline"
        )


def _refuse(controls: Sequence[Any], denoiser: Denoiser) -> None:
    """Raise where this denoiser cannot be controlled, or lacks what a control needs."""
    model, family = denoiser.model, denoiser.family
    if family.refused:
        raise ValueError(f"{type(model).__name__} cannot be controlled: {family.refused}")
    parallel = getattr(model, "_parallel_config", None)
    if parallel is not None:
        raise ValueError(
            f"{type(model).__name__} runs with {parallel}: attention sees only a shard of the tokens; disable it"
        )
    for control in controls:
        for need in sorted(getattr(control, "needs", ())):
            if need in family.lacks:
                raise ValueError(f"{_name(control)} needs {need}, which {family.name} lacks: {family.lacks[need]}")


def _check_sites(controls: Sequence[Any], denoisers: Sequence[Denoiser]) -> None:
    """Raise where a control would reach no site."""
    sites = [site for denoiser in denoisers for site in denoiser.sites]
    linear = [name for denoiser in denoisers for name in denoiser.linear]
    has = describe(sites) + (
        f"; {len(linear)} layers of linear attention, which has no softmax to control" if linear else ""
    )
    for control in controls:
        if not hasattr(control, "attention"):
            continue
        selector, kinds = getattr(control, "sites", None), getattr(control, "kinds", None)
        if isinstance(selector, str):
            select(sites, selector)
        if not _matching(control, sites):
            wanted = f"{', '.join(sorted(kinds))} sites" if kinds else "attention sites"
            raise ValueError(
                f"{_name(control)} acts on {wanted}{f' among {selector!r}' if selector else ''}, and none is left; "
                f"this model has {has}"
            )
        heads = getattr(control, "heads", None)
        if isinstance(heads, HeadSet):
            heads.check(sites)


def _names(denoiser: Denoiser) -> list[str]:
    return [name for name, _ in denoiser.model.named_modules() if name]


def _check_modules(controls: Sequence[Any], denoisers: Sequence[Denoiser]) -> None:
    """Raise where a control would wrap no submodule."""
    names = [name for denoiser in denoisers for name in _names(denoiser)]
    for control in controls:
        if not hasattr(control, "module"):
            continue
        selector = getattr(control, "modules", None)
        if not isinstance(selector, str):
            raise TypeError(f"{_name(control)}.modules is {selector!r}; it is a selector of submodules, a string")
        if not select_modules(names, selector):
            kinds = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
            raise ValueError(
                f"{_name(control)} wraps modules {selector!r}, and no submodule has such a name; there are "
                f"{', '.join(kinds[:24])}{', ...' if len(kinds) > 24 else ''}"
            )


def _matching(control: Any, sites: Sequence[Site]) -> list[Site]:
    """The sites a control chooses by its `sites` (a selector or a function) and `kinds`."""
    selector: str | Callable[[Sequence[Site]], list[Site]] | None = getattr(control, "sites", None)
    kinds = getattr(control, "kinds", None)
    if callable(selector):
        sites = selector(sites)
    elif selector is not None:
        sites = select(sites, selector, missing_ok=True)
    return [site for site in sites if kinds is None or site.kind in kinds]


def _check_kernels(denoiser: Denoiser) -> None:
    for slot in denoiser.slots:
        kernels = [_name(control) for control in slot.controls if stage(control) == "kernel"]
        if len(kernels) > 1:
            raise ValueError(
                f"{' and '.join(kernels)} both compute the softmax at {slot.site.name}; give them different sites"
            )


def _name(control: Any) -> str:
    return type(control).__name__
