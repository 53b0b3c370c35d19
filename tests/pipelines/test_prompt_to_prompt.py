"""PromptToPromptPipeline over tiny pipelines of every family that reads text."""

import numpy as np
import pytest
import torch
from attnctrl.pipelines import PromptToPromptPipeline
from attnctrl.pipelines.prompt_to_prompt import changed_words
from controls.edits import SOURCE, TARGET, pipe_of
from PIL import Image
from tiny import FAMILIES

from attnctrl import attach
from attnctrl.controls import PromptToPrompt
from attnctrl.latents import LocalBlend

TEXTUAL = [family for family in FAMILIES.values() if family.text]
every = pytest.mark.parametrize("family", TEXTUAL, ids=lambda family: family.name)


def arguments(family, cfg=True, **more):
    size = family.shape(1, *family.size)
    guidance = family.guidance if cfg else family.no_guidance
    return {"num_inference_steps": 4, "output_type": "pil", **family.text_args, **guidance, **size, **more}


def edit(family, edits=TARGET, *args, seed=0, **more):
    ready = PromptToPromptPipeline(pipe_of(family.name))
    return ready(SOURCE, edits, *args, generator=torch.Generator().manual_seed(seed), **arguments(family, **more))


def pixels(image):
    return np.asarray(image).astype(int)


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_source_and_edit_come_back_and_the_source_is_the_plain_picture(family, cfg):
    out = edit(family, cfg=cfg)
    assert [image.size for image in (*out.source, *out.images)] == [(64, 64)] * 2 and out.masks is None
    assert not np.array_equal(pixels(out.source[0]), pixels(out.images[0]))
    plain = pipe_of(family.name)(SOURCE, generator=torch.Generator().manual_seed(0), **arguments(family, cfg=cfg))
    assert abs(pixels(plain.images[0]) - pixels(out.source[0])).max() <= 2  # rows of another batch size round otherwise
    assert "PromptToPrompt" in str(out.report) and "maps formed: none" in str(out.report)


@every
def test_blend_by_the_words_that_differ_a_word_and_words_per_prompt(family):
    by_difference = edit(family, blend=True)
    assert len(by_difference.masks) == 1 and by_difference.masks[0].size == (64, 64)
    per_prompt = edit(family, blend=[["red", "cat"], ["blue", "dog"]])
    assert np.array_equal(pixels(by_difference.images[0]), pixels(per_prompt.images[0]))
    one = edit(family, blend="grass", threshold=0.999)
    assert np.array_equal(pixels(one.source[0]), pixels(by_difference.source[0]))
    whole = edit(family, blend=True, threshold=1.0)
    assert np.array_equal(pixels(whole.images[0]), pixels(whole.source[0])) and not pixels(whole.masks[0]).any()
    open_ = edit(family, blend=True, threshold=-1.0)
    assert np.array_equal(pixels(open_.images[0]), pixels(edit(family).images[0])) and pixels(open_.masks[0]).all()


@every
def test_several_edits_and_images(family):
    out = edit(family, [TARGET, "a red cat on snow"], num_images_per_prompt=2, blend=True)
    assert (len(out.source), len(out.images), len(out.masks)) == (2, 4, 4)
    assert not np.array_equal(pixels(out.source[0]), pixels(out.source[1]))


def test_windows_and_strengths_of_words_are_those_of_the_control():
    family = TEXTUAL[0]
    settings = {"cross": {"default": 0.5, "dog": (0.25, 1.0)}, "self_": 0.5, "reweight": {"blue": 2.0}}
    with attach(pipe_of("sd"), PromptToPrompt([SOURCE, TARGET], **settings)):
        by_hand = pipe_of("sd")(
            [SOURCE, TARGET], generator=torch.Generator().manual_seed(0), **arguments(family, output_type="latent")
        ).images
    out = edit(family, TARGET, {"dog": (0.25, 1.0)}, {"blue": 2.0}, cross=0.5, self_=0.5, output_type="latent")
    assert torch.equal(out.images, by_hand[1:]) and torch.equal(out.source, by_hand[:1])
    by_default = edit(family, TARGET, {"dog": 0.2}, output_type="latent").images
    explicit = edit(family, TARGET, cross={"default": 0.8, "dog": 0.2}, output_type="latent").images
    assert torch.equal(by_default, explicit)


def test_blend_is_a_local_blend_around_the_edit():
    family = TEXTUAL[0]
    blend = LocalBlend([SOURCE, TARGET], ["cat", "dog"], threshold=0.9, start=0.5)
    with attach(pipe_of("sd"), blend, PromptToPrompt([SOURCE, TARGET])):
        by_hand = pipe_of("sd")(
            [SOURCE, TARGET], generator=torch.Generator().manual_seed(0), **arguments(family, output_type="latent")
        ).images
    out = edit(family, blend=["cat", "dog"], threshold=0.9, blend_start=0.5, output_type="latent")
    assert torch.equal(out.images, by_hand[1:])
    elsewhere = edit(family, blend=["cat", "dog"], threshold=0.9, blend_sites="cross & scale == 2")
    assert elsewhere.masks[0].size == (64, 64)


@every
def test_a_negative_prompt_is_one_text(family):
    if "true_cfg_scale" in family.guidance:
        assert edit(family, negative_prompt="dark").images
        return
    dark, none = edit(family, negative_prompt="dark"), edit(family)
    assert not np.array_equal(pixels(dark.images[0]), pixels(none.images[0]))
    assert not np.array_equal(pixels(dark.source[0]), pixels(none.source[0]))


def test_one_generator_for_each_image():
    family = TEXTUAL[0]
    ready, seeds = PromptToPromptPipeline(pipe_of("sd")), (3, 7)
    out = ready(
        SOURCE, TARGET, num_images_per_prompt=2, generator=[torch.Generator().manual_seed(s) for s in seeds],
        **arguments(family, output_type="latent"),
    )  # fmt: skip
    for i, seed in enumerate(seeds):
        alone = edit(family, seed=seed, output_type="latent")
        torch.testing.assert_close(out.images[i], alone.images[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.source[i], alone.source[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_output_types_and_masks(output_type):
    out = edit(TEXTUAL[0], blend=True, output_type=output_type)
    assert len(out.images) == len(out.source) == 1
    assert isinstance(out.masks[0], Image.Image) and out.masks[0].size == ((64, 64) if output_type == "pil" else (8, 8))


def test_callbacks_and_return_dict_reach_the_pipeline():
    steps = []

    def note(pipe, step, timestep, kwargs):
        steps.append(step)
        return kwargs

    out = edit(TEXTUAL[0], callback_on_step_end=note, return_dict=False)
    assert steps == [0, 1, 2, 3] and len(out.images) == 1


def test_it_wraps_pipelines_and_leaves_them_alone():
    pipe = pipe_of("sd")
    options = {**arguments(TEXTUAL[0], output_type="latent"), "generator": None}
    plain = [pipe(SOURCE, **{**options, "generator": torch.Generator().manual_seed(1)}).images for _ in range(2)]
    ready = PromptToPromptPipeline.from_pipe(PromptToPromptPipeline(pipe, {"num_inference_steps": 3}))
    assert ready.pipe is pipe and ready.defaults == {"num_inference_steps": 3}
    ready(SOURCE, TARGET, blend=True, height=64, width=64)
    after = pipe(SOURCE, **{**options, "generator": torch.Generator().manual_seed(1)}).images
    assert torch.equal(plain[0], plain[1]) and torch.equal(plain[0], after)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"edits": []}, "edits must hold at least one"),
        ({"edits": " "}, "must not be empty"),
        ({"prompt": ""}, "must not be empty"),
        ({"edits": [TARGET, None]}, "must not be empty"),
        ({"words": {"fox": 0.5}}, "No .fox. in the prompt: .a blue dog on grass. has the words a, blue, dog, on"),
        ({"strengths": {"fox": 2.0}}, "No 'fox' in the prompt"),
        ({"words": {"dog": 2.0}}, "window"),
        ({"cross": 1.5}, "window"),
        ({"self_": (0.5, 0.2)}, "window"),
        ({"blend": "fox"}, r"No 'fox' in the prompt: 'a red cat on grass'"),
        ({"blend": ["cat", "dog", "fox"]}, r"one entry per prompt \(2\)"),
        ({"blend": True, "edits": SOURCE}, "the words that differ"),
        ({"edit": "replace", "edits": "a cat"}, "Use refine"),
        ({"edit": "swap"}, "'auto', 'replace' or 'refine'"),
        ({"joint": "half"}, "'exact', 'image_qk' or None"),
        ({"image": "cat.png"}, "image is a PIL image, got str"),
        ({"image": Image.new("RGB", (1, 1))}, "image sides must be multiples of"),
        ({"image": Image.new("RGB", (64, 64)), "inversion": "euler"}, "method 'euler' does not fit .*'ddim'"),
        ({"image": Image.new("RGB", (64, 64)), "num_images_per_prompt": 2}, "one source, not 2"),
        ({"inversion": "ddim"}, "give it as image"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_mistakes_are_errors_before_the_first_step(call, message):
    pipe, ran = pipe_of("sd"), []
    handle = pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            PromptToPromptPipeline(pipe)(**{"prompt": SOURCE, "edits": TARGET, "num_inference_steps": 2, **call})
    finally:
        handle.remove()
    assert not ran and "step" not in vars(pipe.scheduler)


def test_changed_words_are_numbered():
    assert changed_words("a red cat", "a blue cat") == ([1], [1])
    assert changed_words("a cat on grass", "a big cat on wet snow") == ([3], [1, 4, 5])
    assert changed_words("a b a", "a b a") == ([], [])
