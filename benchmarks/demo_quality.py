"""How well the demo models draw what the caption says, read by the scene reader.

    python benchmarks/demo_quality.py --model unet mmdit --n 200

Prompts are held-out ones, half with one object and half with two; sampler settings are `demo.defaults(name)`.
Prints one markdown table; --pictures writes the first 64 of each model as a grid.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image

from attnctrl import demo

ROWS = {  # row of the table -> the attributes that must all be right
    "one object, all of it": ("count", "shape", "colour", "texture", "size", "place"),
    "two objects and relation": ("count", "shape", "colour", "texture", "shape 2", "colour 2", "texture 2", "relation"),
    "background": ("background",),
    "style": ("style",),
    "shape": ("shape", "shape 2"),
    "colour": ("colour", "colour 2"),
    "texture": ("texture", "texture 2"),
    "size": ("size",),
    "place": ("place",),
    "relation": ("relation",),
    "number of objects": ("count",),
}


def sample(name: str, pipe, prompts: list[str], seed: int, batch: int = 20) -> list[Image.Image]:
    """One picture of each prompt."""
    generator, images = torch.Generator().manual_seed(seed), []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        images += pipe(part, generator=generator, **demo.defaults(name, len(part))).images
    return images


def score(prompts: list[str], images: list[Image.Image]) -> dict[str, list[bool]]:
    """For each row of the table, one verdict a picture (a picture counts where its caption states something of the
    row)."""
    verdicts = defaultdict(list)
    for prompt, image in zip(prompts, images, strict=True):
        caption = demo.parse(prompt)
        right = demo.matches(caption, demo.read(image))
        for row, names in ROWS.items():
            number = {"one object, all of it": 1, "two objects and relation": 2}.get(row)
            stated = [right[name] for name in names if name in right]
            if stated and number in (None, len(caption.objects)):
                verdicts[row] += [all(stated)] if number else stated
    return verdicts


def grid(images: list[Image.Image], columns: int = 8) -> Image.Image:
    """Pictures side by side, enlarged twice."""
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (66 * columns, 66 * rows))
    for i, image in enumerate(images):
        sheet.paste(image, (66 * (i % columns), 66 * (i // columns)))
    return sheet.resize((132 * columns, 132 * rows), Image.Resampling.NEAREST)


def main() -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(demo.NAMES), choices=demo.NAMES)
    parser.add_argument("--n", type=int, default=200, help="prompts per model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts and of the noise")
    parser.add_argument("--folder", type=Path, help="a pipeline folder instead of the shipped weights")
    parser.add_argument("--pictures", type=Path, help="folder for a grid of pictures of each model")
    options = parser.parse_args()
    singles = options.n // 2
    prompts = demo.prompts(singles, options.seed, "single") + demo.prompts(options.n - singles, options.seed, "pair")
    columns, seconds = {}, {}
    for name in options.model:
        pipe = demo.load_folder(name, options.folder) if options.folder else demo.load(name)
        start = time.perf_counter()
        images = sample(name, pipe, prompts, options.seed)
        seconds[name] = (time.perf_counter() - start) / len(prompts)
        columns[name] = score(prompts, images)
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            grid(images[:32] + images[-32:]).save(options.pictures / f"{name}.png")
    print(f"| {options.n} held-out prompts | " + " | ".join(options.model) + " |")
    print("|---|" + "---|" * len(options.model))
    for row in ROWS:
        cells = [f"{100 * sum(c[row]) / max(len(c[row]), 1):.1f} % of {len(c[row])}" for c in columns.values()]
        print(f"| {row} | " + " | ".join(cells) + " |")
    print("| seconds a picture | " + " | ".join(f"{seconds[name]:.2f}" for name in options.model) + " |")


if __name__ == "__main__":
    main()
