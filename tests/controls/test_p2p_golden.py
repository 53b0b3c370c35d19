"""The authors' own outputs on small random tensors, and their algorithm re-stated, against the fused form."""

import json
from pathlib import Path

import pytest
import torch
from controls.authors import Controller, encoded
from safetensors.torch import load_file

from attnctrl import AttentionCall, Rows, Step
from attnctrl.attend import attend
from attnctrl.controls import PromptToPrompt

GOLDEN = Path(__file__).parents[1] / "golden" / "prompt_to_prompt"


def load(name):
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def call(q, k, v, kind, step, steps, prompts, **extra):
    rows = Rows.grid(("uncond", "cond"), prompts, 1)
    return AttentionCall(q, k, v, kind=kind, rows=rows, step=Step(step, steps), **extra)


@pytest.mark.parametrize("case", ["replace_basic", "refine_words", "reweight_only"])
def test_cross_edits_are_the_authors_to_1e_10(case):
    facts, t = load(case)
    params, prompts = facts["params"], facts["prompts"]
    control = PromptToPrompt(
        [encoded(p) for p in prompts],
        cross={("default" if k == "default_" else k): w for k, w in cross.items()}
        if isinstance(cross := params["cross_replace_steps"], dict)
        else cross,
        self_=params["self_replace_steps"],
        edit="auto" if params["edit"] == "reweight" else params["edit"],
        reweight=params.get("equalizer"),
    )
    steps = [int(name[8:]) for name in t if name.startswith("out_step")]
    assert steps
    for step in steps:
        ours = control.attention(call(t["q"], t["k"], t["v"], "cross", step, facts["num_steps"], len(prompts)), attend)
        assert (ours - t[f"out_step{step}"]).abs().max() <= 1e-10
        uncond = len(prompts)
        torch.testing.assert_close(ours[:uncond], t["out_plain"][:uncond], rtol=0, atol=1e-12)


def test_self_replacement_is_the_authors():
    facts, t = load("self_replace")
    for name, limit in facts["params"]["limits"].items():
        q, k, v = (t[f"{name}.{x}"] for x in "qkv")
        control = PromptToPrompt(
            [encoded(p) for p in facts["prompts"]], self_=tuple(facts["params"]["self_replace_steps"]), limit=limit
        )
        for step in (1, 2, 4, 5):
            ours = control.attention(call(q, k, v, "self", step, facts["num_steps"], 3, scale=facts["scale"]), attend)
            torch.testing.assert_close(ours, t[f"{name}.out_step{step}"], rtol=0, atol=2e-5)


def test_the_restated_algorithm_is_the_authors():
    """So that what it is compared with below is worth something."""
    for case in ("replace_basic", "refine_words", "reweight_only"):
        facts, t = load(case)
        params = facts["params"]
        edit = None if params["edit"] == "reweight" else params["edit"]
        theirs = Controller(
            facts["prompts"],
            facts["num_steps"],
            params["cross_replace_steps"],
            params["self_replace_steps"],
            edit,
            params.get("equalizer"),
        )
        assert torch.equal(theirs.alpha, t["alpha_time_words"])
        if edit == "replace":
            assert torch.equal(theirs.mapper, t["mapper"])
        if edit == "refine":
            assert torch.equal(theirs.map, t["mapper"]) and torch.equal(theirs.matched, t["refine_alphas"])
        for name, expected in t.items():
            if name.startswith("out_step"):
                ours = theirs.attention(t["q"], t["k"], t["v"], int(name[8:]), cross=True)
                assert (ours - expected).abs().max() <= 1e-12
