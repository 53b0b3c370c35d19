"""Attention control in the browser: `python app.py`, then open the address it prints.

One tab per ready pipeline, each built by one function (`edit_by_prompt`).  What a tab does is plain Python that runs
without a browser: `edit(models, settings)` is a generator of `Progress` and, last, a `Result`.

One run at a time: all tabs share `Models`, which loads a model once and lends it to one user at a time.  Closing the
generator stops the run at its next step, and the pipeline is as it was.  Nothing is downloaded but a model that is
asked for by its hub id.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import os
import queue
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
import torch
from attnctrl.pipelines import PromptToPromptPipeline, ReadyPipeline
from diffusers import DiffusionPipeline
from PIL import Image

from attnctrl import demo
from attnctrl.demo.tokenizers import WORDS

log = logging.getLogger("attnctrl.app")

Word = str | tuple[str, int]
BLENDS = ("Off", "Words that differ", "Chosen words")
EDITS = {"Automatic": "auto", "Replace word by word": "replace", "Add or remove words": "refine"}
WINDOWS = {"unet": (0.8, 0.4), "mmdit": (0.4, 0.4)}  # cross and self, the defaults of these families
STRENGTHS = (-2.0, 5.0)
MAX_IMAGES, MAX_STEPS, MAX_SEED = 8, 200, 2**63 - 1


class Problem(Exception):
    """Something the user can put right; the message says how."""


class Cancelled(Exception):
    """Raised in the pipeline's step callback to leave a run."""


# --------------------------------------------------------------------------------------------------------------- models


@dataclass
class Models:
    """Pipelines by name, loaded once and lent to one user at a time; of models that are no demo the last `keep` stay.

    dtype, offload   for every model; dtype None: float32 for the demo models and on a CPU, else bfloat16
    only             the names that are lent; None: any
    """

    dtype: torch.dtype | None = None
    offload: str = "none"
    keep: int = 1
    only: frozenset[str] | None = None
    _loaded: dict[str, ReadyPipeline] = field(default_factory=dict, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    @contextlib.contextmanager
    def use(self, name: str, tell: Callable[[str], None] = lambda text: None) -> Iterator[ReadyPipeline]:
        """The pipeline of this name, for this user alone until the block ends."""
        if self.only is not None and name not in self.only:
            raise Problem(f"This server lends no model {name!r}; it has {', '.join(sorted(self.only))}.")
        if not self._lock.acquire(blocking=False):
            tell("Waiting for another run to end")
            self._lock.acquire()
        try:
            if name not in self._loaded:
                tell(f"Loading {name}")
                self._forget()
                self._loaded[name] = self._load(name)
            self._loaded[name] = self._loaded.pop(name)  # the last one used is the last to be forgotten
            yield self._loaded[name]
        finally:
            self._lock.release()

    def _forget(self) -> None:
        others = [name for name in self._loaded if name not in demo.NAMES]
        for name in others[: max(0, len(others) - self.keep + 1)]:
            del self._loaded[name]

    def dtype_for(self, name: str) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return torch.float32 if name in demo.NAMES or device() == "cpu" else torch.bfloat16

    def placement(self, name: str) -> str:
        """The call on a loaded pipeline that brings it where this app runs it."""
        plain = self.offload == "none" or name in demo.NAMES
        return f"to({device()!r})" if plain else f"enable_{self.offload}_cpu_offload()"

    def _load(self, name: str) -> ReadyPipeline:
        try:
            ready = ReadyPipeline.from_pretrained(name, dtype=self.dtype_for(name))
        except Exception as error:  # each part of a model has errors of its own: no file, no network, no such class ...
            log.exception("loading %r", name)
            raise Problem(
                f"The model {name!r} could not be loaded. Give a folder that save_pretrained wrote, or a hub id as "
                f"owner/name while this machine is online, or empty the field for a demo model. ({first_line(error)})"
            ) from error
        if not isinstance(ready.pipe, DiffusionPipeline):
            raise Problem(
                f"{name!r} holds a {type(ready.pipe).__name__}, not a diffusers pipeline. Choose another model."
            )
        if self.offload == "none" or name in demo.NAMES:
            ready.pipe.to(device())
        else:
            getattr(ready.pipe, f"enable_{self.offload}_cpu_offload")()
        ready.pipe.set_progress_bar_config(disable=True)
        return ready


def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:160]


# ------------------------------------------------------------------------------------------------------- edit by prompt


@dataclass(frozen=True)
class Settings:
    """What one picture is made from.  `model` is "unet", "mmdit", a hub id or a folder."""

    prompt: str
    edited: str
    model: str = "unet"
    strengths: Mapping[Word, float] = field(default_factory=dict)
    blend: bool | tuple[Sequence[Word], Sequence[Word]] = (
        False  # chosen: words of the prompt, words of the edited prompt
    )
    threshold: float = 0.3
    cross: float = 0.8
    self_: float = 0.4
    edit: str = "auto"
    seed: int = 0
    steps: int = 30
    guidance: float = 4.0
    images: int = 1

    def check(self) -> None:
        """Raises Problem for what needs no model to be seen wrong."""
        if not self.prompt.strip():
            raise Problem("The source prompt is empty. Describe the picture to start from.")
        if not self.edited.strip():
            raise Problem("The edited prompt is empty. Write the source prompt again, with the words you want changed.")
        if not _whole(self.seed, 0, MAX_SEED):
            raise Problem(f"The seed must be a whole number from 0 to {MAX_SEED}, not {self.seed!r}.")
        if not _whole(self.steps, 1, MAX_STEPS):
            raise Problem(f"Steps must be a whole number from 1 to {MAX_STEPS}, not {self.steps!r}.")
        if not _whole(self.images, 1, MAX_IMAGES):
            raise Problem(f"The number of images must be from 1 to {MAX_IMAGES}, not {self.images!r}.")
        counts = len(self.prompt.split()), len(self.edited.split())
        if self.edit == "replace" and counts[0] != counts[1]:
            raise Problem(
                f"To replace word by word, both prompts need equally many words, not {counts[0]} and {counts[1]}. "
                "Even them out, or let the prompts be matched automatically."
            )
        if self.blend is True and self.prompt.split() == self.edited.split():
            raise Problem(
                "The two prompts are the same, so no words differ. Change a word, choose the words to blend yourself, "
                "or switch blending off."
            )
        if isinstance(self.blend, tuple) and not any(self.blend):
            raise Problem(
                "No words to blend are chosen. Choose the words whose region may change, or switch blending off."
            )


@dataclass(frozen=True)
class Progress:
    """Where a run is: step `step` of `total` (0 of 0 before the first); sometimes with source and edit as they look."""

    text: str
    step: int = 0
    total: int = 0
    preview: list[Image.Image] | None = None


@dataclass(frozen=True)
class Result:
    """Per image: source, edit, and the mask (white where the edit could differ) when words were blended."""

    source: list[Image.Image]
    edit: list[Image.Image]
    masks: list[Image.Image] | None
    report: str
    code: str
    seconds: float


def edit(models: Models, settings: Settings, stop: threading.Event | None = None) -> Iterator[Progress | Result]:
    """Run prompt-to-prompt: yields `Progress`, then one `Result`.

    Setting `stop`, or closing the generator, leaves the run at its next step; Cancelled is raised in the first case.
    Raises Problem when the settings do not fit.
    """
    settings.check()
    news: queue.Queue[Progress | Result | Exception] = queue.Queue()
    stop = stop or threading.Event()
    worker = threading.Thread(target=_edit, args=(models, settings, news.put, stop), daemon=True)
    worker.start()
    try:
        while True:
            item = news.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, Result):
                return
    finally:
        stop.set()
        worker.join(timeout=60)  # one step; loading a large model may go on


def _edit(models: Models, settings: Settings, tell: Callable[[Any], None], stop: threading.Event) -> None:
    """The run, in a thread of its own: whatever happens reaches the generator as a message."""
    try:
        with models.use(settings.model, lambda text: tell(Progress(text))) as ready:
            if stop.is_set():
                raise Cancelled("cancelled before the first step")
            try:
                tell(_run(models, ready, settings, tell, stop))
            finally:
                ready.pipe.maybe_free_model_hooks()  # with offload, an unfinished call leaves its model on the device
    except (Problem, Cancelled) as error:
        tell(error)
    except (ValueError, TypeError, NotImplementedError) as error:  # settings that this model or its prompts cannot have
        log.info("refused", exc_info=True)
        tell(Problem(str(error) or type(error).__name__))
    except torch.OutOfMemoryError as error:
        tell(
            Problem(
                f"Not enough memory for this run. Make fewer images, or start with --offload. ({first_line(error)})"
            )
        )
    except Exception as error:
        log.exception("run failed")
        tell(
            Problem(
                f"The run failed. Try other settings; the whole error is in the server's log. ({first_line(error)})"
            )
        )


def _run(
    models: Models, ready: ReadyPipeline, settings: Settings, tell: Callable[[Progress], None], stop: threading.Event
) -> Result:
    arguments = call_arguments(ready, settings)
    accepted = inspect.signature(ready.pipe.__call__).parameters
    hooks = {}
    if "callback_on_step_end" in accepted:
        hooks["callback_on_step_end"] = _StepEnd(ready, settings.images, tell, stop)
    start = time.perf_counter()
    result = PromptToPromptPipeline.from_pipe(ready)(
        settings.prompt,
        settings.edited,
        **arguments,
        **hooks,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    if not all(isinstance(image, Image.Image) for image in [*result.source, *result.images]):
        raise Problem(f"{type(ready.pipe).__name__} makes videos; this tab shows images. Choose an image model.")
    code = python_code(settings, arguments, models.dtype_for(settings.model), models.placement(settings.model))
    seconds = time.perf_counter() - start
    return Result(list(result.source), list(result.images), result.masks, str(result.report), code, seconds)


@dataclass
class _StepEnd:
    """diffusers' callback_on_step_end: tells the step, cancels, and decodes a preview while that costs little."""

    ready: ReadyPipeline
    images: int
    tell: Callable[[Progress], None]
    stop: threading.Event
    _next: float = 0.0  # the time from which on another preview is worth its cost

    def __call__(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if self.stop.is_set():
            raise Cancelled(f"cancelled after step {index + 1}")
        total = len(pipe.scheduler.timesteps)
        picture = None
        if index + 1 < total and time.perf_counter() >= self._next:
            start = time.perf_counter()
            picture = preview(self.ready, tensors["latents"][[0, self.images]])
            self._next = time.perf_counter() + max(0.3, 10 * (time.perf_counter() - start))
        self.tell(Progress(f"Step {index + 1} of {total}", index + 1, total, picture))
        return {}


def preview(ready: ReadyPipeline, latents: torch.Tensor) -> list[Image.Image] | None:
    """Unfinished latents (rows, ...) as pictures; None where that is not cheap (offload) or not known (videos)."""
    pipe: Any = ready.pipe
    vae: Any = getattr(pipe, "vae", None)
    scale = getattr(getattr(vae, "config", None), "scaling_factor", None)
    if scale is None or hasattr(vae, "_hf_hook"):
        return None
    if latents.ndim == 3 and hasattr(pipe, "_unpack_latents"):  # FLUX: (rows, tokens, 4 channels)
        side = getattr(pipe, "default_sample_size", 0) * pipe.vae_scale_factor
        height, width = (ready.defaults.get(name, side) for name in ("height", "width"))
        latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    if latents.ndim != 4 or latents.shape[1] != vae.config.latent_channels:
        return None
    latents = latents.to(vae.dtype) / scale + (getattr(vae.config, "shift_factor", None) or 0)
    return pipe.image_processor.postprocess(vae.decode(latents, return_dict=False)[0], output_type="pil")


def call_arguments(ready: ReadyPipeline, settings: Settings) -> dict[str, Any]:
    """What PromptToPromptPipeline is called with, besides prompts and generator; what is not said keeps its default."""
    said: dict[str, Any] = {}
    if settings.strengths:
        said["strengths"] = dict(settings.strengths)
    if settings.blend is not False:
        said["blend"] = True if settings.blend is True else [list(words) for words in settings.blend]
        said["threshold"] = settings.threshold
    said |= {"cross": settings.cross, "self_": settings.self_}
    if settings.edit != "auto":
        said["edit"] = settings.edit
    if settings.images != 1:
        said["num_images_per_prompt"] = settings.images
    said["num_inference_steps"] = settings.steps
    said[guidance_name(ready)] = settings.guidance
    if "true_cfg_scale" in said and "negative_prompt" not in ready.defaults:
        said["negative_prompt"] = " "  # without one these pipelines run no second branch
    return said


def guidance_name(ready: ReadyPipeline) -> str:
    """The argument that guidance goes to: pipelines with true_cfg_scale have it beside or instead of guidance_scale."""
    if "true_cfg_scale" in ready.defaults:
        return "true_cfg_scale"
    accepted = inspect.signature(ready.pipe.__call__).parameters
    plain = accepted.get("guidance_scale")
    return (
        "true_cfg_scale"
        if "true_cfg_scale" in accepted and (plain is None or plain.default is None)
        else "guidance_scale"
    )


def python_code(settings: Settings, arguments: Mapping[str, Any], dtype: torch.dtype, placement: str) -> str:
    """The program that makes the same picture."""
    options = "" if dtype == torch.float32 else f", dtype={dtype}"
    lines = [
        "import torch",
        "from attnctrl.pipelines import PromptToPromptPipeline",
        "",
        f"pipe = PromptToPromptPipeline.from_pretrained({settings.model!r}{options})",
    ]
    if placement != "to('cpu')":
        lines.append(f"pipe.pipe.{placement}")
    lines += ["result = pipe(", f"    {settings.prompt!r},", f"    {settings.edited!r},"]
    lines += [f"    {name}={value!r}," for name, value in arguments.items()]
    lines += [f"    generator=torch.Generator().manual_seed({settings.seed}),", ")"]
    lines += ['result.source[0].save("source.png")', 'result.images[0].save("edit.png")']
    if "blend" in arguments:
        lines.append('result.masks[0].save("mask.png")')
    return "\n".join(lines) + "\n"


def words_of(prompt: str) -> dict[str, Word]:
    """{label: word} of a prompt in order, without the punctuation around words; a word that is there twice is a pair
    (word, which), labelled "cat" and "cat (2)"."""
    bare = [word for word in map(_bare, prompt.split()) if word]
    found: dict[str, Word] = {}
    for i, word in enumerate(bare):
        which = bare[:i].count(word)
        found[f"{word} ({which + 1})" if which else word] = (word, which) if bare.count(word) > 1 else word
    return found


def _bare(word: str) -> str:
    kept = [i for i, character in enumerate(word) if unicodedata.category(character)[0] not in "PS"]
    return word[kept[0] : kept[-1] + 1] if kept else ""


def unknown_words(model: str, *prompts: str) -> list[str]:
    """Words that a demo model was never shown."""
    if model not in demo.NAMES:
        return []
    given = [word for prompt in prompts for word in re.findall(r"\w+", prompt.lower())]
    return [word for word in dict.fromkeys(given) if word not in WORDS]


def _whole(number: Any, least: int, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= most


# ------------------------------------------------------------------------------------------------------------- the page

EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    (
        "Another colour",
        {
            "prompt": "a red circle left of a blue square on a white background",
            "edited": "a green circle left of a blue square on a white background",
        },
    ),
    (
        "Another shape",
        {
            "prompt": "a large yellow star in the centre on a gray background, flat",
            "edited": "a large yellow circle in the centre on a gray background, flat",
            "cross": 0.3,
            "self_": 0.2,
        },
    ),
    (
        "A texture added",
        {
            "prompt": "a purple square above a cyan circle on a sand background",
            "edited": "a striped purple square above a cyan circle on a sand background",
            "blend": "Chosen words",
            "blend_source": ["square"],
            "blend_edited": ["striped", "square"],
        },
    ),
    (
        "A word made stronger",
        {
            "prompt": "a large dotted green circle in the centre on a pink background",
            "edited": "a large dotted green circle in the centre on a pink background",
            "blend": "Off",
            "strengths": {"dotted": 4.0},
        },
    ),
    (
        "Colour edit on the MMDiT",
        {
            "prompt": "a blue triangle right of a yellow cross on a white background",
            "edited": "a red triangle right of a yellow cross on a white background",
            "model": "mmdit",
            "cross": 0.4,
        },
    ),
]
DEFAULTS: dict[str, Any] = {
    "prompt": EXAMPLES[0][1]["prompt"],
    "edited": EXAMPLES[0][1]["edited"],
    "model": "unet",
    "other": "",
    "strengths": {},
    "blend": BLENDS[1],
    "blend_source": [],
    "blend_edited": [],
    "threshold": 0.3,
    "cross": WINDOWS["unet"][0],
    "self_": WINDOWS["unet"][1],
    "edit": "Automatic",
    "seed": 0,
    "steps": 30,
    "guidance": 4.0,
    "images": 1,
}


def settings_from(form: Mapping[str, Any]) -> Settings:
    """Settings from the fields of the form; strengths of words that are no longer in the prompt are left out."""
    there = words_of(form["edited"] or "")
    strengths = {there[label]: value for label, value in form["strengths"].items() if label in there and value != 1}
    blend: Any = form["blend"] == BLENDS[1]
    if form["blend"] == BLENDS[2]:
        blend = tuple(
            [words_of(prompt or "").get(label, label) for label in chosen or ()]
            for prompt, chosen in ((form["prompt"], form["blend_source"]), (form["edited"], form["blend_edited"]))
        )
    return Settings(
        prompt=form["prompt"] or "",
        edited=form["edited"] or "",
        model=(form["other"] or "").strip() or form["model"],
        strengths=strengths,
        blend=blend,
        threshold=form["threshold"],
        cross=form["cross"],
        self_=form["self_"],
        edit=EDITS[form["edit"]],
        seed=_integer(form["seed"]),
        steps=_integer(form["steps"]),
        guidance=form["guidance"],
        images=_integer(form["images"]),
    )


def _integer(number: Any) -> Any:
    """4.0 as 4; anything else as it is, for `check` to refuse."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def gallery(result: Result) -> list[tuple[Image.Image, str]]:
    columns = [(result.source, "source"), (result.edit, "edit"), (result.masks or [], "mask")]
    return [(_shown(images[i]), name) for i in range(len(result.edit)) for images, name in columns if images]


def _shown(image: Image.Image) -> Image.Image:
    """Small pictures with every pixel enlarged, so that browsers do not blur them."""
    times = 256 // max(image.size)
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST) if times > 1 else image


def edit_by_prompt(page: gr.Blocks, models: Models, running: dict[str, threading.Event], model: str) -> None:
    """The tab "Edit by prompt"."""
    form: dict[str, Any] = {"strengths": gr.State({})}
    refresh = gr.State(0)  # counted up when the sliders must show other strengths
    gr.Markdown(
        "Write a prompt and a changed version of it. Both pictures are made from one noise, and the second follows the "
        "attention of the first, so that only what you changed changes."
    )
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            form["prompt"] = gr.Textbox(DEFAULTS["prompt"], label="Source prompt", lines=2)
            form["edited"] = gr.Textbox(DEFAULTS["edited"], label="Edited prompt", lines=2)
            with gr.Row():
                run = gr.Button("Run", variant="primary", min_width=120)
                cancel = gr.Button("Cancel", variant="stop", min_width=120)
            examples = gr.Dataset(
                components=[gr.Textbox(visible=False)],
                samples=[[name] for name, _ in EXAMPLES],
                label="Examples: click one to run it",
                type="index",
            )
            form["model"] = gr.Radio(
                [("UNet", "unet"), ("MMDiT", "mmdit")],
                value=model if model in demo.NAMES else "unet",
                label="Demo model",
                info="Small models of coloured shapes that ship with attnctrl.",
            )
            form["other"] = gr.Textbox(
                "" if model in demo.NAMES else model,
                label="Other model",
                info="A hub id (owner/name) or a folder; used instead of the demo model when filled.",
                placeholder="empty: the demo model",
                visible=models.only is None or model not in demo.NAMES,
                interactive=models.only is None,
            )
        with gr.Column(scale=7, min_width=320):
            status = gr.Markdown("Ready. Press Run.", min_height=64)
            pictures = gr.Gallery(
                show_label=False, columns=3, object_fit="contain", height="max-content", format="png", interactive=False
            )
            gr.Markdown("Source, edit and, with local blend, the mask: white is where the edit may differ.")
            with gr.Accordion("The same picture in Python", open=False):
                code = gr.Code(language="python", show_label=False, lines=4, show_line_numbers=False, wrap_lines=True)
            with gr.Accordion("What attention control did", open=False):
                report = gr.Code(
                    language=None, show_label=False, lines=4, max_lines=20, show_line_numbers=False, wrap_lines=True
                )
    with gr.Accordion("Strength of each word: 1 is unchanged"):
        _word_sliders(page, form, refresh)
    with gr.Row():
        with gr.Column(min_width=320), gr.Accordion("Keep the rest as it is (local blend)"):
            form["blend"] = gr.Radio(list(BLENDS), value=DEFAULTS["blend"], label="Words whose region may change")
            with gr.Column(visible=False) as chosen:
                form["blend_source"] = gr.Dropdown(
                    list(words_of(DEFAULTS["prompt"])), multiselect=True, allow_custom_value=True, label="Of the source"
                )
                form["blend_edited"] = gr.Dropdown(
                    list(words_of(DEFAULTS["edited"])), multiselect=True, allow_custom_value=True, label="Of the edit"
                )
            form["threshold"] = gr.Slider(
                0, 1, DEFAULTS["threshold"], step=0.05, label="Threshold", info="Higher: a smaller region."
            )
        with gr.Column(min_width=320), gr.Accordion("How long the edit follows the source"):
            form["cross"] = gr.Slider(
                0, 1, DEFAULTS["cross"], step=0.05, label="Cross-attention", info="Part of the run. Less: freer edits."
            )
            form["self_"] = gr.Slider(
                0, 1, DEFAULTS["self_"], step=0.05, label="Self-attention", info="More keeps shapes and layout."
            )
            form["edit"] = gr.Radio(list(EDITS), value=DEFAULTS["edit"], label="How the prompts are matched")
        with gr.Column(min_width=320), gr.Accordion("Seed, steps, guidance, images"):
            form["seed"] = gr.Number(DEFAULTS["seed"], label="Seed", info="The same seed gives the same picture.")
            form["steps"] = gr.Slider(1, 100, DEFAULTS["steps"], step=1, label="Steps")
            form["guidance"] = gr.Slider(1, 15, DEFAULTS["guidance"], step=0.5, label="Guidance")
            form["images"] = gr.Slider(1, MAX_IMAGES, DEFAULTS["images"], step=1, label="Images")

    names, fields = list(form), list(form.values())
    outputs = [status, pictures, report, code]

    def start(request: gr.Request, *values: Any) -> Iterator[Any]:
        yield from show(models, dict(zip(names, values, strict=True)), running, str(request.session_hash))

    def halt(request: gr.Request) -> str:
        return stop_run(running, str(request.session_hash))

    options: dict[str, Any] = {
        "concurrency_limit": 1,
        "concurrency_id": "model",
        "show_progress_on": status,
        "api_visibility": "private",
    }
    quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    started = gr.on([run.click, form["prompt"].submit, form["edited"].submit], start, fields, outputs, **options)
    # only events of the queue tell gr.render that a state changed
    from_example = examples.click(
        partial(fill, names), [examples, refresh], [*fields, refresh], **{**quick, "queue": True}
    ).then(start, fields, outputs, **options)
    cancel.click(halt, None, status, cancels=[started, from_example], **quick)

    form["model"].input(lambda name: WINDOWS[name], form["model"], [form["cross"], form["self_"]], **quick)
    form["blend"].change(lambda way: gr.Row(visible=way == BLENDS[2]), form["blend"], chosen, **quick)
    for prompt, chosen_words in (("prompt", "blend_source"), ("edited", "blend_edited")):
        form[prompt].change(choices, [form[prompt], form[chosen_words]], form[chosen_words], **quick)


def _word_sliders(page: gr.Blocks, form: Mapping[str, Any], refresh: gr.State) -> None:
    """A slider for each word of the edited prompt.  Their values live in the state `strengths`, {label: strength}."""

    @gr.render(
        inputs=[form["edited"], form["strengths"]],
        triggers=[form["edited"].change, refresh.change, page.load],
        show_progress="hidden",
    )
    def sliders(prompt: str, strengths: dict[str, float]) -> None:
        words = words_of(prompt or "")
        if not words:
            gr.Markdown("The words of the edited prompt appear here.")
        with gr.Row():
            for label in words:
                slider = gr.Slider(
                    *STRENGTHS,
                    strengths.get(label, 1),
                    step=0.1,
                    label=label,
                    min_width=200,
                    buttons=[],
                    interactive=True,
                )
                slider.change(
                    partial(_set_strength, label),
                    [slider, form["strengths"]],
                    form["strengths"],
                    trigger_mode="always_last",
                    queue=False,
                    show_progress="hidden",
                    api_visibility="private",
                )


def _set_strength(label: str, value: float, strengths: dict[str, float]) -> dict[str, float]:
    return {**strengths, label: value}


def choices(prompt: str, chosen: list[str] | None) -> Any:
    """The words of a prompt to choose from; what was chosen stays if it is still there."""
    words = words_of(prompt or "")
    return gr.update(choices=list(words), value=[word for word in chosen or () if word in words])


def fill(names: Sequence[str], index: int, refreshed: int) -> list[Any]:
    """The fields `names` of the form as an example has them, and the count of refreshes."""
    example = EXAMPLES[index][1]
    values = {
        **DEFAULTS,
        **dict(zip(("cross", "self_"), WINDOWS[example.get("model", "unet")], strict=True)),
        **example,
    }
    for prompt, chosen in (("prompt", "blend_source"), ("edited", "blend_edited")):
        values[chosen] = gr.update(choices=list(words_of(values[prompt])), value=values[chosen])
    return [*(values[name] for name in names), refreshed + 1]


def show(
    models: Models,
    form: Mapping[str, Any],
    running: dict[str, threading.Event],
    user: str,
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A run for the page: status, gallery, report, code."""
    stop = running[user] = threading.Event()
    same = gr.skip()
    try:
        settings = settings_from(form)
        unknown = unknown_words(settings.model, settings.prompt, settings.edited)
        for news in edit(models, settings, stop):
            if isinstance(news, Result):
                note = f" The demo models were never shown: {', '.join(unknown)}." if unknown else ""
                done = f"Done in {news.seconds:.1f} s with {settings.model}, seed {settings.seed}.{note}"
                yield done, gallery(news), news.report, news.code
            else:
                seen = [
                    (_shown(image), name) for image, name in zip(news.preview or (), ("source", "edit"), strict=False)
                ]
                yield progress_bar(news), seen or same, same, same
    except Cancelled:
        yield "Cancelled.", same, same, same
    except Problem as problem:
        raise gr.Error(str(problem), duration=20, print_exception=False) from None
    finally:
        if running.get(user) is stop:
            del running[user]


def progress_bar(news: Progress, length: int = 20) -> str:
    """gradio's own bar is for functions that return once; a generator that shows previews writes its own."""
    done = length * news.step // max(news.total, 1)
    return f"{news.text} {'▰' * done}{'▱' * (length - done)}" if news.total else f"{news.text} ..."


def stop_run(running: Mapping[str, threading.Event], user: str) -> str:
    """Stops the run of this user; the others' go on."""
    stop = running.get(user)
    if stop is None:
        return "No run of yours is going on."
    stop.set()
    return "Cancelled."


def theme() -> gr.themes.Base:
    """Fonts of the reader's system: none from the network."""
    return gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def build(models: Models | None = None, model: str = "unet") -> gr.Blocks:
    """The page.  `model` is what the model fields begin with."""
    models = models or Models()
    running: dict[str, threading.Event] = {}
    with gr.Blocks(title="attnctrl", analytics_enabled=False, delete_cache=(3600, 24 * 3600)) as page:
        gr.Markdown("# attnctrl: attention control for diffusion models")
        with gr.Tab("Edit by prompt"):
            edit_by_prompt(page, models, running, model)
    return page.queue(default_concurrency_limit=8)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Attention control in the browser, on two small demo models or any diffusers model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    only = "visitors can then use the demo models and --model only"
    parser.add_argument("--model", default="unet", help="unet or mmdit (the demo models), a hub id, or a folder")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "float16", "bfloat16"],
        help="auto: bfloat16 on a GPU, float32 on a CPU and for the demo models",
    )
    parser.add_argument(
        "--offload",
        default="none",
        choices=["none", "model", "sequential"],
        help="keep models in main memory and move them (whole, or layer by layer) to the GPU when they run",
    )
    parser.add_argument("--host", default="127.0.0.1", help=f"address to listen on; beyond this machine, {only}")
    parser.add_argument("--port", type=int, default=argparse.SUPPRESS, help="port (default: the first free from 7860)")
    parser.add_argument("--share", action="store_true", help=f"make a public link through gradio's tunnel; {only}")
    given = parser.parse_args(arguments)
    local = given.host in ("127.0.0.1", "localhost", "::1") and not given.share
    models = Models(
        None if given.dtype == "auto" else getattr(torch, given.dtype),
        given.offload,
        only=None if local else frozenset((*demo.NAMES, given.model)),
    )
    try:
        build(models, given.model).launch(
            server_name=given.host,
            server_port=getattr(given, "port", None),
            share=given.share,
            theme=theme(),
            footer_links=[],
            run_history=False,
            ssr_mode=False,
        )
    except OSError as error:
        parser.error(f"{error} Choose another --port or --host.")


if __name__ == "__main__":
    main()
