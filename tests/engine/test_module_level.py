"""The module level: controls around a named submodule of a denoiser."""

from __future__ import annotations

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from tiny import FAMILIES, seeded

from attnctrl import attach
from attnctrl.sites import select_modules


class Around:
    """A control whose `module` is the function given."""

    def __init__(self, modules, function=lambda call, module: module(call)):
        self.modules, self.module = modules, function


class Nothing:
    def attention(self, call, attend):
        return attend(call)


def doubled(call, module):
    return module(call) * 2


BLOCKS = {
    "sd": "up_blocks.*.resnets.*.conv2",
    "flux": "single_transformer_blocks.*",
    "sd3": "transformer_blocks.1.ff",
    "pixart": "transformer_blocks.0.attn1",
    "qwen": "transformer_blocks.*.img_mlp",
    "wan": "blocks.*.attn2",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_module_is_wrapped_in_every_family_and_given_back(name):
    family, seen = FAMILIES[name], []
    pipe = family.build()
    plain = family.run(pipe)
    model = getattr(pipe, family.denoisers[0])
    before = {path: (type(module), set(vars(module))) for path, module in model.named_modules()}

    def watch(call, module):
        seen.append(call)
        return module(call)

    with attach(pipe, Around(BLOCKS[name], watch)) as run:
        assert torch.equal(family.run(pipe), plain)
        names = run.modules_of(run.controls[0])
        assert f"{len(names)} modules" in str(run.report())
    assert {call.name for call in seen} == set(names) == set(select_modules(list(before), BLOCKS[name]))
    calls = len(family.calls) * family.steps
    assert len(seen) == calls * len(names)
    for call in seen:
        tensors = [x for x in call.inputs.values() if isinstance(x, torch.Tensor)]
        assert tensors[0].shape[0] == len(call.rows) * call.rows.fold
        assert call.rows.branch == family.calls[call.step.call] or call.rows.branch == tuple(
            branch for branch in family.calls[call.step.call] for _ in range(2)
        )
    assert {path: (type(module), set(vars(module))) for path, module in model.named_modules()} == before
    assert torch.equal(family.run(pipe), plain)


def test_a_control_may_change_what_goes_in_and_what_comes_out():
    """Around a convolution: scaling the input, less the bias, is scaling the output."""
    family = FAMILIES["sd"]
    pipe = family.build()
    pipe.unet.mid_block.resnets[0].conv2.bias.data.zero_()
    outer = Around("mid_block.resnets.0.conv2", doubled)
    inner = Around(
        "mid_block.resnets.0.conv2", lambda call, module: module(call.with_inputs(input=call.inputs["input"] * 2))
    )
    plain = family.run(pipe)
    results = []
    for control in (outer, inner):
        with attach(pipe, control):
            results.append(family.run(pipe))
    assert (results[0] - plain).abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
    assert torch.equal(family.run(pipe), plain)


def test_controls_of_one_module_nest_in_the_order_given():
    pipe, order = FAMILIES["sd"].build(), []

    def named(name):
        def around(call, module):
            order.append(name)
            out = module(call)
            order.append(f"/{name}")
            return out

        return Around("mid_block.resnets.0.conv1", around)

    with attach(pipe, named("a"), named("b")), attach(pipe, named("c")):
        FAMILIES["sd"].run(pipe, num_inference_steps=1)
    assert order == ["a", "b", "c", "/c", "/b", "/a"]


def test_a_module_left_out_is_told_with_the_sites_in_it():
    family = FAMILIES["sd3"]
    pipe, watch = family.build(), Nothing()
    skip = Around(
        "transformer_blocks.1",
        lambda call, module: (call.inputs["encoder_hidden_states"], call.inputs["hidden_states"]),
    )
    plain = family.run(pipe)
    with attach(pipe, skip, watch) as run:
        assert not torch.equal(family.run(pipe), plain)
    sites = {report.site.name: report for report in run.report().sites}
    assert sites["transformer_blocks.1.attn"].skipped == family.steps and sites["transformer_blocks.1.attn"].calls == 0
    assert sites["transformer_blocks.0.attn"].skipped == 0 and sites["transformer_blocks.0.attn"].calls == family.steps
    assert f"skipped x{family.steps}" in str(run.report())
    assert torch.equal(family.run(pipe), plain)


def test_an_attention_module_is_wrapped_whole_and_inside_at_once():
    family, name = FAMILIES["sd"], "mid_block.attentions.0.transformer_blocks.0.attn1"
    pipe, operations = family.build(), []
    plain = family.run(pipe)

    class Inside(Nothing):
        sites = f'"{name}"'

        def attention(self, call, attend):
            operations.append(call.site.name)
            return attend(call)

    whole = attach(pipe, Around(name, doubled))
    alone = family.run(pipe)
    assert not torch.equal(alone, plain)
    inside = attach(pipe, Inside())
    assert torch.equal(family.run(pipe), alone) and operations == [name] * family.steps
    whole.close()
    assert torch.equal(family.run(pipe), plain) and operations == [name] * 2 * family.steps
    inside.close()
    assert torch.equal(family.run(pipe), plain) and len(operations) == 2 * family.steps


def test_an_exception_in_the_middle_gives_every_module_back():
    family = FAMILIES["flux"]
    pipe = family.build()
    plain = family.run(pipe)

    def fail(call, module):
        raise KeyboardInterrupt("in the middle")

    with pytest.raises(KeyboardInterrupt, match="in the middle"), attach(pipe, Around("transformer_blocks.1", fail)):
        family.run(pipe)
    assert not hasattr(type(pipe.transformer.transformer_blocks[1]), "_attnctrl")
    assert torch.equal(family.run(pipe), plain)


def test_a_module_that_takes_the_place_of_another_is_wrapped_from_the_next_run_on():
    family = FAMILIES["sd"]
    pipe, calls = family.build(), []
    with attach(pipe, Around("conv_out", lambda call, module: (calls.append(1), module(call))[1])):
        old = pipe.unet.conv_out
        pipe.unet.conv_out = torch.nn.Conv2d(16, 4, 3, padding=1)
        family.run(pipe)
        assert len(calls) == family.steps and "_attnctrl" not in vars(old)
    assert type(pipe.unet.conv_out) is torch.nn.Conv2d and type(old) is torch.nn.Conv2d


def test_modules_are_chosen_by_glob_or_regular_expression():
    names = ["a", "a.0", "a.0.conv", "a.1", "a.1.conv", "a.1.b.conv", "b"]
    for selector, expected in {
        "a.*": ["a.0", "a.1"],
        "a.*.conv": ["a.0.conv", "a.1.conv"],
        "a.**.conv": ["a.0.conv", "a.1.conv", "a.1.b.conv"],
        "**": names,
        "b": ["b"],
        r"a\.[1-9].*": ["a.1", "a.1.conv", "a.1.b.conv"],
        "a|b": ["a", "b"],
        "c": [],
    }.items():
        assert select_modules(names, selector) == expected
    with pytest.raises(ValueError, match="cannot read the module selector 'a\\['"):
        select_modules(names, "a[")


def test_a_selector_that_matches_nothing_lists_some_names():
    pipe = FAMILIES["sd"].build()
    with pytest.raises(
        ValueError, match=r"Around wraps modules 'blocks\.\*', .*; there are conv_in, .*, down_blocks\.\*, "
    ):
        attach(pipe, Around("blocks.*"))
    with pytest.raises(TypeError, match=r"Around\.modules is None; it is a selector"):
        attach(pipe, Around(None))


def test_a_control_whose_modules_did_not_run_is_told():
    pipe = FAMILIES["sd"].build()
    message = "Around was attached but never called: its modules did not run"
    with pytest.warns(UserWarning, match=message), attach(pipe, Around("conv_in")):
        pass


def test_a_compiled_model_does_what_the_eager_one_does():
    """One graph for all steps."""
    with seeded(0):
        model = PixArtTransformer2DModel(
            sample_size=4, patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2,
            attention_head_dim=8, cross_attention_dim=16, caption_channels=16, norm_num_groups=4,
        ).eval()  # fmt: skip
        x, text = torch.randn(2, 4, 4, 4), torch.randn(2, 3, 16)
    added = {"resolution": None, "aspect_ratio": None}

    @torch.no_grad()
    def steps(run):
        for i in range(3):
            run.at(i, 3)
            yield model(x, encoder_hidden_states=text, timestep=torch.tensor([9 - i] * 2), added_cond_kwargs=added)[0]

    torch.compiler.reset()
    graphs = []
    with attach(model, Around("**.ff", doubled), Around("**.attn1", doubled)) as run:
        eager = list(steps(run))
        model.compile(fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        for ours, theirs in zip(steps(run), eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert len(graphs) == 1
    torch.compiler.reset()
