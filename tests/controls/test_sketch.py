"""Mixtures over several references: their formulas, what they contain of other methods, and which rows stay plain."""

import pytest
import torch
from controls.sharing_cases import close, draw, made, plain, written

from attnctrl import MissingRows, Rows, Step
from attnctrl.attend import attend
from attnctrl.controls import (
    CrossImageAttention,
    QueryBlend,
    ReferenceOverlay,
    SketchMixture,
    StyleSwap,
    illustration,
)
from attnctrl.sharing import UNSHARED

HALF = torch.full((3, 4), 0.5)


def test_a_mixture_is_the_sum_of_its_parts():
    call = made()
    q, k, v = call.query, call.key, call.value
    out = SketchMixture({0: 0.5, 2: 0.3}).attention(call, attend)
    for row, half in ((1, 0), (4, 3)):
        expected = sum(a * written(q[row], k[r], v[r]) for a, r in ((0.5, half), (0.3, half + 2), (0.2, row)))
        close(out[row], expected)
    assert torch.equal(out[[0, 2, 3, 5]], plain(call)[[0, 2, 3, 5]])


def test_no_weight_is_nothing_and_all_of_it_is_a_style_swap():
    call = made()
    assert torch.equal(SketchMixture({0: 0.0}).attention(call, attend), plain(call))
    close(SketchMixture({0: 1.0}).attention(call, attend), StyleSwap().attention(call, attend))


def test_blended_queries_are_sums():
    call = made(text=3)
    q, k, v = call.query, call.key, call.value
    out = QueryBlend({1: 1.0, 2: 0.5}).attention(call, attend)
    query = torch.cat((q[3, :, :3], (q[4] + 0.5 * q[5])[:, 3:]), 1)
    close(out[3], written(query, k[3], v[3]))
    assert torch.equal(out[[1, 2, 4, 5]], plain(call)[[1, 2, 4, 5]])
    off = Rows(("cond",) * 3, (0, 1, 2), (0,) * 3, (UNSHARED,) * 3, (0, 1, 2))
    apart = made(branches=("cond",), rows=off)
    assert torch.equal(QueryBlend({1: 1.0}).attention(apart, attend), plain(apart))


def composed(controls, call):
    """Attention through the controls that have it, the first outermost."""
    first, *rest = [control for control in controls if hasattr(control, "attention")]
    return first.attention(call, (lambda inner: composed(rest, inner)) if rest else attend)


def test_an_illustration_without_edges_is_cross_image_attention_with_the_picture_s_queries():
    call = made(prompts=4, step=Step(6, 10))
    out = composed(illustration(edge_weight=0.0), call)
    cross = CrossImageAttention(reinject_every=0)
    index = torch.tensor([2, 1, 2, 3, 6, 5, 6, 7])
    close(out, cross.attention(call.replace(query=call.query[index]), attend))
    assert torch.equal(out[[1, 2, 3, 5, 6, 7]], plain(call)[[1, 2, 3, 5, 6, 7]])
    edged = composed(illustration(contrast=1), call)
    q, k, v = call.query, call.key, call.value
    close(edged[4], written(q[6] + 0.5 * q[7], k[5], v[5]))


@pytest.mark.parametrize("form", ["joint", "outer"])
@pytest.mark.parametrize("text", [0, 3])
def test_an_overlay_reads_each_reference_where_it_belongs(form, text):
    weight = torch.zeros(3, 4)
    weight[:, :2] = 1
    call = made(text=text)
    q, k, v = call.query, call.key, call.value
    out = ReferenceOverlay(weight, form=form).attention(call, attend)
    reads = [[torch.cat((x[0, :, :text], x[r, :, text:]), 1) for x in (k, v)] for r in (1, 2)]
    first, second = (written(q[0, :, text:], *read) for read in reads)
    close(out[0, :, text:], torch.where(weight.flatten()[:, None].bool(), first, second))
    close(out[0, :, :text], plain(call)[0, :, :text])
    assert torch.equal(out[[1, 2, 4, 5]], plain(call)[[1, 2, 4, 5]])


def test_a_joint_overlay_is_one_softmax():
    weight = draw(3, 4).sigmoid()
    call = made()
    q, k, v = call.query, call.key, call.value
    out = ReferenceOverlay(weight).attention(call, attend)[0]
    shares = (weight.flatten(), 1 - weight.flatten())
    scores = [q[0] @ k[r].transpose(1, 2) / 2 + share.log()[:, None] for r, share in zip((1, 2), shares, strict=True)]
    close(out, torch.cat(scores, -1).softmax(-1) @ torch.cat((v[1], v[2]), 1))
    alike = call.replace(key=call.key[[0, 1, 1, 3, 4, 4]], value=call.value[[0, 1, 1, 3, 4, 4]])
    close(ReferenceOverlay(HALF).attention(alike, attend)[0], written(q[0], k[1], v[1]))


def test_what_does_not_fit_is_named():
    for make, message in (
        (lambda: SketchMixture({0: 0.8, 1: 0.4}), "add up to at most 1"),
        (lambda: SketchMixture({}), "references"),
        (lambda: QueryBlend({1: float("nan")}), "finite"),
        (lambda: ReferenceOverlay(torch.full((3, 4), 1.5)), "from 0 to 1"),
        (lambda: ReferenceOverlay(HALF, form="sum"), "'sum'"),
        (lambda: ReferenceOverlay(HALF, (0, 1)), "three prompts"),
        (lambda: SketchMixture(steps=(1, 0)), "window"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(MissingRows, match="prompt 3"):
        QueryBlend({3: 1.0}).attention(made(), attend)
