"""Scenes, captions, renderer and reader."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from attnctrl import demo
from attnctrl.demo.scene import content_key, sample_caption
from attnctrl.demo.tokenizers import LENGTH, WORDS, clip_tokenizer, t5_tokenizer


def scenes(n, seed=0, kind="any"):
    rng = random.Random(seed)
    return [demo.sample_scene(rng, kind) for _ in range(n)]


def test_parse_inverts_caption():
    rng = random.Random(1)
    for scene in scenes(300):
        caption = sample_caption(rng, scene)
        assert demo.parse(caption.caption()) == caption


def test_short_captions_parse():
    scene = demo.parse("a red circle left of a blue square")
    assert scene == demo.Scene((demo.Object("circle", "red"), demo.Object("square", "blue")), "left")
    assert demo.parse("a green star").caption() == "a green star"


@pytest.mark.parametrize(
    "caption", ["a red lion", "a circle", "a red blue circle", "a red circle on a black background"]
)
def test_captions_outside_the_grammar_are_refused(caption):
    with pytest.raises(ValueError):
        demo.parse(caption)


def test_unknown_word_error_lists_known_words():
    with pytest.raises(ValueError, match=r"lion.*circle"):
        demo.parse("a red lion")


def test_held_out_and_training_captions_are_disjoint():
    held_out, training = demo.prompts(400, 0), demo.prompts(400, 0, held_out=False)
    assert not set(held_out) & set(training)
    keys = {content_key(demo.parse(p)) for p in held_out}
    assert not keys & {content_key(demo.parse(p)) for p in training}


def test_a_pair_and_its_mirror_image_are_on_the_same_side_of_the_split():
    for scene in scenes(50, 2, "pair"):
        mirrored = replace(
            scene,
            objects=scene.objects[::-1],
            relation={"left": "right", "right": "left", "above": "below", "below": "above"}[scene.relation],
        )
        assert demo.is_held_out(scene) == demo.is_held_out(mirrored)


def test_prompts_depend_on_the_seed_only():
    assert demo.prompts(20, 3) == demo.prompts(20, 3)
    assert demo.prompts(20, 3) != demo.prompts(20, 4)
    assert len(set(demo.prompts(100, 3, "single"))) == 100
    assert all(len(demo.parse(p).objects) == 2 for p in demo.prompts(20, 3, "pair"))


def test_objects_lie_inside_the_picture_and_apart():
    for scene in scenes(300, 4):
        masks = [demo.object_mask(item, scene.style) for item in scene.objects]
        for mask in masks:
            border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
            assert mask.sum() > 60 and not border.any()
        assert np.sum(masks, axis=0).max() == 1


@pytest.mark.parametrize("degraded", [False, True])
def test_reader_is_right_on_rendered_scenes(degraded):
    noise, wrong, total = np.random.default_rng(0), Counter(), Counter()
    for scene in scenes(70, 5):
        pixels = np.asarray(demo.render(scene), np.float32)
        if degraded:  # noise, a blur of two pixels and a colour cast
            pixels = pixels + noise.normal(0, 9, pixels.shape)
            pixels = (pixels + np.roll(pixels, 1, 0) + np.roll(pixels, 1, 1) + np.roll(pixels, (1, 1), (0, 1))) / 4
            pixels = pixels * noise.uniform(0.93, 1.07, 3)
        for name, right in demo.matches(scene, demo.read(pixels.clip(0, 255).astype(np.uint8))).items():
            total[name] += 1
            wrong[name] += not right
    assert sum(wrong.values()) <= 0.01 * sum(total.values()), wrong


def test_reader_masks_cover_the_objects():
    for scene in scenes(20, 6):
        reading = demo.read_details(demo.render(scene))
        truth = np.any([demo.object_mask(item, scene.style) for item in scene.objects], axis=0)
        seen = np.any(reading.masks, axis=0)
        assert (truth & ~seen).sum() <= 0.06 * truth.sum()
        assert (seen & ~truth).sum() <= 0.5 * truth.sum()


def test_reader_sees_no_object_in_an_empty_picture():
    assert demo.read(Image.new("RGB", (64, 64), (250, 190, 205))) == demo.Scene((), None, "pink", "flat")


def test_matches_names_what_is_wrong():
    scene = demo.parse("a red circle left of a blue square on a white background")
    seen = demo.parse("a plain blue square left of a plain green circle on a white background")
    placed = tuple(replace(item, x=x, y=32.0, radius=10.0) for item, x in zip(seen.objects, (16.0, 48.0), strict=True))
    result = demo.matches(scene, replace(seen, objects=placed))
    assert result["background"] and result["count"] and result["shape"] and result["colour 2"]
    assert not result["relation"] and not result["colour"]


@pytest.mark.parametrize("tokenizer, specials", [(clip_tokenizer(), 2), (t5_tokenizer(), 1)])
def test_every_word_is_one_token(tokenizer, specials):
    for word in WORDS:
        assert len(tokenizer(word).input_ids) == 1 + specials
    for prompt in demo.prompts(100):
        assert len(tokenizer(prompt).input_ids) <= LENGTH
    assert len(tokenizer("zebra").input_ids) > 2 + specials
    offsets = tokenizer("a red circle", return_offsets_mapping=True).offset_mapping
    assert (6, 12) in [tuple(pair) for pair in offsets]


@pytest.mark.parametrize("texture", ["striped", "dotted"])
def test_a_texture_counts_wherever_its_stripes_or_dots_lie(texture):
    """Stripes and dots five pixels apart instead of eight, out of phase: a person sees them, so does the reader."""
    plain = np.asarray(demo.render(demo.Scene((demo.Object("square", "blue", "plain", "large", "centre", 32, 32, 15),),
                                              None, "white", "flat"))).copy()  # fmt: skip
    rows, columns = np.mgrid[:64, :64]
    dark = (columns + 1) % 5 < 2
    if texture == "dotted":
        dark = ((columns + 1) % 6 < 3) & ((rows + 2) % 6 < 3)
    blue = (plain != 250).any(-1)
    plain[dark & blue] //= 2
    assert demo.read(plain).objects[0].texture == texture
