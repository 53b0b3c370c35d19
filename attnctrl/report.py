"""What a run did, as data that prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .call import Site

__all__ = ["ControlReport", "Report", "SiteReport"]


@dataclass(frozen=True)
class ControlReport:
    """One control: its stage, the levels it acts on, how many sites and submodules it reaches, and whether it forms
    attention maps."""

    name: str
    stage: str
    levels: tuple[str, ...]
    sites: int
    of: int
    forms_maps: bool
    modules: int = 0


@dataclass(frozen=True)
class SiteReport:
    """One site: attention operations seen, the controls on it, and how often each kernel ran (with the reason where it
    was not the user's); skipped counts the calls of a module around it that a control left out."""

    site: Site
    calls: int
    controls: tuple[str, ...]
    kernels: Mapping[str, int]
    compiled: bool
    skipped: int = 0


@dataclass(frozen=True)
class Report:
    """`print(run.report())`."""

    controls: tuple[ControlReport, ...]
    sites: tuple[SiteReport, ...]
    denoiser_calls: Mapping[str, int]
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["controls, outermost first:"]
        for control in self.controls:
            reach = f", {control.sites} of {control.of} sites" if "attention" in control.levels else ""
            reach += f", {control.modules} modules" if control.modules else ""
            lines.append(f"  {control.name} ({control.stage}; {', '.join(control.levels)}{reach})")
        calls = ", ".join(f"{name} {count}" for name, count in self.denoiser_calls.items())
        lines.append(f"denoiser calls: {calls}")
        lines.append("sites:")
        lines += [f"  {self._site(site)}" for site in self.sites]
        forming = [control.name for control in self.controls if control.forms_maps]
        lines.append(f"maps formed: {', '.join(forming) if forming else 'none'}")
        lines += [f"assumed: {text}" for text in self.assumed]
        return "\n".join(lines)

    def _site(self, report: SiteReport) -> str:
        kernels = Counter(report.kernels)
        ran = ", ".join(f"{name} x{count}" for name, count in kernels.items())
        if report.compiled:
            ran = f"{ran + ', ' if ran else ''}inside a compiled graph (not counted)"
        skipped = f"; skipped x{report.skipped}" if report.skipped else ""
        controls = " > ".join(report.controls) or "no control"
        return f"{report.site}: {report.calls} operations; {controls}; {ran or 'never ran'}{skipped}"
