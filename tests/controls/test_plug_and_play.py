"""Plug-and-play: the source's queries and keys in decoder self-attention, and its feature map."""

import pytest
import torch
from controls.compiled import assert_one_graph
from controls.edits import EDITABLE, pipe_of, sample
from tiny import FAMILIES

from attnctrl import AttentionCall, DenoiseCall, MissingRows, Rows, Site, Step, attach
from attnctrl.attend import attend
from attnctrl.call import ModuleCall
from attnctrl.controls import FeatureSharing, PlugAndPlay
from attnctrl.controls.plug_and_play import decoder_sites

PROMPTS = ("a red cat", "a blue dog")
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)


def test_targets_of_both_branches_read_the_sources_conditional_map():
    q, k, v = torch.randn(3, 6, 2, 12, 8, dtype=torch.float64)
    rows = Rows.grid(("uncond", "cond"), 3, 1)
    call = AttentionCall(q, k, v, rows=rows, step=Step(1, 4))
    read = [0, 3, 3, 3, 3, 3]
    expected = torch.softmax(q[read] @ k[read].transpose(2, 3) / 8**0.5, -1) @ v
    torch.testing.assert_close(PlugAndPlay().attention(call, attend), expected, rtol=0, atol=1e-12)
    assert torch.equal(PlugAndPlay().attention(call.replace(step=Step(2, 4)), attend), attend(call))
    probe = torch.randn(6, 2, 12, 1, dtype=torch.float64)
    seen = PlugAndPlay().attention(call.replace(value=probe, probe=True), attend)
    expected = torch.softmax(q[read] @ k[read].transpose(2, 3) / 8**0.5, -1) @ probe
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)


def test_rows_that_run_apart_read_their_own_branch_and_missing_sources_raise():
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    uncond = AttentionCall(q, k, v, rows=Rows.grid(("uncond",), 2, 1))
    expected = attend(uncond.borrow(torch.tensor([0, 0])))
    assert torch.equal(PlugAndPlay(steps=(0, 1)).attention(uncond, attend), expected)
    with pytest.raises(MissingRows, match="prompt 0"):
        PlugAndPlay(steps=(0, 1)).attention(uncond.replace(rows=Rows.grid(("cond",), 3, 1).take([1, 2])), attend)


def test_default_sites_are_the_authors():
    blocks = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    sites = [Site(f"up_blocks.{b}.attentions.{a}.transformer_blocks.0.attn1", "self", "up", b) for b, a in blocks]
    assert decoder_sites([Site("mid", "self", "mid"), *sites]) == sites[1:]


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_the_source_is_plain_the_target_is_not_and_no_steps_change_nothing(family, cfg):
    plain = sample(family, PROMPTS, cfg=cfg)
    shared = sample(family, PROMPTS, PlugAndPlay(), cfg=cfg)
    assert torch.equal(shared[0], plain[0]) and (shared[1] - plain[1]).abs().max() > 1e-4
    assert torch.equal(sample(family, PROMPTS, PlugAndPlay(steps=(0, 0)), cfg=cfg), plain)


def test_models_whose_rows_never_meet_are_refused():
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), PlugAndPlay())


@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_features_are_the_sources_conditional_ones_until_their_window_ends(cfg):
    seen = []

    class Watch:
        modules = FeatureSharing().modules

        def module(self, call, module):
            seen.append((call.step.index, module(call)))
            return seen[-1][1]

    sd = FAMILIES["sd"]
    plain = sample(sd, PROMPTS, cfg=cfg)
    shared = sample(sd, PROMPTS, Watch(), FeatureSharing(), cfg=cfg)
    assert torch.equal(shared[0], plain[0]) and (shared[1] - plain[1]).abs().max() > 1e-4
    assert len(seen) == 5
    for step, out in seen:
        cond = out[2:] if cfg else out
        assert torch.equal(cond[0], cond[1]) == (step < 4)
        if cfg:
            assert torch.equal(out[1], cond[0]) == (step < 4) and not torch.equal(out[0], cond[0])
    assert torch.equal(sample(sd, PROMPTS, FeatureSharing(steps=(0, 0)), cfg=cfg), plain)


def test_features_of_a_part_of_the_rows_and_of_models_without_the_module():
    control = FeatureSharing()
    rows = Rows.grid(("uncond", "cond"), 2, 1)
    control.begin(DenoiseCall(torch.zeros(2, 1), {}, rows, Step(0, 5)))
    out = torch.randn(4, 3)
    assert torch.equal(control.module(ModuleCall("conv", {}, rows), lambda call: out), out[[0, 2, 2, 2]])
    part = rows.take([2, 3])
    assert torch.equal(control.module(ModuleCall("conv", {}, part), lambda call: out[2:]), out[[2, 2]])
    with pytest.raises(MissingRows):
        control.module(ModuleCall("conv", {}, rows.take([0, 1])), lambda call: out[:2])
    with pytest.raises(ValueError, match="no submodule has such a name"):
        attach(pipe_of("flux"), FeatureSharing())


def test_one_graph_serves_all_steps():
    assert_one_graph(PlugAndPlay(steps=(0, 3)), steps=3)
