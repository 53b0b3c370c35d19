"""One of two LoRAs per layer and step."""

import json
from pathlib import Path

import pytest
import torch
from controls.compiled import Graphs
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import FAMILIES

from attnctrl import Rows, Step, attach
from attnctrl.call import ModuleCall
from attnctrl.controls import LoraChoice
from attnctrl.controls.lora_choice import balance, preference, strength, threshold

GOLDEN = Path(__file__).parents[1] / "golden" / "klora"
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def test_choices_are_the_authors():
    facts, t = json.loads((GOLDEN / "s.json").read_text()), load_file(GOLDEN / "s.safetensors")
    p = facts["params"]
    ratio, _ = preference((t["content_up"], t["content_down"]), (t["style_up"], t["style_down"]))
    rho = ratio / p["average_ratio"]
    chosen = [
        1 if rho > threshold(counter / p["sum_timesteps"], p["pattern"], p["alpha"], p["beta"]) else 2
        for counter in t["counter"].tolist()
    ]
    assert chosen == t["pick"].tolist() and set(chosen) == {1, 2}


def test_thresholds_rise_and_those_of_s_star_fall_once():
    assert [threshold(u, "s") for u in (0.0, 0.5, 0.999999)] == pytest.approx([0.5, 1.25, 2.0], abs=1e-5)
    assert [threshold(u) for u in (0.0, 0.149999, 0.150001, 0.999999)] == pytest.approx(
        [1.275, 1.5, 0, 1.275], abs=1e-4
    )
    assert threshold(0.3, "s*", 2.0, 1.9) == pytest.approx(0.5) and threshold(1.25, "s") == threshold(0.25, "s")
    with pytest.raises(ValueError, match="'s' or 's\\*'"):
        threshold(0.0, "t")


def test_strength_and_balance():
    up, down = torch.tensor([[1.0], [-3.0]]), torch.tensor([[2.0, 0.5]])
    assert [float(x) for x in strength(up, down, 2)] == [8.0, 10.0]  # |2, .5, -6, -1.5|
    assert [float(x) for x in strength(up, down, 9)] == [10.0, 10.0]
    assert balance([1.0, 2.0, 3.0]) == 2.0 and balance([1.0, 1.0, 1.0, 1.0, 100.0]) == 1.0


def with_adapters(*, equal=False, **options):
    family = FAMILIES["sd"]
    pipe = family.build()
    for seed, name in enumerate(("content", "style")):
        torch.manual_seed(0 if equal else seed)
        pipe.unet.add_adapter(LoraConfig(r=2 + seed * (not equal), lora_alpha=5, target_modules=TARGETS,
                                         init_lora_weights=False, **options), adapter_name=name)  # fmt: skip
    return family, pipe


def run(family, pipe, *controls, adapters=None):
    if adapters:
        pipe.set_adapters(adapters)
    with attach(pipe, *controls) if controls else torch.no_grad():
        return family.run(pipe, prompts=("a",), num_inference_steps=3)


def test_a_low_threshold_is_the_content_lora_and_a_high_one_the_style_lora():
    family, pipe = with_adapters()
    content, style = (run(family, pipe, adapters=name) for name in ("content", "style"))
    assert (content - style).abs().max() > 1e-3
    for adapters in (["content", "style"], "style"):
        low, high = LoraChoice("content", "style", "s", 0.0, 0.0), LoraChoice("content", "style", "s", 0.0, 1e9)
        torch.testing.assert_close(run(family, pipe, low, adapters=adapters), content, rtol=0, atol=1e-5)
        torch.testing.assert_close(run(family, pipe, high), style, rtol=0, atol=1e-5)
    assert set(low.chosen.values()) == {"content"} and len(low.chosen) == len(low.rho) == 4 * len(family.sites)
    assert torch.equal(run(family, pipe, adapters="style"), style)


def test_equal_loras_are_that_lora_at_any_threshold():
    family, pipe = with_adapters(equal=True)
    plain = run(family, pipe, adapters="content")
    control = LoraChoice("content", "style")
    torch.testing.assert_close(run(family, pipe, control), plain, rtol=0, atol=1e-5)
    assert list(control.rho.values()) == pytest.approx([1.0] * len(control.rho))


def test_layers_change_from_content_to_style_once_under_s():
    family, pipe = with_adapters()
    control, seen = LoraChoice("content", "style", "s"), []

    class Watch:
        def step(self, call, step):
            seen.append(dict(control.chosen))
            return step(call)

    run(family, pipe, control, Watch())
    numbers = [[choices[name] == "style" for choices in seen] for name in seen[0]]
    assert len(seen) == 3 and all(row == sorted(row) for row in numbers)
    assert any(row[0] != row[-1] for row in numbers)


def test_adapters_that_cannot_be_chosen_between_are_refused():
    family, pipe = with_adapters()
    with pytest.raises(ValueError, match="has both adapters 'content' and 'sketch'; these layers have"):
        run(family, pipe, LoraChoice("content", "sketch"))
    with pytest.raises(ValueError, match="two adapters"):
        LoraChoice("content", "content")
    pipe.fuse_lora(adapter_names=["content"])
    with pytest.raises(ValueError, match="unfuse_lora"):
        run(family, pipe, LoraChoice("content", "style"))
    family, pipe = with_adapters(use_dora=True)
    with pytest.raises(ValueError, match="no plain LoRA"):
        run(family, pipe, LoraChoice("content", "style"))


def test_one_graph_serves_all_choices():
    family, pipe = with_adapters(equal=True)
    control = LoraChoice("content", "style", "s", alpha=2.0, beta=0.0)
    run(family, pipe, control, adapters=["content", "style"])
    key, layer = next(iter(control._layers.items()))
    rows, step, graphs = Rows.plain(1), Step(), Graphs()
    x = torch.randn(1, 4, layer.content.down.shape[1])

    def call(x):
        return control.module(ModuleCall(key[1], {"x": x}, rows, step, key[0]), None)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for update in (layer.content, layer.style):
        control._now[key] = update
        torch.testing.assert_close(compiled(x), call(x))
    assert graphs.count == 1
