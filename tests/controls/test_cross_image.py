"""Cross-Image Attention against the authors' outputs, and its properties."""

import pytest
import torch
from controls.edits import sample
from controls.sharing_cases import close, load, made, plain, precisions, written
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Site, Step
from attnctrl.attend import attend
from attnctrl.controls import CrossImageAttention
from attnctrl.sharing import UNSHARED, contrast

THREE = Rows.grid(("cond",), 3, 1)
PROMPTS = ("a red cat", "a blue dog", "a green bird")


@precisions
def test_the_swap_is_the_authors(dtype, tolerance):
    facts, t = load("cross_image", "swap_appearance_32", dtype)
    params = facts["params"]
    call = AttentionCall(t["q"], t["k"], t["v"], rows=THREE, step=Step(params["step"], 68), site=Site(scale=2))
    control = CrossImageAttention(
        contrast=params["contrast_strength"],
        half=tuple(params["cross_attn_32_range"]),
        full=tuple(params["cross_attn_64_range"]),
    )
    close(control.attention(call, attend), t["out"], tolerance)


@precisions
def test_contrast_is_the_authors(dtype, tolerance):
    facts, t = load("cross_image", "contrast_small", dtype)
    call = AttentionCall(t["q"], t["k"], t["v"])
    out = torch.cat((contrast(call.take([0]), facts["params"]["contrast_strength"]), attend(call.take([1, 2]))))
    close(out, t["out"], tolerance)


def test_other_rows_keep_their_bits_and_halves_do_not_mix():
    call, control = made(step=Step(6, 10)), CrossImageAttention()
    out = control.attention(call, attend)
    for row in (1, 2, 4, 5):
        assert torch.equal(out[row], plain(call)[row])
    other = call.replace(value=call.value.index_fill(0, torch.tensor([0, 1, 2]), 0.5))
    assert torch.equal(control.attention(other, attend)[3:], out[3:])


def test_structure_comes_back_every_fifth_step_of_a_window():
    control = CrossImageAttention(contrast=1, half=(0, 68), full=(0, 68))
    appearance, structure = [], []
    for index in range(68):
        call = made(branches=("cond",), step=Step(index, 68))
        q, k, v = call.query, call.key, call.value
        out = control.attention(call, attend)[0]
        if torch.allclose(out, written(q[0], k[2], v[2])):
            structure.append(index)
        else:
            appearance.append(index)
            close(out, written(q[0], k[1], v[1]))
    assert structure == [0, 5, 10, 15, 20, 25, 30, 35]


@pytest.mark.parametrize(("compat", "first"), [(False, 10), (True, 11)])
def test_the_authors_attention_is_a_step_late(compat, first):
    control = CrossImageAttention(compat=compat)
    acts = []
    for index in range(68):
        call = made(branches=("cond",), step=Step(index, 68))
        if not torch.equal(control.attention(call, attend), plain(call)):
            acts.append(index)
    assert acts == list(range(first, 68))


def test_resolutions_have_windows_of_their_own():
    control = CrossImageAttention(half=(0, 3), full=(3, 6))
    for scale, index, acts in ((2, 2, True), (1, 2, False), (2, 3, False), (1, 3, True)):
        call = made(step=Step(index, 10), site=Site(scale=scale))
        assert torch.equal(control.attention(call, attend), plain(call)) != acts


def test_contrast_is_a_kernel_and_no_contrast_is_none():
    assert CrossImageAttention().stage == "kernel" and CrossImageAttention().forms_maps
    plainly = CrossImageAttention(contrast=1)
    assert plainly.stage == "edit" and not plainly.forms_maps
    call = made(step=Step(6, 10))
    close(CrossImageAttention(contrast=1 + 1e-12).attention(call, attend), plainly.attention(call, attend), 1e-9)


@pytest.mark.parametrize("text", [0, 3])
def test_it_is_linear_in_the_value(text):
    call, control = made(step=Step(6, 10), text=text, probe=True), CrossImageAttention()
    double = control.attention(call.replace(value=2 * call.value + 1), attend)
    ones = control.attention(call.replace(value=torch.ones_like(call.value)), attend)
    close(double, 2 * control.attention(call, attend) + ones)


def test_joint_rows_keep_their_text_and_contrast_their_images():
    call = made(text=3, step=Step(6, 10))
    q, k, v = call.query, call.key, call.value
    keys, values = (torch.cat((x[0, :, :3], x[1, :, 3:]), 1) for x in (k, v))
    out = CrossImageAttention().attention(call, attend)[0]
    close(out[:, :3], written(q[0, :, :3], keys, values))
    a = (q[0, :, 3:] @ keys.transpose(1, 2) / 2).softmax(-1)
    close(out[:, 3:], (1.67 * a - 0.67 / 15).clamp(0, 1) @ values)


def test_guidance_adds_one_row_and_strengthens_the_swap():
    """Against two runs of all rows, as the authors do it."""
    family, once = FAMILIES["sd"], {"num_inference_steps": 1, "dtype": torch.float64}
    on = sample(family, PROMPTS, CrossImageAttention(swap_guidance=1, half=(0, 9), full=(0, 9)), **once)
    off = sample(family, PROMPTS, **once)
    seen = []

    class Watch:
        stage = "observe"

        def denoise(self, call, denoise):
            prediction = denoise(call)
            seen.append((len(call.rows), len(prediction.value)))
            return prediction

        def attention(self, call, attend):
            seen.append(call.rows.variant)
            return attend(call)

    control = CrossImageAttention(swap_guidance=3, half=(0, 9), full=(0, 9), guidance_steps=(0, 9))
    guided = sample(family, PROMPTS, Watch(), control, **once)
    assert seen[-1] == (6, 6) and seen[0] == ("",) * 6 + (UNSHARED,) * 2
    assert torch.equal(guided[1:], off[1:])
    # one step of the scheduler is affine in the prediction
    close(guided[0], off[0] + 3 * (on[0] - off[0]), 1e-10)
    assert (on[0] - off[0]).abs().max() > 1e-3


def test_guidance_falls_to_half():
    control = CrossImageAttention(swap_guidance=3.5)
    strengths = [control._strength(Step(i, 68)) for i in range(68)]
    close(torch.tensor(strengths), torch.linspace(3.5, 1.75, 68), 1e-5)
    assert CrossImageAttention(swap_guidance=1.2)._strength(Step(67, 68)) == 1


def test_what_does_not_fit_is_named():
    for settings, message in (
        ({"appearance": 0}, "three prompts, not 0, 0, 2"),
        ({"contrast": 0.5}, "contrast is 1"),
        ({"swap_guidance": 0}, "swap_guidance is 1"),
        ({"reinject_every": -1}, "reinject_every"),
        ({"half": (1, 0)}, "half is a window"),
    ):
        with pytest.raises(ValueError, match=message):
            CrossImageAttention(**settings)
    with pytest.raises(MissingRows, match="prompt 2"):
        CrossImageAttention().attention(made(prompts=2), attend)
