"""A reference's keys, scaled per RoPE frequency or moved, in shared attention of RoPE models."""

import json
from pathlib import Path

import pytest
import torch
from controls.compiled import assert_one_graph
from controls.edits import pipe_of, sample
from safetensors.torch import load_file
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Step, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import RopeKeyModulation
from attnctrl.controls.rope_keys import at, multipliers
from attnctrl.rope import Rope, frequencies

GOLDEN = Path(__file__).parents[1] / "golden" / "rope_sharing"
ROTATED = [FAMILIES[name] for name in ("flux", "qwen", "wan")]
NAIVE = {"low": 1.0, "high": 1.0}
PROMPTS = ("a red cat", "a blue dog", "a green tree")


def layout(text, height, width, axes=(4, 6, 6)):
    ids = [(0.0, 0.0, 0.0)] * text + [(0.0, float(i), float(j)) for i in range(height) for j in range(width)]
    rope = Rope(torch.tensor(ids, dtype=torch.float64), tuple(map(frequencies, axes)))
    segments = Segment("text", 0, text), Segment("image", text, height * width, (height, width))
    return Tokens(segments, rope)


def call(count, text=3, height=2, width=3, dtype=torch.float64, seed=0, **extra):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, count, 2, text + height * width, 16, generator=generator, dtype=torch.float64).to(dtype)
    tokens = layout(text, height, width)
    extra = {"rows": Rows.plain(count), **extra}
    return AttentionCall(q, k, v, kind="joint", query_tokens=tokens, key_tokens=tokens, **extra)


def by_hand(c, row, shared):
    """Target `row`, with the reference's image keys `shared` (1, h, image, d) appended to its own."""
    keys = torch.cat((c.key[row : row + 1], shared), dim=2)
    values = torch.cat((c.value[row : row + 1], c.value[:1, :, 3:]), dim=2)
    return torch.softmax(c.query[row : row + 1] @ keys.transpose(2, 3) / 4, -1) @ values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sharing_is_the_equations(dtype):
    facts, t = json.loads((GOLDEN / "shared_plain.json").read_text()), load_file(GOLDEN / "shared_plain.safetensors")
    p = facts["params"]
    tokens = layout(p["text_tokens"], p["H"], p["W"], p["axes"])
    assert torch.equal(tokens.rope.positions, t["ids"])
    control = RopeKeyModulation(
        low=p["s_low_freq"], high=p["s_high_freq"], beta=p["beta"], shift=(0, p["width_shift"]), factor=p["lambda"],
        adain=float(p["pre_rope_adain"]),
    )  # fmt: skip
    q, k, v = (t[name].to(dtype) for name in "qkv")
    ours = control.attention(
        AttentionCall(q, k, v, kind="joint", rows=Rows.plain(3), query_tokens=tokens, key_tokens=tokens), attend
    )
    assert (ours - t["out"]).abs().max() <= (1e-9 if dtype == torch.float64 else 2e-6)
    assert torch.equal(multipliers(tokens.rope, 1.0, 1.0, 2.0, constant=1).repeat_interleave(2), t["scale_vec"])


def test_multipliers_run_from_the_highest_to_the_lowest_frequency_of_each_axis():
    rope = layout(0, 2, 2, (4, 8, 6)).rope
    m = multipliers(rope, 1.5, 0.5, 2.0, constant=1)
    expected = [1.5, 1.5, 0.5, 0.5 + 1 / 9, 0.5 + 4 / 9, 1.5, 0.5, 0.75, 1.5]
    torch.testing.assert_close(m, torch.tensor(expected, dtype=torch.float64))
    assert multipliers(rope, 1.5, 0.5, 2.0, constant=1, on_constant=0.7)[:2].tolist() == [0.7, 0.7]
    assert multipliers(rope, 1.5, 0.5, 2.0, constant=1, on_constant="curve")[:2].tolist() == [0.5, 1.5]
    assert multipliers(layout(0, 2, 2, (2, 2, 2)).rope, 1.5, 0.5, 2.0).tolist() == [0.5, 0.5, 0.5]


def test_keys_are_scaled_as_before_rope_and_moved_as_if_they_lay_there():
    c = call(3)
    rope = c.key_tokens.only("image").rope
    before = rope.unrotate(c.key[:1, :, 3:])
    m = multipliers(rope, 1.3, 0.4, 3.0, constant=1).repeat_interleave(2)
    there = rope.positions + torch.tensor([0.0, 1.0, 3.0])
    key = rope.rotate(before * m * 0.9, there)
    control = RopeKeyModulation(low=1.3, high=0.4, beta=3.0, shift=(1, 3), factor=0.9)
    ours = control.attention(c, attend)
    for row in (1, 2):
        torch.testing.assert_close(ours[row : row + 1], by_hand(c, row, key), rtol=0, atol=1e-12)
    assert torch.equal(ours[:1], attend(c.take([0])))
    beside = RopeKeyModulation(low=1.3, high=0.4, beta=3.0, shift="beside").attention(c, attend)
    there = RopeKeyModulation(low=1.3, high=0.4, beta=3.0, shift=(0, 3)).attention(c, attend)
    assert torch.equal(beside, there)


def test_statistics_are_taken_before_rope():
    c = call(2)
    rope = c.key_tokens.only("image").rope
    changed = {}
    for name in ("query", "key"):
        x = getattr(c, name)
        raw = rope.unrotate(x[:, :, 3:])
        std, mean = ((raw.var(2, keepdim=True) + 1e-5).sqrt(), raw.mean(2, keepdim=True))
        styled = (raw - mean) / std * std[:1] + mean[:1]
        mixed = rope.rotate(0.6 * raw + 0.4 * styled, rope.positions)
        changed[name] = torch.cat((x[:, :, :3], mixed), dim=2)
    ours = RopeKeyModulation(**NAIVE, adain=0.4).attention(c, attend)
    torch.testing.assert_close(ours[1:], by_hand(c.replace(**changed), 1, c.key[:1, :, 3:]), rtol=0, atol=1e-12)
    assert torch.equal(ours[:1], attend(c.take([0])))


def test_schedules_are_lines_over_the_run_or_functions_of_the_step():
    assert [at((0.0, 1.0), Step(i, 5)) for i in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert at((0.5, 1.0), Step(0, 1)) == 0.5 and at(2.0, Step(3, 5)) == 2.0
    assert at(lambda step: 1 - step.index / step.total, Step(1, 4)) == 0.75
    first, last = (
        RopeKeyModulation(low=1.0, high=(0.0, 1.0)).attention(call(2, step=Step(i, 3)), attend) for i in (0, 2)
    )
    assert torch.equal(last, RopeKeyModulation(**NAIVE).attention(call(2), attend))
    assert torch.equal(first, RopeKeyModulation(low=1.0, high=0.0).attention(call(2), attend))


def test_branches_never_mix_targets_permute_and_probes_are_linear():
    c = call(4, rows=Rows.grid(("uncond", "cond"), 2, 1))
    control = RopeKeyModulation(low=1.2, high=0.5, adain=1.0)
    out = control.attention(c, attend)
    for half in ([0, 1], [2, 3]):
        torch.testing.assert_close(control.attention(c.take(half), attend), out[half], rtol=0, atol=1e-14)
    c = call(3)
    swapped = c.replace(query=c.query[[0, 2, 1]], key=c.key[[0, 2, 1]], value=c.value[[0, 2, 1]])
    torch.testing.assert_close(control.attention(swapped, attend), control.attention(c, attend)[[0, 2, 1]])
    probe = lambda value: control.attention(c.replace(value=value, probe=True), attend)  # noqa: E731
    a, b = torch.randn(2, 3, 2, 9, 1, dtype=torch.float64)
    torch.testing.assert_close(probe(a + 2 * b), probe(a) + 2 * probe(b), rtol=0, atol=1e-13)
    torch.testing.assert_close(probe(torch.ones_like(a)), torch.ones_like(a), rtol=0, atol=1e-13)
    half = control.attention(call(3, dtype=torch.bfloat16), attend).double()
    assert (half - control.attention(call(3), attend)).abs().max() < 5e-2


def test_rows_reads_and_arguments_that_do_not_fit_are_refused():
    with pytest.raises(MissingRows, match="prompt 0"):
        RopeKeyModulation().attention(call(2).replace(rows=Rows.plain(3).take([1, 2])), attend)
    c = call(2)
    with pytest.raises(ValueError, match="no rope"):
        RopeKeyModulation().attention(c.replace(key_tokens=Tokens(c.key_tokens.segments)), attend)
    for wrong in ({"adain": 2.0}, {"beta": 0.0}, {"shift": "left"}, {"on_constant": "high"}, {"steps": (0.5, 0.2)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RopeKeyModulation(**wrong)
    for name in ("sd", "sd3", "pixart"):
        with pytest.raises(ValueError, match="needs rope, which"):
            attach(pipe_of(name), RopeKeyModulation())


@pytest.mark.parametrize("family", ROTATED, ids=lambda family: family.name)
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_the_reference_is_plain_and_targets_read_it(family, cfg):
    options = {"cfg": cfg, "num_inference_steps": 3}
    plain = sample(family, PROMPTS[:2], **options)
    control = RopeKeyModulation(adain=0.5, shift="beside")
    shared = sample(family, PROMPTS[:2], control, **options)
    torch.testing.assert_close(shared[0], plain[0], rtol=0, atol=1e-5)
    assert (shared[1] - plain[1]).abs().max() > 1e-3
    assert torch.equal(sample(family, PROMPTS[:2], RopeKeyModulation(steps=(0, 0)), **options), plain)
    three = sample(family, PROMPTS, control, **options) if family.name == "flux" else shared
    torch.testing.assert_close(three[:2], shared, rtol=0, atol=1e-4)


def test_aligned_gen_acts_in_single_stream_blocks():
    with attach(pipe_of("flux"), control := RopeKeyModulation.aligned_gen()) as run:
        assert {site.place for site in run.sites_of(control)} == {"single"}
        FAMILIES["flux"].run(pipe_of("flux"))


def test_one_graph_serves_all_steps():
    rope = Rope(torch.zeros(7, 3, dtype=torch.float64), tuple(map(frequencies, (2, 2, 4))))
    assert_one_graph(RopeKeyModulation(adain=0.5, shift="beside"), steps=3, rope=rope)
