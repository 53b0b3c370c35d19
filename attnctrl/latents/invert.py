"""Real images: the noise and the states that a pipeline's own denoiser samples them from.

The pipeline itself runs, with a scheduler in place of its own that walks from the image to noise; so its conditioning
is right, whatever the family.
    method             model          pipeline calls of N steps           what comes of it
    ddim               noise, v       N                                   a trajectory
    negative_prompt    noise, v       N                                   the same
    null_text          noise, v       N + N (2 .. inner + 1), with grad   the uncond texts of each step
    edit_friendly      noise, v       N                                   noise maps
    euler              flow           N                                   a trajectory
    midpoint=rf_solver flow           2N                                  a trajectory of 2N iterations
    fireflow           flow           N + 1                               a trajectory of N + 1 iterations
    rf_inversion       flow           N                                   noise
    inversion = invert(pipe, picture, "a red circle")
    with attach(pipe, *inversion.controls(prompts), PromptToPrompt(prompts)):
        pipe(prompts, **inversion.arguments)
FlowEdit needs no inversion: `FlowEdit(encode(pipe, picture), prompts)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ..call import Denoise, DenoiseCall, Prediction, StepCall, StepFunction
from ..prompts import Prompts
from ..run import attach
from .ddim import Leg, deviation, legs_of
from .edit_friendly import EditFriendly, NoiseMaps, noisy_path
from .images import encode, pack, pixel_size, size_for
from .negative_prompt import NegativePrompt
from .null_text import FitNullText, NullText, NullTexts
from .rf_inversion import RFInversion, ToNoise
from .schedulers import Solver, edit_friendly_scheduler, is_flow, solver_for, way_back
from .start import StartFrom
from .trajectory import PinSource, Trajectory

__all__ = ["METHODS", "Inversion", "invert"]

_NOISE = ("ddim", "negative_prompt", "null_text", "edit_friendly")
_FLOW = ("euler", "midpoint", "rf_solver", "fireflow", "rf_inversion")
METHODS = (*_NOISE, *_FLOW)
_GUIDANCE = {"null_text": 7.5, "edit_friendly": 3.5, "rf_inversion": 0.0}  # the authors'; else 1
_OPTIONS: dict[str, dict[str, Any]] = {
    "null_text": {"inner": 10},
    "edit_friendly": {"eta": 1.0, "keep_last": True},
    "rf_inversion": {"gamma": 0.5, "compat": None},
}


@dataclass(frozen=True, eq=False)
class Inversion:
    """What `invert` found.

    image: the latents that were inverted; latents: the noise sampling starts from; trajectory, maps, nulls: what the
    method gives, else None; nfe: calls of the denoiser; arguments: for the pipeline call that edits.
    """

    method: str
    prompt: str | list[str] | None
    image: Float[Tensor, "images ..."]
    latents: Float[Tensor, "images ..."]
    nfe: int
    arguments: Mapping[str, Any]
    trajectory: Trajectory | None = None
    maps: NoiseMaps | None = None
    nulls: NullTexts | None = None

    def controls(self, prompts: Prompts, *, pin: bool | None = None, **options: Any) -> tuple[Any, ...]:
        """What to attach, after LocalBlend and before the edit, to sample [source, target, ...] from the image.

        pin: hold the source to the trajectory (None: where the method has one and does not rebuild the image itself).
        options: of `EditFriendly`, `NullText`, `NegativePrompt` or `RFInversion`.
        """
        if self.maps is not None and not pin:
            return (EditFriendly(self.maps, prompts, **options),)
        if self.method == "rf_inversion" and not pin:
            return (Solver("euler"), RFInversion(self.image, self.latents, prompts, **options))
        if self.trajectory is None or self.trajectory.solver is None:
            raise ValueError(f"{self.method!r} has no trajectory to pin the source to")
        solver = Solver(self.trajectory.solver)
        if pin is None:
            pin = self.nulls is None and self.method != "negative_prompt"
        held = PinSource(self.trajectory, prompts) if pin else StartFrom(self.latents, prompts)
        if self.nulls is not None:
            return (solver, held, NullText(self.nulls, prompts, **options))
        if self.method == "negative_prompt":
            return (solver, held, NegativePrompt(prompts, **options))
        if options:
            raise ValueError(f"{self.method!r} has no options {sorted(options)}")
        return (solver, held)


@dataclass(eq=False)
class _Counter:
    """Counts the calls of the denoiser."""

    calls: int = 0

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        self.calls += 1
        return denoise(call)


@dataclass(eq=False)
class _Recorder:
    """Puts an inverse solver on the pipeline and keeps the states."""

    solver: str
    states: list[Tensor] = field(default_factory=list)
    timesteps: tuple[float, ...] = ()

    def scheduler(self, current: Any) -> Any:
        return solver_for(current, self.solver, inverse=True)

    def begin_run(self, run: Any) -> None:
        self.timesteps = way_back(run.pipeline.scheduler)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        if not self.states:
            self.states.append(call.sample)
        self.states.append(step(call))
        return self.states[-1]


@dataclass(eq=False)
class _Extract:
    """Edit-friendly noise maps: the denoiser sees the independent latents, the scheduler gives the means."""

    image: Tensor
    eta: float
    generator: torch.Generator | None
    shifts: list[Tensor] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    path: Tensor | None = None

    def scheduler(self, current: Any) -> Any:
        return edit_friendly_scheduler(current, 0, self.eta)

    def begin_run(self, run: Any) -> None:
        self.legs = legs_of(run.pipeline.scheduler)
        self.path = noisy_path(self.image, self.legs, generator=self.generator)

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        return denoise(call if call.step.index else call.replace(latents=self._at(0)))

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        mean = step(call.replace(sample=self._at(call.step.index)))
        after = self._at(call.step.index + 1)
        self.shifts.insert(0, after - mean)
        return after

    def maps(self) -> NoiseMaps:
        assert self.path is not None  # it ran
        deviations = tuple(deviation(leg.start, leg.stop, self.eta) for leg in reversed(self.legs))
        return NoiseMaps(
            self.path, torch.stack(self.shifts), deviations, tuple(leg.timestep for leg in self.legs), self.eta
        )

    def _at(self, index: int) -> Tensor:
        assert self.path is not None  # the run has begun
        return self.path[len(self.path) - 1 - index]


@torch.no_grad()
def invert(
    pipe: Any,
    image: Image.Image | list[Image.Image] | Float[Tensor, "images ..."],
    prompt: str | list[str] | None = "",
    *,
    method: str | None = None,
    num_inference_steps: int = 50,
    guidance_scale: float | None = None,
    generator: torch.Generator | None = None,
    controls: Sequence[Any] = (),
    **kwargs: Any,
) -> Inversion:
    """Find the noise from which `pipe` samples `image`.

    image      a picture or pictures of one size (`latents.encode`), or latents: as the pipeline holds them, or unpacked
    prompt     that describes it; one for all pictures or one for each.  None with `prompt_embeds` among the kwargs
    method     see above; None: "ddim", or "midpoint" for flow models
    guidance_scale  None: the authors', 1 where nothing else is said: null_text 7.5, edit_friendly 3.5, rf_inversion 0
    generator  of the noise that edit_friendly and rf_inversion draw
    controls   to attach during the inversion, as `StoredFeatures`
    kwargs     options of the method (null_text: inner; edit_friendly: eta, keep_last; rf_inversion: gamma, compat), and
               arguments of the pipeline call

    Raises ValueError for an unknown method or one that is not the model's, and for an image that cannot be encoded.
    """
    flow = is_flow(pipe.scheduler)
    method = ("midpoint" if flow else "ddim") if method is None else method
    if method not in (_FLOW if flow else _NOISE):
        raise ValueError(
            f"method {method!r} does not fit {type(pipe).__name__} with {type(pipe.scheduler).__name__}; there are "
            f"{', '.join(map(repr, _FLOW if flow else _NOISE))}"
        )
    options = {name: kwargs.pop(name, default) for name, default in _OPTIONS.get(method, {}).items()}
    others = {name for own in _OPTIONS.values() for name in own} & set(kwargs)
    if others:
        raise ValueError(f"method {method!r} has no option {', '.join(sorted(others))}; it has {sorted(options)}")
    scale = _GUIDANCE.get(method, 1.0) if guidance_scale is None else guidance_scale
    latents, size = _latents(pipe, image, kwargs)
    arguments = {"num_inference_steps": num_inference_steps, **size}
    count = len(latents)
    if isinstance(prompt, str):
        prompt = prompt if count == 1 else [prompt] * count
    elif prompt is not None and len(prompt) != count:
        raise ValueError(f"prompt has {len(prompt)} texts for {count} images; give one for all, or one for each")

    def run(*own: Any, guidance: float) -> int:
        """A call of the pipeline with these controls; returns the calls of its denoiser."""
        counter = _Counter()
        with attach(pipe, counter, *controls, *own):
            pipe(prompt=prompt, latents=latents, output_type="latent", **arguments, **guided(pipe, guidance), **kwargs)
        return counter.calls

    found: dict[str, Any] = {"method": method, "prompt": prompt, "image": latents, "arguments": arguments}
    if method == "edit_friendly":
        extract = _Extract(latents, options["eta"], generator)
        nfe = run(extract, guidance=scale)
        maps = extract.maps() if options["keep_last"] else extract.maps().without_last()
        return Inversion(latents=maps.path[-1], nfe=nfe, maps=maps, **found)
    if method == "rf_inversion":
        device = latents.device if generator is None else generator.device
        noise = torch.randn(latents.shape, generator=generator, dtype=latents.dtype, device=device).to(latents.device)
        steered = ToNoise(noise, options["gamma"], options["compat"])
        nfe = run(steered, guidance=scale)
        assert steered.latents is not None  # it ran
        return Inversion(latents=steered.latents, nfe=nfe, **found)
    recorder = _Recorder("ddim" if method in _NOISE else method)
    nfe = run(recorder, guidance=1.0 if method == "null_text" else scale)
    trajectory = Trajectory(torch.stack(recorder.states), recorder.timesteps, recorder.solver)
    found |= {"latents": trajectory.noise, "trajectory": trajectory}
    if method != "null_text":
        return Inversion(nfe=nfe, **found)
    if count > 1:
        raise ValueError(f"null_text fits the texts of one image at a time, got {count}")
    fit = FitNullText(trajectory, scale, options["inner"])
    run(fit, guidance=scale)
    found["arguments"] = arguments | guided(pipe, scale)
    nulls = NullTexts(torch.stack(fit.found), trajectory, scale)
    return Inversion(nfe=nfe + fit.evaluations, nulls=nulls, **found)


def guided(pipe: Any, scale: float) -> dict[str, float]:
    """The argument that sets the guidance of `pipe`: `true_cfg_scale` where the pipeline guides by it at default."""
    true = inspect.signature(pipe.__call__).parameters.get("true_cfg_scale")
    return {"true_cfg_scale": scale} if true is not None and true.default > 1 else {"guidance_scale": scale}


def _latents(pipe: Any, image: Any, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, int]]:
    """The image's latents as the pipeline holds them, and its height and width where they are known."""
    size = {name: kwargs.pop(name) for name in ("height", "width") if kwargs.get(name) is not None}
    if not isinstance(image, Tensor):
        latents = encode(pipe, image, **size)
        first = image if isinstance(image, Image.Image) else image[0]
        return latents, {**dict(zip(("height", "width"), size_for(pipe, first), strict=True)), **size}
    if image.ndim == 4:
        return pack(pipe, image), dict(zip(("height", "width"), pixel_size(pipe, image), strict=True)) | size
    if image.ndim not in (3, 5):
        raise ValueError(f"image as latents has 3 (packed), 4 or 5 (video) dimensions, got {tuple(image.shape)}")
    if image.ndim == 3 and len(size) < 2:
        raise ValueError("packed latents do not tell their image's height and width; pass height=... and width=...")
    return image, size
