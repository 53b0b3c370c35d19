"""StyleID against the authors' outputs, and its properties."""

import pytest
import torch
from controls.sharing_cases import close, load, made, plain, precisions, written

from attnctrl import AttentionCall, Rows, Site
from attnctrl.attend import attend
from attnctrl.controls import StyleInjection


def joined(t):
    """The golden tensors as rows [output, style, content]."""
    q = torch.cat((t["q"], torch.zeros_like(t["q"]), t["q_content"]))
    k, v = (torch.cat((t[x], t[f"{x}_style"], torch.zeros_like(t[x]))) for x in "kv")
    return AttentionCall(q, k, v, rows=Rows.grid(("cond",), 3, 1), site=Site(index=3))


@precisions
def test_injection_is_the_authors(dtype, tolerance):
    facts, t = load("style_swap", "styleid_default", dtype)
    call, params = joined(t), facts["params"]
    for gamma in (params["gamma"], lambda step, site: params["gamma"] * site.index / 3):
        control = StyleInjection(gamma=gamma, temperature=params["temperature"])
        close(control.attention(call, attend)[:1], t["out"], tolerance)


def test_other_rows_keep_their_bits():
    call = made()
    out = StyleInjection(output=2, style=0, content=1).attention(call, attend)
    for row in (0, 1, 3, 4):
        assert torch.equal(out[row], plain(call)[row])
    close(out[2], written(0.75 * call.query[1] + 0.25 * call.query[2], call.key[0], call.value[0], 1.5 / 2))


def test_the_content_s_own_attention_comes_back():
    """gamma 1, tau 1, and a style that is the content."""
    call = made()
    out = StyleInjection(gamma=1, temperature=1, style=1, content=1).attention(call, attend)
    close(out[0], plain(call)[1])


def test_joint_rows_keep_their_text():
    call = made(text=3)
    out = StyleInjection().attention(call, attend)
    q, k, v = call.query, call.key, call.value
    query = torch.cat((q[0, :, :3], 1.5 * (0.75 * q[2] + 0.25 * q[0])[:, 3:]), 1)
    keys, values = (torch.cat((x[0, :, :3], x[1, :, 3:]), 1) for x in (k, v))
    close(out[0], written(query, keys, values))


def test_what_does_not_fit_is_named():
    for settings, message in (
        ({"gamma": 1.5}, "gamma.*1.5"),
        ({"temperature": 0}, "temperature"),
        ({"style": 0}, "another prompt"),
        ({"steps": (1, 0)}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            StyleInjection(**settings)
    with pytest.raises(ValueError, match="gamma"):
        StyleInjection(gamma=lambda step, site: -1).attention(made(), attend)
