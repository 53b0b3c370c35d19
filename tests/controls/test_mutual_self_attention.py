"""MasaCtrl against the authors' outputs, and its properties."""

import pytest
import torch
from controls.edits import prompts_for, sample
from controls.sharing_cases import close, load, made, plain, precisions, written
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Step, Tokens
from attnctrl.attend import attend
from attnctrl.controls import MutualSelfAttention, WordMasks


def golden(t, step):
    tokens = Tokens((Segment("image", 0, 16, (4, 4)),))
    return AttentionCall(t["q"], t["k"], t["v"], rows=Rows.grid(("uncond", "cond"), 2, 1), step=Step(step, 50),
                         query_tokens=tokens, key_tokens=tokens)  # fmt: skip


@precisions
@pytest.mark.parametrize("case", ["mutual", "mask"])
def test_mutual_attention_is_the_authors(case, dtype, tolerance):
    facts, t = load("masactrl", case, dtype)
    masks = (t["mask_s"], t["mask_t"]) if case == "mask" else None
    control, start = MutualSelfAttention(masks=masks), facts["start_step"]
    close(control.attention(golden(t, start), attend), t["out"], tolerance)
    close(control.attention(golden(t, start - 1), attend), t["out_before_start"], tolerance)


MASKS = (torch.eye(3, 4), torch.eye(3, 4).flip(1))
ALL = [{}, {"union": True}, {"masks": MASKS}]


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("text", [0, 3])
def test_the_source_keeps_its_bits_and_halves_do_not_mix(settings, text):
    call, control = made(text=text), MutualSelfAttention(source=1, **settings)
    out = control.attention(call, attend)
    assert torch.equal(out[[1, 4]], plain(call)[[1, 4]])
    assert not torch.allclose(out[[0, 5]], plain(call)[[0, 5]])
    other = call.replace(key=call.key.index_fill(0, torch.tensor([0, 1, 2]), 0.5))
    assert torch.equal(control.attention(other, attend)[3:], out[3:])
    before = call.replace(step=Step(0, 50))
    assert torch.equal(control.attention(before, attend), plain(before))


def test_union_reads_both():
    call = made()
    out = MutualSelfAttention(union=True).attention(call, attend)
    close(out[4], written(call.query[4], *(torch.cat((x[3], x[4]), 1) for x in (call.key, call.value))))
    alike = call.replace(key=call.key[[0, 0, 0, 3, 3, 3]], value=call.value[[0, 0, 0, 3, 3, 3]])
    close(MutualSelfAttention(union=True).attention(alike, attend), plain(alike))


def test_joint_targets_divide_the_image_and_see_their_own_text():
    call = made(text=3)
    q, k, v = call.query, call.key, call.value
    inside, own = (mask.flatten().bool() for mask in MASKS)
    keys, values = (torch.cat((x[1, :, :3], x[0, :, 3:]), 1) for x in (k, v))
    open_ = torch.cat((torch.ones(3, dtype=torch.bool), inside)), torch.cat((torch.ones(3, dtype=torch.bool), ~inside))
    inner, outer = (written(q[1, :, 3:], keys[:, some], values[:, some]) for some in open_)
    out = MutualSelfAttention(masks=MASKS).attention(call, attend)[1]
    close(out[:, 3:], torch.where(own[:, None], inner, outer))
    close(out[:, :3], written(q[1, :, :3], keys, values))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_empty_region_reads_all_of_the_source(value):
    call = made()
    masks = (torch.full((6, 8), value), MASKS[1])
    out = MutualSelfAttention(masks=masks).attention(call, attend)
    close(out, MutualSelfAttention().attention(call, attend))


def test_masks_of_another_size_take_the_nearest_pixel():
    big = tuple(mask.repeat_interleave(2, 0).repeat_interleave(3, 1) for mask in MASKS)
    a, b = (MutualSelfAttention(masks=masks).attention(made(), attend) for masks in (MASKS, big))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["sd", "pixart"])
def test_words_find_the_masks(name):
    """Thresholds nobody reaches or everybody does divide nothing; between them, something."""
    family, prompts = FAMILIES[name], ("a red cat", "a blue dog")
    words = prompts_for(family, *prompts)
    out = {}
    for threshold in (-1.0, 0.4, 2.0):
        control = MutualSelfAttention(masks=WordMasks(words, ["cat", "dog"], threshold), steps=(0.5, 1.0))
        out[threshold] = sample(family, prompts, control)
        assert control._now[1].total.amax() > 0
        assert torch.isfinite(out[threshold]).all()
    everywhere = sample(family, prompts, MutualSelfAttention(steps=(0.5, 1.0)))
    close(out[-1.0], everywhere, 1e-4)
    close(out[2.0], everywhere, 1e-4)
    assert (out[0.4][1] - everywhere[1]).abs().max() > 1e-3
    assert torch.equal(out[0.4][0], sample(family, prompts)[0])


def test_what_does_not_fit_is_named():
    for settings, message in (
        ({"union": True, "masks": MASKS}, "give one of them"),
        ({"masks": (MASKS[0], None)}, "two tensors of shape"),
        ({"steps": (0.9, 0.1)}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            MutualSelfAttention(**settings)
    with pytest.raises(ValueError, match="one entry per prompt, 2, got"):
        WordMasks(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="grid"):
        MutualSelfAttention(masks=MASKS).attention(made(query_tokens=Tokens()), attend)
    with pytest.raises(MissingRows, match="prompt 0"):
        call = made()
        MutualSelfAttention().attention(call.take([1, 2]), attend)
    with pytest.raises(ValueError, match="MutualSelfAttention acts on cross, self sites"):
        control = MutualSelfAttention(masks=WordMasks(["a", "b"], ["a", "b"]))
        sample(FAMILIES["flux"], ("a", "b"), control)
