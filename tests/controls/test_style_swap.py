"""Style swap against the authors' outputs, and its properties."""

import pytest
import torch
from controls.sharing_cases import close, load, made, plain, precisions, written

from attnctrl import AttentionCall, MissingRows, Rows, Step
from attnctrl.attend import attend
from attnctrl.controls import StyleSwap


@precisions
def test_the_swap_is_the_authors(dtype, tolerance):
    facts, t = load("style_swap", "vsp_swap", dtype)
    rows = Rows.grid(("uncond", "cond"), facts["params"]["images_incl_reference"], 1)
    call = AttentionCall(t["q"], t["k"], t["v"], rows=rows, step=Step(facts["params"]["step"], 50))
    first, last = facts["params"]["active_steps_inclusive"][0]
    close(StyleSwap(steps=(first, last + 1)).attention(call, attend), t["out"], tolerance)


def test_the_reference_keeps_its_bits_and_halves_do_not_mix():
    call = made()
    out = StyleSwap().attention(call, attend)
    assert torch.equal(out[[0, 3]], plain(call)[[0, 3]])
    assert not torch.allclose(out[[1, 4]], plain(call)[[1, 4]])
    other = call.replace(key=call.key.index_fill(0, torch.tensor([0, 1, 2]), 0.5))  # the unconditional half
    assert torch.equal(StyleSwap().attention(other, attend)[3:], out[3:])


def test_negative_rows_may_swap_queries_instead():
    call = made()
    out = StyleSwap(negative="swap_query", reference=1).attention(call, attend)
    q, k, v = call.query, call.key, call.value
    for row in (0, 2):
        close(out[row], written(q[1], k[row], v[row]))
        close(out[row + 3], written(q[row + 3], k[4], v[4]))
    assert torch.equal(out[[1, 4]], plain(call)[[1, 4]])


def test_joint_rows_keep_their_text():
    call = made(text=3)
    q, k, v = call.query, call.key, call.value
    swapped = [torch.cat((x[1, :, :3], x[0, :, 3:]), 1) for x in (k, v)]
    close(StyleSwap().attention(call, attend)[1], written(q[1], *swapped))
    query = torch.cat((q[1, :, :3], q[0, :, 3:]), 1)
    close(StyleSwap(negative="swap_query").attention(call, attend)[1], written(query, k[1], v[1]))


def test_nothing_happens_outside_the_window_and_with_one_prompt():
    call = made()
    for control in (StyleSwap(steps=(0, 5)), StyleSwap(steps=(0.6, 1.0))):
        assert torch.equal(control.attention(call, attend), plain(call))
    alone = made(prompts=1)
    assert torch.equal(StyleSwap().attention(alone, attend), plain(alone))


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="'swap' or 'swap_query', not 'none'"):
        StyleSwap(negative="none")
    with pytest.raises(ValueError, match=r"steps is a window.*\(3, 1\)"):
        StyleSwap(steps=(3, 1))
    with pytest.raises(MissingRows, match="prompt 7"):
        StyleSwap(reference=7).attention(made(), attend)
