"""LocalBlend against the authors' code, and what it promises in the pipelines of every family."""

import json
import random
from pathlib import Path

import pytest
import torch
from controls.authors import Blend, Controller, encoded, softmax
from controls.edits import EDITABLE, LONGER, SOURCE, TARGET, edit, prompts_for, sample
from safetensors.torch import load_file

from attnctrl import AttentionCall, Rows, Segment, Site, Step, StepCall, Tokens
from attnctrl.attend import attend
from attnctrl.controls import PromptToPrompt
from attnctrl.latents import LocalBlend
from attnctrl.latents.local_blend import quarter_sites

GOLDEN = Path(__file__).parents[1] / "golden" / "prompt_to_prompt"
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)
guided = pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])


def by_hand(blend, control, layers, latents, step, steps, grid):
    """One step of both controls: cross layers [(q, k)], then the scheduler's latents."""
    count = len(control.prompts)
    image, text = Tokens((Segment("image", 0, grid[0] * grid[1], grid),)), Tokens((Segment("text", 0, 77),))
    for q, k in layers:
        rows = Rows.grid(("uncond", "cond"), count, 1)
        call = AttentionCall(
            q,
            k,
            torch.zeros_like(k),
            kind="cross",
            rows=rows,
            query_tokens=image,
            key_tokens=text,
            step=Step(step, steps),
        )
        blend.attention(call, lambda inner: control.attention(inner, attend))
    call = StepCall(latents, latents, Rows.plain(count), Step(step, steps), grid=tuple(latents.shape[2:]))
    return blend.step(call, lambda inner: inner.sample)


def test_the_authors_latents_and_masks():
    facts = json.loads((GOLDEN / "refine_localblend.json").read_text())
    t = load_file(GOLDEN / "refine_localblend.safetensors")
    params, prompts = facts["params"], [encoded(p) for p in facts["prompts"]]
    control = PromptToPrompt(prompts, cross=params["cross_replace_steps"], self_=0.0, edit="refine")
    blend = LocalBlend(prompts, facts["words"], threshold=params["local_blend"]["th"], start=0.0)
    for step in range(2):
        layers = [(t[f"step{step}.layer{i}.q"], t[f"step{step}.layer{i}.k"]) for i in range(5)]
        out = by_hand(blend, control, layers, t[f"step{step}.latents_in"], step, params["num_steps"], (16, 16))
        assert torch.equal(blend.masks[1:].to(torch.uint8), t[f"step{step}.mask"])
        torch.testing.assert_close(out, t[f"step{step}.latents_out"], rtol=0, atol=1e-6)
        assert torch.equal(out[0], t[f"step{step}.latents_in"][0])


@pytest.mark.parametrize("seed", range(12))
def test_the_authors_algorithm_on_random_edits(seed):
    """Several targets, words of several tokens, subtracted words, a start; masks bit for bit, from the edited maps."""
    rng, steps, grid = random.Random(seed), 4, (6, 5)
    texts = ["a cat and a squirrel on grass", "a hippopotamus and a squirrel on lasagna", "a cat and a red on snow"]
    edit_, texts = rng.choice(["replace", "refine"]), texts[: rng.randint(2, 3)]
    words = [["cat"], ["hippopotamus", "lasagna"], "red"][: len(texts)]
    subtract = rng.choice([None, ["squirrel", "squirrel", ["grass", "a"][1:]][: len(texts)]])
    start, threshold = rng.choice([0.0, 0.5]), (rng.choice([0.3, 0.8]), rng.choice([0.3, 0.9]))
    scales = rng.choice([None, {"hippopotamus": 3.0, "on": -1.0}])
    cross = rng.choice([1.0, 0.5, {"default_": (0.2, 0.7), "hippopotamus": (0.4, 1.0)}])
    theirs = Controller(texts, steps, cross, 0.0, edit_, scales)
    blend_theirs = Blend(texts, words, subtract, int(start * steps), threshold)
    prompts = [encoded(text) for text in texts]
    ours = PromptToPrompt(prompts, cross=cross, self_=0.0, edit=edit_, reweight=scales)
    blend = LocalBlend(prompts, words, subtract, threshold, start)

    g = torch.Generator().manual_seed(seed)
    random_ = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    count, sums, seen = len(texts), None, set()
    for step in range(steps):
        layers = [(random_(2 * count, 2, 30, 8), random_(2 * count, 2, 77, 8)) for _ in range(3)]
        maps = [theirs.cross_maps(softmax(q, k)[count:], step) for q, k in layers]
        sums = maps if sums is None else [a + b for a, b in zip(sums, maps, strict=True)]
        latents = random_(count, 4, 11, 9)
        expected = blend_theirs(latents, sums, grid)
        out = by_hand(blend, ours, layers, latents, step, steps, grid)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        seen.add(blend.masks is None)
    assert seen == ({False} if start == 0 else {False, True})


# ---------------------------------------------------------------------------- pipelines


def blended(family, prompts, words, *, cfg=True, settings=None, **options):
    """(latents, the blend) of an edit with local blend."""
    sizes = {
        name: options.pop(name) for name in ("height", "width", "images", "num_inference_steps") if name in options
    }
    blend = LocalBlend(prompts_for(family, *prompts), words, **options)
    return sample(family, prompts, blend, edit(family, *prompts, **(settings or {})), cfg=cfg, **sizes), blend


def spread(mask, latents, packed):
    """The mask in the shape of one image's latents."""
    return mask.flatten()[:, None].expand_as(latents) if packed else mask.expand_as(latents)


@every
@guided
def test_outside_the_mask_is_the_source_and_the_source_is_plain(family, cfg):
    plain = sample(family, (SOURCE, TARGET), cfg=cfg)
    finer = {"sites": "cross & scale == 2"} if family.name in ("sd", "sdxl") else {}  # a quarter is 2x2 here
    for threshold in (0.6, 0.9, 0.96, 0.99, 0.996, 0.999):  # the maps of random weights are nearly flat
        out, blend = blended(family, (SOURCE, TARGET), ["cat", "dog"], cfg=cfg, threshold=threshold, **finer)
        assert torch.equal(out[0], plain[0])
        if not blend.masks[1].all():
            break
    mask = spread(blend.masks[1], out[1], family.name in ("flux", "qwen"))
    assert mask.any() and not mask.all()
    assert torch.equal(out[1][~mask], out[0][~mask]) and not torch.equal(out[1][mask], out[0][mask])


@every
@guided
def test_a_threshold_below_zero_is_no_blend_and_above_one_is_the_source(family, cfg):
    without = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), cfg=cfg)
    everything, blend = blended(family, (SOURCE, TARGET), ["cat", "dog"], cfg=cfg, threshold=-1.0)
    assert torch.equal(everything, without) and blend.masks.all()
    nothing, blend = blended(family, (SOURCE, TARGET), ["cat", "dog"], cfg=cfg, threshold=1.0)
    assert torch.equal(nothing[1], nothing[0]) and not blend.masks.any()


@every
def test_subtracted_words(family):
    """Subtracting the whole picture leaves the source; subtracting nothing leaves the blend."""
    plain, _ = blended(family, (SOURCE, TARGET), ["cat", "dog"], threshold=0.7)
    all_, _ = blended(family, (SOURCE, TARGET), ["cat", "dog"], subtract=["grass", "grass"], threshold=(0.7, -1.0))
    none, _ = blended(family, (SOURCE, TARGET), ["cat", "dog"], subtract=["grass", "grass"], threshold=(0.7, 1.0))
    assert torch.equal(all_[1], all_[0]) and torch.equal(none, plain)


def test_before_the_start_nothing_is_blended():
    family, late = EDITABLE[0], []

    class Watch:
        def step(self, call, step):
            late.append(blend.masks is not None)
            return step(call)

    blend = LocalBlend([SOURCE, TARGET], ["cat", "dog"], start=0.4, threshold=1.0)
    out = sample(family, (SOURCE, TARGET), Watch(), blend, edit(family, SOURCE, TARGET))
    assert late == [False, False, False, True, True]  # seen before each step: the third is the first that blends
    assert torch.equal(out[0], out[1])
    never, _ = blended(family, (SOURCE, TARGET), ["cat", "dog"], start=1.0, threshold=1.0)
    assert torch.equal(never, sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET)))


@every
@guided
def test_odd_sizes_and_several_images(family, cfg):
    size = dict(zip(("height", "width"), family.odd_size, strict=True))
    images = 1 if family.name == "wan" else 2
    out, blend = blended(family, (SOURCE, TARGET), ["cat", "dog"], cfg=cfg, threshold=0.7, images=images, **size)
    assert blend.masks.shape[0] == 2 * images == len(out)
    if family.name in ("flux", "qwen"):
        assert blend.masks[0].numel() == out.shape[1] and blend.masks.shape[1:] == tuple(s // 16 for s in size.values())
    else:
        assert blend.masks[0].shape == out.shape[2:]
    for image in range(images):
        alone, single = blended(family, (SOURCE, TARGET), ["cat", "dog"], cfg=cfg, threshold=0.7, **size)
        if image == 0:
            torch.testing.assert_close(out[[0, images]], alone, rtol=1e-3, atol=1e-3)
            assert (blend.masks[[0, images]] == single.masks).float().mean() > 0.97


def test_video_frames_have_masks_of_their_own():
    out, blend = blended(next(f for f in EDITABLE if f.name == "wan"), (SOURCE, TARGET), ["cat", "dog"], threshold=0.99)
    assert blend.masks.shape[1:] == out.shape[2:] and not torch.equal(blend.masks[1, 0], blend.masks[1, 1])


@every
def test_words_that_only_one_prompt_has(family):
    out, blend = blended(family, (SOURCE, LONGER), [[], "green"], threshold=0.6)
    assert out.isfinite().all() and blend.masks[1].any() and not blend.masks[0].any()


@every
def test_the_maps_are_the_edited_ones(family):
    """With the source's maps throughout, a replaced word's region is that of the word it replaces."""
    _, blend = blended(
        family, (SOURCE, TARGET), ["cat", "dog"], settings={"cross": 1.0, "self_": 1.0, "joint": "exact"}
    )
    source, target = (blend._sums()[prompt, 0] for prompt in (0, 1))
    assert source.abs().max() > 0
    torch.testing.assert_close(source, target, rtol=1e-5, atol=1e-6)


@every
def test_runs_repeat_and_masks_do_not_add_up_over_runs(family):
    blend, control = LocalBlend(prompts_for(family, SOURCE, TARGET), ["cat", "dog"]), edit(family, SOURCE, TARGET)
    first, again = (sample(family, (SOURCE, TARGET), blend, control) for _ in range(2))
    assert torch.equal(first, again)


@every
def test_several_edits_in_a_batch(family):
    flat = (SOURCE, TARGET, "a big tree by the sea", "a big moon by the sea")
    prompts = prompts_for(family, *flat)
    words = ["cat", "dog", "tree", "moon"]
    groups = [prompts[:2], prompts[2:]]
    out = sample(family, flat, LocalBlend(groups, words, threshold=0.7), PromptToPrompt(groups))
    for g in (0, 1):
        pair = flat[2 * g : 2 * g + 2]
        alone = sample(
            family, pair, LocalBlend(prompts[2 * g : 2 * g + 2], words[2 * g : 2 * g + 2], threshold=0.7),
            edit(family, *pair), seed=2 * g,
        )  # fmt: skip
        torch.testing.assert_close(out[2 * g : 2 * g + 2], alone, rtol=1e-3, atol=1e-3)


def test_sites_at_a_quarter_of_the_latent_or_the_finest():
    def chosen(*scales, kind="cross"):
        return [site.scale for site in quarter_sites([Site(f"{i}", kind, scale=s) for i, s in enumerate(scales)])]

    assert chosen(1, 2, 4, 8, 4, 2, 1) == [4, 4]
    assert chosen(2, 1, 2) == [1] and chosen(1, 8) == [1] and chosen(8) == [8]
    assert chosen(2, kind="joint") == [2] and chosen(4, kind="self") == []


def test_sites_of_two_resolutions_are_an_error():
    family = EDITABLE[0]
    with pytest.raises(ValueError, match=r"one resolution.*choose with sites"):
        blended(family, (SOURCE, TARGET), ["cat", "dog"], sites="cross")
    out, _ = blended(family, (SOURCE, TARGET), ["cat", "dog"], sites="cross & block 1")
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "words, message",
    [
        (["cat", "fox"], r"No 'fox' in the prompt: 'a blue dog on grass' has the words a, blue, dog, on, grass"),
        (["cat"], "words needs one entry per prompt, 2"),
        ("cat", "words needs one entry per prompt, 2"),
    ],
)
def test_words_that_do_not_fit(words, message):
    with pytest.raises(ValueError, match=message):
        blended(EDITABLE[0], (SOURCE, TARGET), words)


def test_prompts_that_do_not_fit_the_call():
    family, blend = EDITABLE[0], LocalBlend([SOURCE, TARGET], ["cat", "dog"])
    with pytest.raises(ValueError, match=r"called with the prompts \['a', 'b'\], LocalBlend was made for"):
        sample(family, ("a", "b"), blend)
    with pytest.raises(ValueError, match="start is a fraction"):
        LocalBlend([SOURCE, TARGET], ["cat", "dog"], start=5)


def test_the_blend_alone_works():
    """No edit attached: the plain maps are read, targets go on from their own noise."""
    family = EDITABLE[0]
    out = sample(family, (SOURCE, TARGET), LocalBlend([SOURCE, TARGET], ["cat", "dog"], threshold=1.0))
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], sample(family, (SOURCE, TARGET))[0])
