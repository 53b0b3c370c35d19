"""The command line: `attnctrl edit "a red circle" "a green circle" -o edit.png`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
PANEL = 256  # pixels of a panel's shorter side, at least


class Fault(Exception):
    """Something the user can put right."""


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"attnctrl {version('attnctrl')}")
        raise typer.Exit


@app.callback()
def attnctrl(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Attention control for diffusion models."""


@app.command()
def edit(
    prompt: Annotated[str, typer.Argument(help="What to generate.")],
    edits: Annotated[list[str], typer.Argument(help="The edited prompt, or several.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write.")] = Path("edit.png"),
    model: Annotated[str, typer.Option(help="unet or mmdit (demo models), a hub id or a folder.")] = "unet",
    blend: Annotated[bool, typer.Option(help="Keep the picture outside the words that differ.")] = True,
    blend_word: Annotated[
        list[str] | None, typer.Option(help="A word of all prompts whose region may change; may be repeated.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Of the words' maps: higher keeps more.")] = 0.4,
    strength: Annotated[
        list[str] | None, typer.Option(help="word=factor on the attention of an edited word; may be repeated.")
    ] = None,
    cross: Annotated[
        float | None, typer.Option(help="Fraction of the run in which cross-attention follows the source.")
    ] = None,
    self_: Annotated[float | None, typer.Option("--self", help="The same for self-attention.")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    report: Annotated[bool, typer.Option("--report", help="Print what attention control did.")] = False,
) -> None:
    """Edit a generated picture by editing its prompt: source, edit, and where it changed, side by side."""
    strengths = dict(_strength(text) for text in strength or ())
    _check_output(output)
    pipe = _load(model, device, dtype)

    import torch
    from tqdm import tqdm

    arguments: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
    if steps is not None:
        arguments["num_inference_steps"] = steps
    if guidance is not None:
        arguments["true_cfg_scale" if "true_cfg_scale" in pipe.defaults else "guidance_scale"] = guidance
    words: Any = [blend_word] * (1 + len(edits)) if blend_word else blend and any(text != prompt for text in edits)
    with tqdm(total=steps or pipe.defaults.get("num_inference_steps"), unit="step", desc="editing") as bar:

        def tick(_: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            bar.update()
            return tensors

        out = pipe(
            prompt,
            edits,
            strengths=strengths or None,
            blend=words,
            threshold=threshold,
            cross=cross,
            self_=self_,
            callback_on_step_end=tick,
            **arguments,
        )
    _sheet(prompt, edits, out.source[0], out.images).save(output)
    typer.echo(f"wrote {output}")
    if report:
        typer.echo(out.report)


def _strength(text: str) -> tuple[str, float]:
    word, _, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not word or not math.isfinite(factor):
        raise Fault(f"--strength is word=factor, such as green=2.0, not {text!r}")
    return word, factor


def _check_output(output: Path) -> None:
    """Refuse a path that cannot be written, before anything is generated."""
    from PIL import Image

    if output.suffix.lower() not in Image.registered_extensions():
        raise Fault(f"--output {output}: the name must end like a picture's, such as .png")
    if output.is_dir() or not output.parent.is_dir():
        raise Fault(
            f"--output {output}: {'it is a folder' if output.is_dir() else f'there is no folder {output.parent}'}"
        )
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise Fault(f"--output {output} cannot be written")


def _load(model: str, device: str, dtype: str) -> Any:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # else it remarks on torchvision, which nothing here needs
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    from .pipelines import PromptToPromptPipeline

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in types:
        raise Fault(f"--dtype is one of {', '.join(types)}, not {dtype!r}")
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise Fault(f"--model {model}: there is no such folder; give one, a hub id, or a demo model (unet, mmdit)")
    try:
        pipe: Any = PromptToPromptPipeline.from_pretrained(model, dtype=types[dtype])
        pipe.pipe.to(device)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:  # AssertionError: torch without CUDA
        raise Fault(f"--model {model} on {device}: {str(error).strip().splitlines()[0]}") from error
    pipe.pipe.set_progress_bar_config(disable=True)
    return pipe


# -------------------------------------------------------------------------------------------------------------- picture


def _sheet(prompt: str, edits: list[str], source: Image.Image, images: list[Image.Image]) -> Image.Image:
    """One row per edit: source | edit | where it changed, enlarged, with the prompts under it."""
    from PIL import Image, ImageDraw, ImageFont

    factor = max(1, -(-PANEL // min(source.size)))
    width, height = source.width * factor, source.height * factor
    font = ImageFont.load_default(size=14)
    gap, line = 8, 18
    labels = [[_wrapped(label, width, font) for label in (prompt, text, "where it changed")] for text in edits]
    lines = max(len(label) for row in labels for label in row)
    each = height + lines * line + 2 * gap
    sheet = Image.new("RGB", (3 * width + 4 * gap, len(images) * each + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for row, image in enumerate(images):
        top = gap + row * each
        for column, panel in enumerate((source, image, _change(source, image))):
            left = gap + column * (width + gap)
            sheet.paste(panel.convert("RGB").resize((width, height), Image.Resampling.NEAREST), (left, top))
            draw.rectangle((left - 1, top - 1, left + width, top + height), outline="lightgrey")
            for number, text in enumerate(labels[row][column]):
                draw.text((left, top + height + 4 + number * line), text, fill="black", font=font)
    return sheet


def _wrapped(text: str, width: int, font: Any) -> list[str]:
    """Lines of `text` that are at most `width` pixels wide, where its words are."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _change(source: Image.Image, image: Image.Image) -> Image.Image:
    """The mean change of each pixel as a heat over the grey source; full heat at 64 of 255."""
    import numpy as np
    from PIL import Image

    before, after = (np.asarray(picture.convert("RGB"), float) for picture in (source, image))
    heat: np.ndarray = np.minimum(np.abs(after - before).mean(-1, keepdims=True) / 64, 1)
    grey = 0.5 * before.mean(-1, keepdims=True) + 110
    return Image.fromarray((grey * (1 - heat) + np.array([220, 40, 20]) * heat).clip(0, 255).astype(np.uint8))


def main() -> None:
    """Entry point: what the user can put right is one line, and exit code 2."""
    import sys

    try:
        app()
    except (Fault, ValueError) as error:
        print(f"attnctrl: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
