"""Rotary positions of tokens: what the model rotated is turned back, forth and elsewhere exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers import transformer_flux, transformer_qwenimage
from safetensors.torch import load_file
from tiny import FAMILIES, seeded

from attnctrl import AttentionCall, Segment, Tokens, attach
from attnctrl.families import _qwen_rope
from attnctrl.rope import Rope, frequencies

GOLDEN = Path(__file__).parents[1] / "golden"


def rope(n=7, axes=(4, 6, 6), layout="interleaved", seed=0):
    positions = torch.randint(-9, 9, (n, len(axes)), generator=torch.Generator().manual_seed(seed)).double()
    return Rope(positions, tuple(frequencies(dim) for dim in axes), layout)


def randn(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------------------------ by hand


def test_half_layout_by_hand():
    """Pairs are the channels (i, i + d/2); angles are position times frequency, axis by axis."""
    one = Rope(torch.tensor([[2.0, 3.0]], dtype=torch.float64), (frequencies(2), frequencies(2)), "half")
    x = torch.tensor([[[[1.0, 10.0, 2.0, 20.0]]]], dtype=torch.float64)
    c, s = torch.tensor([2.0, 3.0]).double().cos(), torch.tensor([2.0, 3.0]).double().sin()
    expected = [1 * c[0] - 2 * s[0], 10 * c[1] - 20 * s[1], 1 * s[0] + 2 * c[0], 10 * s[1] + 20 * c[1]]
    torch.testing.assert_close(one.rotate(x, one.positions)[0, 0, 0], torch.stack(expected))
    factors = torch.tensor([2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(one.scale(x, factors)[0, 0, 0].tolist(), [2.0, 30.0, 4.0, 60.0])


@pytest.mark.parametrize(("layout", "dim"), [("interleaved", -1), ("half", -2)])
def test_rotation_is_that_of_diffusers_in_both_layouts(layout, dim):
    here = rope(axes=(16,), layout=layout)
    cos, sin = get_1d_rotary_pos_embed(
        16, here.positions[:, 0], use_real=True, repeat_interleave_real=dim == -1, freqs_dtype=torch.float64
    )
    x = randn(2, 2, 7, 16, dtype=torch.float32)
    theirs = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=dim)
    torch.testing.assert_close(here.rotate(x, here.positions), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(here.unrotate(theirs), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_turning_to_other_positions_is_turning_back_and_forth(layout):
    here, there = rope(layout=layout), rope(layout=layout, seed=5)
    x = randn(1, 2, 7, 16)
    rotated = here.rotate(x, here.positions)
    torch.testing.assert_close(here.rerotate(rotated, there.positions), there.rotate(x, there.positions))
    torch.testing.assert_close(here.rotate(rotated, (0.0, 2.0, -1.5)),
                               here.rotate(x, here.positions + torch.tensor([0.0, 2.0, -1.5])))  # fmt: skip


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_channels_are_scaled_as_they_would_be_before_rotation(layout):
    here, x, m = rope(layout=layout), randn(1, 2, 7, 16), randn(8, seed=2)
    assert here.axis_of_pair == (0, 0, 1, 1, 1, 2, 2, 2)
    before = here.rotate(here.scale(x, m), here.positions)
    torch.testing.assert_close(here.scale(here.rotate(x, here.positions), m), before)
    assert torch.equal(here.scale(x, torch.ones(8)), x)


def test_logits_depend_on_the_difference_of_positions_only():
    here, q, k = rope(), randn(1, 1, 7, 16), randn(1, 1, 7, 16, seed=3)
    logits = here.rotate(q, here.positions) @ here.rotate(k, here.positions).mT
    moved = Rope(here.positions + torch.tensor([3.0, -2.0, 5.5]), here.omega)
    torch.testing.assert_close(moved.rotate(q, moved.positions) @ moved.rotate(k, moved.positions).mT, logits)


def test_half_precision_comes_back_in_its_own_dtype_and_rounds_once():
    here, x = rope(), randn(1, 2, 7, 16, dtype=torch.float32)
    rounded = here.rotate(x.bfloat16(), here.positions)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, here.rotate(x.bfloat16().float(), here.positions).bfloat16())


def test_what_does_not_fit_is_refused():
    here = rope()
    with pytest.raises(ValueError, match=r"one number per axis"):
        here.rotate(randn(1, 1, 7, 16), (1.0, 2.0))
    with pytest.raises(ValueError, match=r"7 tokens and 16 channels"):
        here.unrotate(randn(1, 1, 6, 16))
    with pytest.raises(ValueError, match=r"one factor per pair"):
        here.scale(randn(1, 1, 7, 16), torch.ones(4))
    with pytest.raises(ValueError, match="'interleaved' and 'half'"):
        rope(layout="split")
    with pytest.raises(ValueError, match="other frequencies"):
        here.concat(rope(axes=(16,)).unrotated(2))


# ------------------------------------------------------------------------------------------------------- tokens


def tokens(with_rope=True):
    segments = (Segment("text", 0, 3), Segment("image", 3, 4, (2, 2)))
    return Tokens(segments, rope() if with_rope else None)


def test_joined_tokens_keep_their_segments_and_places():
    both = tokens().concat(tokens().only("image").named("image", "reference:0"))
    assert [(s.name, s.start, s.length, s.grid) for s in both.segments] == [
        ("text", 0, 3, None), ("image", 3, 4, (2, 2)), ("reference:0", 7, 4, (2, 2)),
    ]  # fmt: skip
    assert torch.equal(both.rope.positions, torch.cat((rope().positions, rope().positions[3:])))
    assert tokens().concat(Tokens()) == Tokens()  # of a part nothing is known
    again = both.take(range(7))
    assert again.segments == tokens().segments and torch.equal(again.rope.positions, rope().positions)


def test_tokens_that_are_not_rotated_stay_so_beside_others():
    plain = Tokens((Segment("style", 0, 2),))
    for both, where in ((tokens().concat(plain), [7, 8]), (plain.concat(tokens()), [0, 1])):
        assert both.rope.plain.nonzero()[:, 0].tolist() == where
        x = randn(1, 1, 9, 16)
        turned = both.rope.rotate(x, (1.0, 2.0, 3.0))
        assert torch.equal(turned[:, :, where], x[:, :, where])
        assert (turned != x).any(-1)[0, 0].sum() == 7
    assert plain.concat(plain).rope is None


@pytest.mark.parametrize("index", [[0, 2, 3, 5], torch.tensor([0, 2, 3, 5]),
                                   torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()])  # fmt: skip
def test_chosen_tokens_are_cut_by_segment(index):
    cut = tokens().take(index)
    assert [(s.name, s.start, s.length, s.grid) for s in cut.segments] == [("text", 0, 2, None), ("image", 2, 2, None)]
    assert torch.equal(cut.rope.positions, rope().positions[[0, 2, 3, 5]])


def test_tokens_may_come_in_another_order_but_not_apart():
    turned = tokens().take([3, 4, 5, 6, 0, 1, 2])
    assert [(s.name, s.start, s.grid) for s in turned.segments] == [("image", 0, (2, 2)), ("text", 4, None)]
    with pytest.raises(ValueError, match="'text' come to lie apart"):
        tokens().take([0, 3, 1])
    with pytest.raises(ValueError, match="token 7 of 7"):
        tokens().take([7])
    with pytest.raises(ValueError, match="already"):
        tokens().named("text", "image")


def test_queries_of_a_segment_bring_their_places():
    call = AttentionCall(*(randn(1, 2, 7, 16),) * 3, query_tokens=tokens(), key_tokens=tokens())
    image = call.queries("image")
    assert image.query_tokens.segments == (Segment("image", 0, 4, (2, 2)),)
    assert torch.equal(image.query_tokens.rope.positions, rope().positions[3:])
    assert torch.equal(
        image.query_tokens.rope.unrotate(image.query), call.query_tokens.rope.unrotate(call.query)[:, :, 3:]
    )


# ------------------------------------------------------------------------------------------------------- models


class Watch:
    """Queries and keys of every operation with their tokens."""

    def __init__(self):
        self.calls = []

    def attention(self, call, attend):
        self.calls.append(call)
        return attend(call)


def before_rope(monkeypatch, name):
    """What each model hands to its own rotation: (q, k) of every operation, (b, h, n, d)."""
    seen = []
    module, function = {
        "flux": (transformer_flux, "apply_rotary_emb"),
        "qwen": (transformer_qwenimage, "apply_rotary_emb_qwen"),
    }[name]
    original = getattr(module, function)

    def watched(x, freqs, *args, **kwargs):
        seen.append(x.transpose(1, 2))
        return original(x, freqs, *args, **kwargs)

    monkeypatch.setattr(module, function, watched)
    return seen


@pytest.mark.parametrize("size", [(64, 64), (80, 112)])
@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_queries_and_keys_turned_back_are_those_before_the_models_rotation(name, size, monkeypatch):
    family = FAMILIES[name]
    pipe, watch, seen = family.build(), Watch(), before_rope(monkeypatch, name)
    with attach(pipe, watch):
        family.run(pipe, cfg=True, height=size[0], width=size[1])
    assert len(watch.calls) == 4 * len(family.sites)
    per_op = len(seen) // len(watch.calls)  # qwen rotates image and text apart
    assert per_op in (2, 4)
    for i, call in enumerate(watch.calls):
        own = seen[i * per_op : (i + 1) * per_op]
        query, key = own if per_op == 2 else (torch.cat((own[2], own[0]), 2), torch.cat((own[3], own[1]), 2))
        for tokens_, rotated, plain in ((call.query_tokens, call.query, query), (call.key_tokens, call.key, key)):
            assert not torch.allclose(rotated, plain, atol=1e-2)
            assert (tokens_.rope.unrotate(rotated) - plain).abs().max() < 2e-6


def test_wan_queries_turned_back_are_those_before_its_rotation():
    family = FAMILIES["wan"]
    pipe, watch = family.build(), Watch()
    own = []
    for block in pipe.transformer.blocks:
        block.attn1.norm_q.register_forward_hook(lambda module, inputs, out: own.append(out))
    with attach(pipe, watch):
        family.run(pipe, cfg=True, height=80, width=112, num_inference_steps=1)
    selves = [call for call in watch.calls if call.kind == "self"]
    assert len(selves) == len(own) == 4
    for call, plain in zip(selves, own, strict=True):
        plain = plain.unflatten(2, (call.site.heads, -1)).transpose(1, 2)
        assert (call.query_tokens.rope.unrotate(call.query) - plain).abs().max() < 2e-6
        assert not torch.allclose(call.query, plain, atol=1e-2)
    for call in watch.calls:
        assert call.kind == "self" or call.query_tokens.rope is None is call.key_tokens.rope


def test_frequencies_and_positions_are_those_of_the_models_tables():
    """The model's own tables come out of positions and frequencies, layered Qwen-Image's too."""
    for layered, kind in ((False, "QwenEmbedRope"), (True, "QwenEmbedLayer3DRope")):
        embed = getattr(transformer_qwenimage, kind)(theta=10000, axes_dim=[4, 6, 6], scale_rope=True)
        shapes = ((1, 4, 6), (1, 3, 5), (1, 5, 7))
        image, text = embed([list(shapes)], max_txt_seq_len=6, device=torch.device("cpu"))
        ours = _qwen_rope(shapes, 6, (4, 6, 6), layered, torch.device("cpu"))
        angles = torch.cat([ours.positions[:, a, None] * w for a, w in enumerate(ours.omega)], -1)
        theirs = torch.cat((text, image))
        torch.testing.assert_close(
            torch.polar(torch.ones_like(angles), angles).to(theirs.dtype), theirs, rtol=0, atol=2e-6
        )


def small_flux():
    """One single block: what takes time is tracing."""
    with seeded(0):
        return FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=0, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
        ).eval()  # fmt: skip


def flux_call(model, ids, text_ids, timestep=0.5):
    with torch.no_grad():
        return model(
            hidden_states=randn(1, len(ids), 4, dtype=torch.float32),
            encoder_hidden_states=randn(1, len(text_ids), 8, dtype=torch.float32),
            pooled_projections=randn(1, 8, dtype=torch.float32),
            timestep=torch.tensor([timestep]), img_ids=ids, txt_ids=text_ids, return_dict=False,
        )[0]  # fmt: skip


def test_places_of_reference_images_are_the_ids_they_were_given():
    """FLUX Kontext: the reference's tokens have 1 on the first axis.  New ids of the same sizes are new places."""
    model, watch = small_flux(), Watch()
    ids, text_ids = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(3.0)), torch.zeros(5, 3)
    with attach(model, watch):
        flux_call(model, ids, text_ids)
        flux_call(model, ids + torch.tensor([0.0, 7.0, 0.0]), text_ids)
    for call, moved in zip(watch.calls, (0.0, 7.0), strict=True):
        places = ids.double() + torch.tensor([0.0, moved, 0.0])
        assert torch.equal(call.key_tokens.only("reference:0").rope.positions, places[6:])
        assert torch.equal(call.key_tokens.only("image").rope.positions, places[:6])
        assert not call.key_tokens.only("text").rope.positions.any()


def test_a_compiled_model_turns_as_the_eager_one_and_one_graph_serves_all_steps():
    class Moved:
        def attention(self, call, attend):
            return attend(call.replace(key=call.key_tokens.rope.rotate(call.key, (0.0, 1.0, 0.5))))

    model, ids, text_ids = (
        small_flux(),
        torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, 2, 3))),
        torch.zeros(5, 3),
    )
    plain, graphs = flux_call(model, ids, text_ids), []

    def steps(run):
        for i, timestep in enumerate((0.9, 0.6, 0.3)):
            run.at(i, 3)
            yield flux_call(model, ids, text_ids, timestep)

    with attach(model, Moved()) as run:
        eager = list(steps(run))
        assert (eager[1] - plain).abs().max() > 1e-4
        model.compile(fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        for ours, theirs in zip(steps(run), eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["sd", "sd3", "pixart"])
def test_models_without_rotary_embedding_refuse_controls_that_need_it(name):
    class Turns(Watch):
        needs = frozenset({"rope"})

    with pytest.raises(ValueError, match=r"Turns needs rope, which .* lacks: its positions"):
        attach(FAMILIES[name].build(), Turns())
    attach(FAMILIES["wan"].build(), Turns()).close()


# ------------------------------------------------------------------------------------------------------- golden


def golden(method, case):
    return json.loads((GOLDEN / method / f"{case}.json").read_text()), load_file(
        GOLDEN / method / f"{case}.safetensors"
    )


@pytest.mark.parametrize(
    ("method", "case", "before", "where", "tolerance"),
    [
        ("rope_sharing", "shared_plain", "_pre", "axes", 1e-9),
        ("rf_solver", "rf_edit_v_sharing_block", "_prerope", "axes_dim", 2e-6),
    ],
)
def test_rotation_is_that_of_the_golden_tensors(method, case, before, where, tolerance):
    facts, t = golden(method, case)
    axes = (facts.get("params") or facts["parameters"])[where]
    here = Rope(t["ids"].double(), tuple(frequencies(dim) for dim in axes))
    for x in ("q", "k"):
        rotated, plain = t[x], t[x + before]
        assert (here.rotate(plain, here.positions) - rotated).abs().max() <= tolerance
        assert (here.unrotate(rotated) - plain).abs().max() <= tolerance
