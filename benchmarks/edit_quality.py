"""How often an edit by prompt-to-prompt does what it should on the demo models, and how much it changes elsewhere.

    python benchmarks/edit_quality.py --model unet --model mmdit --n 100

Prompt pairs come from captions the models were never trained on and differ in one word: a colour, a texture, the
background, or a shape.  The scene reader judges.  Only pairs whose source picture was read right count.
    done      the new attribute is there, and count, relation and the other object (for a background: every object)
              are as the caption says
    exact     all attributes of the edited caption are read right
    outside   mean squared change (0-255 scale) outside the edited object; for a background edit, on the objects
Against what people use without attention control: the same seed with the new prompt, and SDEdit (arXiv:2108.01073,
image to image) from the source picture, at the strength that does most edits of a kind.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from attnctrl.pipelines.prompt_to_prompt import changed_words
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from PIL import Image

from attnctrl import attach, demo
from attnctrl.controls import PromptToPrompt
from attnctrl.latents import LocalBlend

KINDS = ("colour", "texture", "background", "shape")
STRENGTHS = (0.6, 0.75, 0.9)


@dataclass(frozen=True)
class Pair:
    """A caption, the edited caption, what differs, and in which object (0 or 1; None for the background)."""

    source: demo.Scene
    target: demo.Scene
    kind: str
    index: int | None

    @property
    def prompts(self) -> list[str]:
        return [self.source.caption(), self.target.caption()]


def make_pairs(n: int, seed: int) -> list[Pair]:
    """A fifth of the pairs each for colour, texture and background, two fifths for shapes."""
    rng = random.Random(f"edits-{seed}")
    kinds = [("colour", "texture", "background", "shape", "shape")[i % 5] for i in range(n)]
    return [_pair(rng, kind) for kind in kinds]


def _pair(rng: random.Random, kind: str) -> Pair:
    _, caption = demo.sample_pair(rng, "any", held_out=True)
    if kind == "background":
        other = rng.choice([name for name in demo.BACKGROUNDS if name != caption.background])
        return Pair(caption, replace(caption, background=other), kind, None)
    index = rng.randrange(len(caption.objects))
    if kind == "texture" and caption.objects[index].texture is None:  # say it, so that the prompts differ in a word
        caption = _with(caption, index, "texture", "plain")
    taken = {getattr(item, kind) for item in caption.objects} if kind != "texture" else {caption.objects[index].texture}
    values = {"colour": demo.COLOURS, "texture": demo.TEXTURES, "shape": demo.SHAPES}[kind]
    return Pair(caption, _with(caption, index, kind, rng.choice([v for v in values if v not in taken])), kind, index)


def blend_words(pair: Pair) -> list[list[str | int]]:
    """For both prompts, the words whose region may change: an object's colour and shape, else what differs."""
    if pair.index is None:
        return [list(side) for side in changed_words(*pair.prompts)]
    return [[item.colour, item.shape] for item in (scene.objects[pair.index] for scene in (pair.source, pair.target))]


def _with(scene: demo.Scene, index: int, attribute: str, value: str) -> demo.Scene:
    objects = list(scene.objects)
    objects[index] = replace(objects[index], **{attribute: value})
    return replace(scene, objects=tuple(objects))


# ------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Verdict:
    done: bool
    exact: bool
    outside: float


def judge(pair: Pair, source: Image.Image, edited: Image.Image) -> Verdict:
    before, after = demo.read_details(source), demo.read_details(edited)
    found = demo.matches(pair.target, after.scene)
    suffixes = ["", " 2"]
    wanted = ["count"] + (["relation"] if pair.source.relation else [])
    if pair.index is None:
        wanted += ["background"] + [
            a + suffixes[i] for i in range(len(pair.source.objects)) for a in ("shape", "colour", "texture")
        ]
    else:
        wanted += [pair.kind + suffixes[pair.index]]
        wanted += (
            [a + suffixes[1 - pair.index] for a in ("shape", "colour", "texture")]
            if len(pair.source.objects) == 2
            else []
        )
    region = np.zeros((demo.scene.SIDE,) * 2, bool)
    if pair.index is None:
        for mask in before.masks:
            region |= mask
        outside = ~_grown(~region, 3)  # the rim shares latent pixels with the background
    else:
        region |= _mask_of(pair.source.objects[pair.index], before) | _mask_of(pair.target.objects[pair.index], after)
        outside = ~_grown(region, 2)
    change = (np.asarray(source, float) - np.asarray(edited, float)) ** 2
    mean = float(change[outside].mean()) if outside.any() else 0.0
    return Verdict(all(found[name] for name in wanted), all(found.values()), mean)


def source_right(pair: Pair, source: Image.Image) -> bool:
    return all(demo.matches(pair.source, demo.read(source)).values())


def _mask_of(item: demo.Object, reading: demo.Reading) -> np.ndarray:
    """The mask of the object read that agrees best with `item`."""
    scores = [
        sum(getattr(item, a) == getattr(seen, a) for a in ("shape", "colour", "texture"))
        for seen in reading.scene.objects
    ]
    return reading.masks[int(np.argmax(scores))] if scores else np.zeros((demo.scene.SIDE,) * 2, bool)


def _grown(mask: np.ndarray, pixels: int) -> np.ndarray:
    for _ in range(pixels):
        padded = np.pad(mask, 1)
        mask = padded[1:-1, 1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    return mask


# ------------------------------------------------------------------------------------------------------------- methods


def arguments(name: str, count: int) -> dict:
    """The demo model's own call arguments for `count` prompts."""
    return demo.defaults(name, count) | STEPS


STEPS: dict[str, int] = {}  # set by --steps


def seeds(first: int, count: int, copies: int = 1) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + i) for i in range(count) for _ in range(copies)]


def batches(pairs: Sequence[Pair], size: int) -> Iterator[tuple[int, Sequence[Pair]]]:
    for start in range(0, len(pairs), size):
        yield start, pairs[start : start + size]


def plain(pipe: DiffusionPipeline, name: str, texts: Sequence[str], size: int) -> list[Image.Image]:
    """One picture per text, picture i from seed i."""
    images: list[Image.Image] = []
    for start in range(0, len(texts), size):
        part = list(texts[start : start + size])
        images += pipe(part, generator=seeds(start, len(part)), **arguments(name, len(part))).images
    return images


def edit(
    pipe: DiffusionPipeline, name: str, pairs: Sequence[Pair], size: int, *, blend: bool, local: dict, p2p: dict
) -> tuple[list[Image.Image], list[Image.Image]]:
    """The source and the edited pictures, by prompt-to-prompt, with local blend or without."""
    images: list[Image.Image] = []
    for start, part in batches(pairs, size):
        prompts = [pair.prompts for pair in part]
        controls: list = [PromptToPrompt(prompts, **p2p)]
        if blend:
            controls.insert(0, LocalBlend(prompts, [words for pair in part for words in blend_words(pair)], **local))
        flat = [text for texts in prompts for text in texts]
        with attach(pipe, *controls):
            images += pipe(flat, generator=seeds(start, len(part), 2), **arguments(name, len(flat))).images
    return images[::2], images[1::2]


def sdedit(
    pipe: DiffusionPipeline,
    name: str,
    pairs: Sequence[Pair],
    sources: Sequence[Image.Image],
    strength: float,
    size: int,
) -> list[Image.Image]:
    """Image to image from the source picture with the edited prompt."""
    again = AutoPipelineForImage2Image.from_pipe(pipe)
    again.set_progress_bar_config(disable=True)
    images: list[Image.Image] = []
    for start, part in batches(pairs, size):
        given = arguments(name, len(part))
        if name == "unet":
            given.pop("height"), given.pop("width")
        images += again(
            [pair.prompts[1] for pair in part], image=list(sources[start : start + len(part)]), strength=strength,
            generator=seeds(start, len(part)), **given,
        ).images  # fmt: skip
    return images


# -------------------------------------------------------------------------------------------------------------- tables


def rates(verdicts: Sequence[Verdict], pairs: Sequence[Pair], kinds: Sequence[str]) -> tuple[int, float, float, float]:
    chosen = [v for v, pair in zip(verdicts, pairs, strict=True) if pair.kind in kinds]
    if not chosen:
        return 0, float("nan"), float("nan"), float("nan")
    return len(chosen), *(float(np.mean([getattr(v, a) for v in chosen])) for a in ("done", "exact", "outside"))


GROUPS = {
    "colour": ("colour",),
    "texture": ("texture",),
    "background": ("background",),
    "colour, texture, background": KINDS[:3],
    "shape": ("shape",),
}


def table(
    name: str, results: dict[str, list[Verdict]], pairs: Sequence[Pair], rows: Sequence[str] = tuple(GROUPS)
) -> str:
    lines = [
        f"| {name} | edits | " + " | ".join(f"{method}: done / exact / outside" for method in results) + " |",
        "|---" * (2 + len(results)) + "|",
    ]
    for label in rows:
        cells = []
        for verdicts in results.values():
            n, done, exact, outside = rates(verdicts, pairs, GROUPS[label])
            cells.append(f"{done:.0%} / {exact:.0%} / {outside:.1f}")
        lines.append(f"| {label} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best_strength(
    verdicts: dict[float, list[Verdict]], pairs: Sequence[Pair]
) -> tuple[list[Verdict], dict[str, float]]:
    """For each kind of edit, the verdicts at the strength that does most edits (of equals: changes least)."""
    chosen: dict[str, float] = {}
    for kind in KINDS:
        score = {s: (rates(v, pairs, (kind,))[1], -rates(v, pairs, (kind,))[3]) for s, v in verdicts.items()}
        chosen[kind] = max(score, key=lambda s: score[s])
    return [verdicts[chosen[pair.kind]][i] for i, pair in enumerate(pairs)], chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=demo.NAMES, help="once or twice; both by default")
    parser.add_argument("--n", type=int, default=100, help="prompt pairs per model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10, help="pairs per pipeline call")
    parser.add_argument("--cross", type=float, help="window of the control; its default otherwise")
    parser.add_argument("--self", type=float, dest="self_")
    parser.add_argument("--joint", choices=("exact", "image_qk"))
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--start", type=float, default=0.2)
    parser.add_argument("--sites", help="selector of the local blend's sites")
    parser.add_argument("--no-baselines", action="store_true", help="prompt-to-prompt only")
    parser.add_argument("--steps", type=int, help="sampling steps; the model's default otherwise")
    options = parser.parse_args()
    if options.steps:
        STEPS["num_inference_steps"] = options.steps
    torch.set_grad_enabled(False)
    p2p = {"cross": options.cross, "self_": options.self_, "joint": options.joint}
    local = {"threshold": options.threshold, "start": options.start} | (
        {"sites": options.sites} if options.sites else {}
    )
    for name in options.model or demo.NAMES:
        pipe = demo.load(name)
        everything = make_pairs(options.n, options.seed)
        pictures, blended = edit(pipe, name, everything, options.batch, blend=True, local=local, p2p=p2p)
        right = [i for i, pair in enumerate(everything) if source_right(pair, pictures[i])]
        outputs = {
            "P2P": edit(pipe, name, everything, options.batch, blend=False, local=local, p2p=p2p)[1],
            "P2P + LocalBlend": blended,
        }
        if not options.no_baselines:
            outputs["same seed"] = plain(pipe, name, [pair.prompts[1] for pair in everything], 2 * options.batch)
        pairs = [everything[i] for i in right]

        def verdicts(images: Sequence[Image.Image], pairs=pairs, pictures=pictures, right=right) -> list[Verdict]:
            return [judge(pair, pictures[i], images[i]) for pair, i in zip(pairs, right, strict=True)]

        results = {method: verdicts(images) for method, images in outputs.items()}
        chosen: dict[str, float] = {}
        if not options.no_baselines:
            swept = {s: verdicts(sdedit(pipe, name, everything, pictures, s, 2 * options.batch)) for s in STRENGTHS}
            results["SDEdit"], chosen = best_strength(swept, pairs)
        print(f"\n{len(right)} of {len(everything)} source pictures were read right; {p2p}, {local}\n")
        print(table(name, results, pairs))
        if chosen:
            print("\nSDEdit strengths: " + ", ".join(f"{kind} {strength}" for kind, strength in chosen.items()))
            for label in ("colour, texture, background", "shape"):
                base = rates(results["same seed"], pairs, GROUPS[label])[3]
                ours = rates(results["P2P + LocalBlend"], pairs, GROUPS[label])[3]
                times = base / max(ours, 1e-9)
                print(
                    f"outside change, {label}: {base:.1f} same seed, {ours:.1f} with blend, {times:.0f} times smaller"
                )


if __name__ == "__main__":
    main()
