"""Prompt-to-prompt in the real pipelines of every family, with tiny random models."""

import pytest
import torch
from controls.edits import EDITABLE, LONGER, SOURCE, STEPS, TARGET, edit, pipe_of, prompts_for, sample
from tiny import FAMILIES, VARIANTS

from attnctrl import MissingRows, attach
from attnctrl.controls import PromptToPrompt

every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)
guided = pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
close = {"rtol": 1e-3, "atol": 1e-3}


def assert_twins(family, rows):
    """Both rows have the same bits (in the tiny Wan without any control, equal rows differ by 2e-6)."""
    if family.name.startswith("wan"):
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(rows[0], rows[1])


@every
@guided
def test_the_source_is_the_plain_run_bit_for_bit_and_the_target_is_not(family, cfg):
    plain = sample(family, (SOURCE, TARGET), cfg=cfg)
    edited = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), cfg=cfg)
    noise_only = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, cross=0.0, self_=0.0), cfg=cfg)
    assert torch.equal(edited[0], plain[0]) and torch.equal(noise_only[0], plain[0])
    for other in (noise_only[1], edited[0]):
        assert (edited[1] - other).abs().max() > 1e-4


@every
@guided
def test_windows_of_no_steps_are_the_plain_run_bit_for_bit(family, cfg):
    off = edit(family, SOURCE, TARGET, cross=0.0, self_=0.0, share_noise=False, reweight={"dog": 2.0})
    assert torch.equal(sample(family, (SOURCE, TARGET), off, cfg=cfg), sample(family, (SOURCE, TARGET), cfg=cfg))


@every
@guided
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"edit": "refine"},
        {"cross": 1.0, "self_": 1.0},
        {"cross": (0.2, 0.6), "self_": (0.2, 0.6)},
        {"joint": "image_qk", "self_": 0.6},
    ],
    ids=str,
)
def test_an_edit_to_the_same_prompt_is_the_source_bit_for_bit(family, cfg, settings):
    same = sample(family, (SOURCE, SOURCE), edit(family, SOURCE, SOURCE, **settings), cfg=cfg)
    assert_twins(family, same)


@every
def test_factors_of_one_change_nothing(family):
    settings = {"cross": 0.6, "self_": 0.4}
    plain = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, **settings))
    ones = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, reweight={"dog": 1.0, "grass": 1}, **settings))
    assert torch.equal(plain, ones)


@every
@guided
def test_uncond_rows_are_plain_in_every_layer(family, cfg):
    """From one noise, the first step's uncond rows are those of a run without the edit, and so are the source's."""
    if cfg and family.two_call:
        pytest.skip("uncond rows run by themselves")

    class Record:
        stage = "observe"

        def __init__(self):
            self.rows = []

        def attention(self, call, attend):
            out = attend(call)
            if call.step.index == 0:
                table = call.table
                keep = [i for i in range(len(table)) if table.branch[i] == "uncond" or table.prompt[i] == 0]
                self.rows.append((out[keep], out))
            return out

    edited, plain = Record(), Record()
    sample(family, (SOURCE, TARGET), edited, edit(family, SOURCE, TARGET), cfg=cfg)
    sample(family, (SOURCE, TARGET), plain, edit(family, SOURCE, TARGET, cross=0.0, self_=0.0), cfg=cfg)
    assert edited.rows and len(edited.rows) == len(plain.rows)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(edited.rows, plain.rows, strict=True))
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(edited.rows, plain.rows, strict=True))


@every
@guided
def test_several_targets_together_are_each_alone_in_any_order(family, cfg):
    second = "a blue cat on grass"
    both = sample(family, (SOURCE, TARGET, second), edit(family, SOURCE, TARGET, second), cfg=cfg)
    swapped = sample(family, (SOURCE, second, TARGET), edit(family, SOURCE, second, TARGET), cfg=cfg)
    torch.testing.assert_close(both[[0, 2, 1]], swapped, **close)
    for row, target in ((1, TARGET), (2, second)):
        alone = sample(family, (SOURCE, target), edit(family, SOURCE, target), cfg=cfg)
        torch.testing.assert_close(both[[0, row]], alone, **close)


@every
@guided
def test_several_edits_and_images_in_one_batch_are_each_alone(family, cfg):
    other = ("a big tree by the sea", "a big moon by the sea")
    flat = (SOURCE, TARGET, *other)
    groups = [prompts_for(family, *flat)[:2], prompts_for(family, *flat)[2:]]
    images = 1 if family.name == "wan" else 2  # given embeddings are not repeated by WanPipeline
    rows = sample(family, flat, PromptToPrompt(groups), cfg=cfg, images=images)
    assert len(rows) == 4 * images
    for g, pair in enumerate((flat[:2], other)):
        for image in range(images):
            first = 2 * g * images + image
            alone = sample(family, pair, edit(family, *pair), cfg=cfg, seed=first)
            torch.testing.assert_close(rows[[first, first + images]], alone, **close)


@every
@guided
@pytest.mark.parametrize("settings", [{}, {"joint": "image_qk", "self_": 0.4}], ids=["default", "image_qk"])
def test_odd_sizes(family, cfg, settings):
    size = dict(zip(("height", "width"), family.odd_size, strict=True))
    plain = sample(family, (SOURCE, TARGET), cfg=cfg, **size)
    edited = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, **settings), cfg=cfg, **size)
    assert torch.equal(edited[0], plain[0]) and edited.isfinite().all() and not torch.equal(edited[1], plain[1])


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_bfloat16(family, cfg):
    dtype = torch.bfloat16
    plain = sample(family, (SOURCE, TARGET), cfg=cfg, dtype=dtype)
    edited = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), cfg=cfg, dtype=dtype)
    same = sample(family, (SOURCE, SOURCE), edit(family, SOURCE, SOURCE), cfg=cfg, dtype=dtype)
    assert edited.dtype == plain.dtype and torch.equal(edited[0], plain[0]) and edited.isfinite().all()
    assert torch.equal(same[0], same[1]) or family.name == "wan"


@every
def test_nothing_stays_behind(family):
    plain = sample(family, (SOURCE, TARGET))
    control = edit(family, SOURCE, TARGET)
    with attach(pipe_of(family.name), control):
        options = {"prompts": (SOURCE, TARGET), "text": family.text, "num_inference_steps": STEPS}
        first, second = (family.run(pipe_of(family.name), **options) for _ in range(2))
        shorter = family.run(pipe_of(family.name), **{**options, "num_inference_steps": 3})
    assert torch.equal(first, second)
    again = sample(family, (SOURCE, TARGET), control, num_inference_steps=3)
    assert torch.equal(again, shorter) and not torch.equal(first, shorter)
    assert torch.equal(sample(family, (SOURCE, TARGET)), plain)


@every
def test_words_added_and_left_out(family):
    settings = {"cross": 1.0, "self_": 1.0}
    for a, b in ((SOURCE, LONGER), (LONGER, SOURCE)):
        edited = sample(family, (a, b), edit(family, a, b, **settings))
        assert edited.isfinite().all() and not torch.equal(edited[0], edited[1])
        assert torch.equal(edited[0], sample(family, (a, b))[0])


@pytest.mark.parametrize("name", ["sd_v", "sd_img2img", "flux_img2img", "sd35", "wan22"])
@guided
def test_variants_of_pipelines(name, cfg):
    family = VARIANTS[name]
    plain = sample(family, (SOURCE, TARGET), cfg=cfg)
    edited = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), cfg=cfg)
    same = sample(family, (SOURCE, SOURCE), edit(family, SOURCE, SOURCE), cfg=cfg)
    assert torch.equal(edited[0], plain[0]) and not torch.equal(edited[1], plain[1])
    assert_twins(family, same)


def test_mochi_is_refused():
    with pytest.raises(ValueError, match="one attention operation per batch row"):
        attach(FAMILIES["mochi"].build(), PromptToPrompt(prompts_for(FAMILIES["mochi"], SOURCE, TARGET)))


# ---------------------------------------------------------------------------- exactness


class Explicit(PromptToPrompt):
    """The edit with maps formed, from the same tables: what every layer of a pipeline should compute."""

    calls = 0

    def attention(self, call, attend):
        own = call.table
        pairs = self._pairs(own)
        if not pairs:
            return attend(call)
        self.calls += 1
        steps = self._steps(call.step)
        windows = self._windows(any(site.kind == "joint" for site in self._run.sites))
        tables = self._tables_for(self._run.geometry(call.site.denoiser).text, steps, windows[0])
        moment = tables.moment[call.step.index]
        logits = call.query @ call.key.mT * (call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
        if call.mask is not None:
            logits = logits.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else logits + call.mask
        maps = logits.softmax(-1)
        edited = maps.clone()
        self_on = call.step.index < int(windows[1] * steps)
        for row, source in pairs:
            t = tables.targets[own.prompt[row]]
            mapped, beta = tables.source[moment, t].to(maps), tables.beta[moment, t].to(maps)
            if call.kind == "cross":
                edited[row] = maps[source] @ mapped + maps[row] * beta
            elif call.kind == "self" and self_on and self._within(call):
                edited[row] = maps[source]
            elif call.kind == "joint":
                image, text = call.query_tokens["image"], call.key_tokens["text"]
                i, x = (slice(s.start, s.start + s.length) for s in (image, text))
                if self_on:
                    edited[row, :, i] = maps[source, :, i]
                edited[row, :, i, x] = maps[source, :, i, x] @ mapped + maps[row, :, i, x] * beta
        return edited @ call.value


@every
@guided
def test_the_whole_run_equals_explicit_maps_in_float64(family, cfg):
    settings = dict(cross={"default": 0.6, "dog": (0.2, 1.0)}, self_=0.4, reweight={"blue": -0.5}, joint="exact")
    dtype = torch.float64
    fused = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET, **settings), cfg=cfg, dtype=dtype)
    explicit = Explicit(prompts_for(family, SOURCE, TARGET), **settings)
    mapped = sample(family, (SOURCE, TARGET), explicit, cfg=cfg, dtype=dtype)
    assert explicit.calls == STEPS * len(family.sites)
    tolerance = 1e-10 if fused.dtype == dtype else 1e-5  # WanPipeline keeps its latents in float32
    assert (fused - mapped).abs().max() <= tolerance * mapped.abs().max()


@every
def test_a_source_run_in_another_call_is_refused(family):
    control = edit(family, SOURCE, TARGET)

    class Split:
        def attention(self, call, attend):
            return torch.cat([attend(call.take([row])) for row in range(len(call.table))])

    with pytest.raises(MissingRows, match="source"):
        sample(family, (SOURCE, TARGET), Split(), control)


@every
def test_a_split_that_hands_the_partners_on_is_the_whole(family):
    class Pairs:
        """Every image's rows by themselves."""

        def attention(self, call, attend):
            table, out = call.table, []
            for image in sorted(set(table.image)):
                rows = [i for i in range(len(table)) if table.image[i] == image]
                out.append((rows, attend(call.take(rows))))
            whole = torch.empty_like(torch.cat([o for _, o in out]))
            for rows, o in out:
                whole[rows] = o
            return whole

    for cfg in (True, False):
        options = {"cfg": cfg, "images": 1 if family.name == "wan" else 2}
        split = sample(family, (SOURCE, TARGET), Pairs(), edit(family, SOURCE, TARGET), **options)
        whole = sample(family, (SOURCE, TARGET), edit(family, SOURCE, TARGET), **options)
        torch.testing.assert_close(split, whole, **close)
