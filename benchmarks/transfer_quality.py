"""How often pictures are edited, transferred and interpolated as they should on the demo models, against what people
use without attention control.

    python benchmarks/transfer_quality.py --model unet --model mmdit --n 60

Pictures are rendered scenes the models were never trained on, with one object; the scene reader judges.
    real           P2P with local blend on an inverted picture: one attribute changed, the others kept
                   (against SDEdit, arXiv:2108.01073, with the new caption)
    appearance     Cross-Image Attention: shape and place of one picture, colour and texture of the other
                   (against SDEdit of the structure with the appearance's caption)
    style          Style swap: the drawing style of a picture, the prompt's shape and colour
                   (against the plain prompt, which says nothing of a style)
    interpolation  AID between two prompts: shape or colour of an end throughout, and a path on which every image is
                   farther from the first and nearer to the last than the one before
                   (against interpolated texts and noise alone)
Each cell: part of the cases in which all of it is right, and of each half of it.  --pictures writes the first cases.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from attnctrl.pipelines import CrossImagePipeline, InterpolationPipeline, PromptToPromptPipeline, StyleSwapPipeline
from diffusers import AutoPipelineForImage2Image
from PIL import Image

from attnctrl import attach, demo
from attnctrl.controls import TextInterpolation

STRENGTH = 0.75  # of SDEdit


@dataclass(frozen=True)
class Case:
    """What is shown (pictures for --pictures), and whether each half of the task was done, ours and the baseline's."""

    pictures: list[Image.Image]
    ours: tuple[bool, bool]
    base: tuple[bool, bool]


def rendered(rng: random.Random, size: str | None = None) -> tuple[demo.Scene, Image.Image]:
    """A held-out scene of one object, which its full caption describes, and its picture."""
    while True:
        scene = demo.sample_scene(rng, "single")
        item = scene.objects[0]
        stated = replace(scene, objects=(replace(item, x=None, y=None, radius=None),))
        if demo.is_held_out(stated) and size in (None, item.size):
            return stated, demo.render(scene)


def other(rng: random.Random, values: Sequence[str], taken: str | None) -> str:
    return rng.choice([value for value in values if value != taken])


def with_object(scene: demo.Scene, **changes: str | None) -> demo.Scene:
    return replace(scene, objects=(replace(scene.objects[0], **changes),))


def right(scene: demo.Scene, image: Image.Image, names: Sequence[str]) -> bool:
    found = demo.matches(scene, demo.read(image))
    return all(found[name] for name in ("count", *names) if name in found)


class Bench:
    """A demo model and the settings of its calls."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.pipe = name, demo.load(name)
        self.defaults = demo.defaults(name) | {"num_inference_steps": steps}
        self.again = AutoPipelineForImage2Image.from_pipe(self.pipe)
        self.again.set_progress_bar_config(disable=True)

    def sdedit(self, prompt: str, image: Image.Image, seed: int) -> Image.Image:
        given = dict(self.defaults)
        if self.name == "unet":
            given.pop("height"), given.pop("width")
        return self.again(prompt, image=image, strength=STRENGTH, generator=noise(seed), **given).images[0]

    def real(self, rng: random.Random, seed: int) -> Case:
        scene, picture = rendered(rng)
        kind = ("colour", "texture", "background")[seed % 3]
        item = scene.objects[0]
        if kind == "background":
            target = replace(scene, background=other(rng, list(demo.BACKGROUNDS), scene.background))
        else:
            values = list(demo.COLOURS) if kind == "colour" else list(demo.TEXTURES)
            target = with_object(scene, **{kind: other(rng, values, getattr(item, kind))})
        words = [[s.background] if kind == "background" else [s.objects[0].colour, s.objects[0].shape]
                 for s in (scene, target)]  # fmt: skip
        out = PromptToPromptPipeline(self.pipe, self.defaults)(
            scene.caption(), target.caption(), image=picture, blend=words, generator=noise(seed)
        )
        kept = [name for name in ("shape", "colour", "texture", "place", "background", "style") if name != kind]
        base = self.sdedit(target.caption(), picture, seed)
        ours = out.images[0]
        return Case([picture, out.source[0], ours, base], *(
            (right(target, image, [kind]), right(target, image, kept)) for image in (ours, base)
        ))  # fmt: skip

    def appearance(self, rng: random.Random, seed: int) -> Case:
        (structure, first), (appearance, second) = rendered(rng, "large"), rendered(rng, "large")
        look = appearance.objects[0]
        wanted = with_object(structure, colour=look.colour, texture=look.texture)
        out = CrossImagePipeline(self.pipe, self.defaults)(second, first, "", generator=noise(seed))
        base = self.sdedit(appearance.caption(), first, seed)
        return Case([first, second, out.images[0], base], *(
            (right(wanted, image, ["shape", "place"]), right(wanted, image, ["colour", "texture"]))
            for image in (out.images[0], base)
        ))  # fmt: skip

    def style(self, rng: random.Random, seed: int) -> Case:
        reference, picture = rendered(rng)
        content, _ = rendered(rng)
        prompt = replace(with_object(content, size=None), style=None, background=None)
        wanted = replace(prompt, style=reference.style)
        out = StyleSwapPipeline(self.pipe, self.defaults)(
            picture, prompt.caption(), reference_prompt=reference.caption(), generator=noise(seed)
        )
        base = self.pipe(prompt.caption(), generator=noise(seed), **self.defaults).images[0]
        return Case([picture, out.images[0], base], *(
            (right(wanted, image, ["style"]), right(wanted, image, ["shape", "colour"]))
            for image in (out.images[0], base)
        ))  # fmt: skip

    def interpolation(self, rng: random.Random, seed: int) -> Case:
        scene, _ = rendered(rng)
        kind = ("colour", "shape")[seed % 2]
        values = list(demo.COLOURS) if kind == "colour" else list(demo.SHAPES)
        end = with_object(scene, **{kind: other(rng, values, getattr(scene.objects[0], kind))})
        texts, count = (scene.caption(), end.caption()), 5
        latents = torch.cat([self.start(seed)] * count)  # one noise: the prompts differ
        given = self.defaults | {"latents": latents}
        ours = InterpolationPipeline(self.pipe, given)(*texts, count).images
        between = TextInterpolation(tuple(i / (count - 1) for i in range(count)))
        negative = {"negative_prompt": [""] * count} if "negative_prompt" in given else {}
        with attach(self.pipe, between):
            base = self.pipe([texts[0]] * (count - 1) + [texts[1]], **{**given, **negative}).images
        kept = "shape" if kind == "colour" else "colour"
        return Case([*ours, *base], *(
            (monotone(images), all(right(scene, image, [kept]) for image in images)) for images in (ours, base)
        ))  # fmt: skip

    def start(self, seed: int) -> torch.Tensor:
        """Noise as the pipeline takes it."""
        if self.name == "unet":
            return torch.randn(1, self.pipe.unet.config.in_channels, 16, 16, generator=noise(seed))
        return torch.randn(1, 256, self.pipe.transformer.config.in_channels, generator=noise(seed))


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def monotone(images: Sequence[Image.Image]) -> bool:
    """Whether every image is farther from the first, and nearer to the last, than the one before it."""
    pixels = [np.asarray(image, float) for image in images]
    away = [np.abs(x - pixels[0]).mean() for x in pixels]
    left = [np.abs(x - pixels[-1]).mean() for x in pixels]
    return all(a < b for a, b in itertools.pairwise(away)) and all(a > b for a, b in itertools.pairwise(left))


TASKS = {"real": ("changed", "kept"), "appearance": ("shape, place", "colour, texture"),
         "style": ("style", "content"), "interpolation": ("monotone path", "rest kept")}  # fmt: skip


def cell(verdicts: Sequence[tuple[bool, bool]]) -> str:
    both, first, second = (
        float(np.mean([f(v) for v in verdicts])) for f in (all, lambda v: v[0], lambda v: v[1])
    )  # fmt: skip
    return f"{both:.0%} ({first:.0%}, {second:.0%})"


def sheet(cases: Sequence[Case]) -> Image.Image:
    columns = max(len(case.pictures) for case in cases)
    picture = Image.new("RGB", (66 * columns, 66 * len(cases)))
    for row, case in enumerate(cases):
        for column, image in enumerate(case.pictures):
            picture.paste(image, (66 * column, 66 * row))
    return picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=demo.NAMES, help="once or twice; both by default")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="once or more; all by default")
    parser.add_argument("--n", type=int, default=60, help="cases of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=Path, help="folder for the first eight cases of each task")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in options.model or demo.NAMES:
        bench = Bench(name, options.steps)
        print(f"\n| {name}, {options.n} cases | all right (halves) | ours | baseline |\n|---|---|---|---|")
        for task in options.task or TASKS:
            run: Callable[[random.Random, int], Case] = getattr(bench, task)
            cases = [run(random.Random(f"{task}-{options.seed}-{i}"), i) for i in range(options.n)]
            ours, base = cell([case.ours for case in cases]), cell([case.base for case in cases])
            print(f"| {task} | {', '.join(TASKS[task])} | {ours} | {base} |", flush=True)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                sheet(cases[:8]).save(options.pictures / f"{name}_{task}.png")


if __name__ == "__main__":
    main()
