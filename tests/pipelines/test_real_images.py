"""Ready pipelines that start from pictures: edits, appearance, style; and images between two prompts."""

import numpy as np
import pytest
import torch
from attnctrl.pipelines import CrossImagePipeline, InterpolationPipeline, PromptToPromptPipeline, StyleSwapPipeline
from controls.edits import pipe_of
from PIL import Image
from tiny import FAMILIES

from attnctrl.controls import CrossImageAttention, StyleAligned, StyleSwap
from attnctrl.latents import encode

SOURCE, TARGET = "a red cat on grass", "a blue dog on grass"
BOTH = pytest.mark.parametrize("name", ["sd", "flux"])


def arguments(name, **more):
    return {"num_inference_steps": 3, **FAMILIES[name].text_args, **more}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def picture(seed=0, size=(64, 64)):
    """Smooth, so that an untrained autoencoder shows it somehow."""
    small = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def pixels(image):
    return np.asarray(image).astype(int)


def seen(pipe, image, height=64, width=64):
    """The picture through the pipeline's autoencoder."""
    latents = encode(pipe, image, height, width)
    if latents.ndim == 3:
        latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    config = pipe.vae.config
    with torch.no_grad():
        decoded = pipe.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0)).sample
    return pixels(pipe.image_processor.postprocess(decoded)[0])


@BOTH
@pytest.mark.parametrize("method", [None, "other"])
def test_the_source_of_an_edit_is_the_picture_itself(name, method):
    pipe, image = pipe_of(name), picture()
    method = method and {"sd": "edit_friendly", "flux": "euler"}[name]
    ready = PromptToPromptPipeline(pipe)
    out = ready(SOURCE, TARGET, image=image, inversion=method, blend=True, generator=generator(), **arguments(name))
    assert abs(pixels(out.source[0]) - seen(pipe, image)).max() <= 1  # one of rounding to bytes
    assert not np.array_equal(pixels(out.images[0]), pixels(out.source[0])) and len(out.masks) == 1
    closed = ready(SOURCE, TARGET, image=image, inversion=method, blend=True, threshold=1.0, generator=generator(),
                   **arguments(name))  # fmt: skip
    assert np.array_equal(pixels(closed.images[0]), pixels(closed.source[0]))
    assert "step" not in vars(pipe.scheduler) and type(pipe).__name__ in ("StableDiffusionPipeline", "FluxPipeline")


@pytest.mark.parametrize("mode", ["RGBA", "L", "1", "P", "LA", "I;16", "CMYK", "turned"])
def test_pictures_of_any_mode_and_size(mode):
    image = picture(size=(70, 133))
    upright = image
    if mode == "turned":
        image = image.transpose(Image.Transpose.ROTATE_90)  # stored lying; EXIF says to turn it by 270 degrees
        image.getexif()[0x0112] = 6
    elif mode == "I;16":
        image = Image.fromarray(pixels(image.convert("L")).astype(np.uint16) * 257)
        upright = upright.convert("L")
    else:
        image = image.convert(mode)
        upright = image.convert("RGB")
    pipe = pipe_of("sd")
    assert torch.equal(encode(pipe, image), encode(pipe, upright))
    out = PromptToPromptPipeline(pipe)(SOURCE, TARGET, image=image, generator=generator(), **arguments("sd"))
    stride = FAMILIES["sd"].stride
    assert out.images[0].size == (70 // stride * stride, 133 // stride * stride)


@BOTH
def test_appearance_and_structure_are_rebuilt_and_the_output_is_neither(name):
    pipe, (appearance, structure) = pipe_of(name), (picture(1), picture(2))
    out = CrossImagePipeline(pipe)(appearance, structure, "a cat", generator=generator(), **arguments(name))
    assert abs(pixels(out.structure[0]) - seen(pipe, structure)).max() <= 1
    assert abs(pixels(out.appearance[0]) - seen(pipe, appearance)).max() <= 1
    assert not np.array_equal(pixels(out.images[0]), pixels(out.structure[0]))
    assert "CrossImageAttention" in str(out.report) and out.inversion is not None


@BOTH
def test_generated_structure_and_appearance(name):
    out = CrossImagePipeline(pipe_of(name))("a red cat", "a blue dog", generator=generator(), height=64, width=64,
                                            **arguments(name))  # fmt: skip
    texts = ["a blue dog", "a blue dog", "a red cat"]
    plain = pipe_of(name)(texts, generator=generator(), height=64, width=64, **arguments(name)).images
    assert abs(pixels(out.structure[0]) - pixels(plain[0])).max() <= 2
    assert abs(pixels(out.appearance[0]) - pixels(plain[2])).max() <= 2
    assert out.inversion is None


@BOTH
@pytest.mark.parametrize("control", [None, StyleAligned()], ids=["swap", "aligned"])
def test_styles_of_a_picture_and_of_a_prompt(name, control):
    pipe, image = pipe_of(name), picture(3)
    ready = StyleSwapPipeline(pipe)
    out = ready(image, ["a cat", "a dog"], control=control, generator=generator(), **arguments(name))
    assert len(out.images) == 2 and abs(pixels(out.reference[0]) - seen(pipe, image)).max() <= 1
    assert not np.array_equal(pixels(out.images[0]), pixels(out.images[1]))
    other = ready(picture(4), ["a cat", "a dog"], control=control, generator=generator(), **arguments(name))
    assert not np.array_equal(pixels(out.images[0]), pixels(other.images[0]))
    made = ready("a red bird", "a cat", height=64, width=64, generator=generator(), **arguments(name))
    assert len(made.images) == len(made.reference) == 1 and made.inversion is None


@BOTH
def test_interpolation_runs_from_one_prompt_to_the_other(name):
    size = {"height": 64, "width": 64}
    out = InterpolationPipeline(pipe_of(name))(SOURCE, TARGET, 4, generator=generator(), **size, **arguments(name))
    plain = pipe_of(name)([SOURCE] * 3 + [TARGET], generator=generator(), **size, **arguments(name)).images
    assert out.coefficients == pytest.approx([0, 1 / 3, 2 / 3, 1])
    for end in (0, 3):
        assert abs(pixels(out.images[end]) - pixels(plain[end])).max() <= 2
    distances = [np.abs(pixels(image) - pixels(out.images[0])).mean() for image in out.images]
    assert distances == sorted(distances)


def test_between_the_same_prompt_and_noise_all_images_are_one():
    pipe = pipe_of("sd")
    latents = encode(pipe, picture()).repeat(3, 1, 1, 1)  # any latents will do
    out = InterpolationPipeline(pipe)(SOURCE, SOURCE, 3, latents=latents, height=64, width=64, **arguments("sd"))
    assert max(abs(pixels(image) - pixels(out.images[0])).max() for image in out.images) <= 1


@pytest.mark.parametrize(
    ("ready", "call", "message"),
    [
        (CrossImagePipeline, (picture(), "a cat"), "both pictures or both prompts, got Image and str"),
        (CrossImagePipeline, (3, picture()), "appearance is a PIL image, got int"),
        (CrossImagePipeline, ("a cat", " "), "structure is a text and must not be empty"),
        (StyleSwapPipeline, (picture(), []), "prompts must hold at least one"),
        (StyleSwapPipeline, (picture(), ["a", ""]), "each of prompts is a text"),
        (StyleSwapPipeline, ("", "a cat"), "reference is a text"),
        (InterpolationPipeline, ("a", "b", 2), "3 or more with both ends, not 2"),
        (InterpolationPipeline, ("", "b"), "prompt_a is a text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_name_the_argument(ready, call, message):
    with pytest.raises(ValueError, match=message):
        ready(pipe_of("sd"))(*call)


def test_controls_for_other_rows_are_refused():
    with pytest.raises(ValueError, match="here they are prompts 0, 1 and 2"):
        CrossImagePipeline(pipe_of("sd"))(picture(), picture(), control=CrossImageAttention())
    with pytest.raises(ValueError, match="here the reference is prompt 0"):
        StyleSwapPipeline(pipe_of("sd"))(picture(), "a cat", control=StyleSwap(reference=1))
    with pytest.raises(ValueError, match="keeps no trajectory"):
        StyleSwapPipeline(pipe_of("sd"))(picture(), "a cat", inversion="edit_friendly", **arguments("sd"))
    with pytest.raises(ValueError, match=r"coefficients are 4, one for each image"):
        InterpolationPipeline(pipe_of("sd"))("a", "b", 4, coefficients=[0, 1])
