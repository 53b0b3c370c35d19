"""Values, queries and keys of a source, stored or run in lockstep."""

import json
from pathlib import Path

import pytest
import torch
from controls.compiled import assert_one_graph
from controls.edits import EDITABLE, pipe_of, sample
from safetensors.torch import load_file
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Site, Step, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import FeatureInjection, StoredFeatures, ValueSharing
from attnctrl.controls.stored_features import evaluation, intervals, value_sites

GOLDEN = Path(__file__).parents[1] / "golden" / "rf_solver"
PROMPTS = ("a red cat", "a blue dog")
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)


def tokens(text, height, width):
    return Tokens((Segment("text", 0, text), Segment("image", text, height * width, (height, width))))


def joint(q, k, v, **extra):
    extra = {"rows": Rows.plain(len(q)), "site": Site("blocks.0.attn", "joint"), **extra}
    return AttentionCall(q, k, v, kind="joint", query_tokens=tokens(5, 3, 3), key_tokens=tokens(5, 3, 3), **extra)


def recorded(call, solver="euler", features="qkv"):
    store = StoredFeatures(1, solver, features, inverse=False)
    store.attention(call, attend)
    return store


def test_rf_edit_is_the_authors():
    facts = json.loads((GOLDEN / "rf_edit_v_sharing_block.json").read_text())
    t = load_file(GOLDEN / "rf_edit_v_sharing_block.safetensors")
    q, k, own, source = t["q"], t["k"], t["v_target"], t["v_source"]
    assert facts["parameters"]["text_tokens"] == 5 and facts["parameters"]["image_grid"] == [3, 3]
    stored = ValueSharing(recorded(joint(q, k, source)))
    assert (stored.attention(joint(q, k, own), attend) - t["out"]).abs().max() <= 2e-6
    two = [torch.cat((x, y)) for x, y in ((q, q), (k, k), (source, own))]
    lockstep = ValueSharing(steps=(0, 1)).attention(joint(*two), attend)
    assert (lockstep[1:] - t["out"]).abs().max() <= 2e-6
    outside = ValueSharing(steps=(1, 2)).attention(joint(*two), attend)
    assert (outside[1:] - t["out_no_inject"]).abs().max() <= 2e-6


def test_evaluations_of_the_solvers_pair_inversion_and_edit_by_interval_and_order():
    def walk(total, solver, inverse):
        return [tuple(evaluation(i, total, solver, inverse=inverse)) for i in range(total)]

    assert walk(3, "euler", True) == [(2, 1), (1, 1), (0, 1)]
    assert walk(6, "midpoint", True) == [(2, 1), (2, 2), (1, 1), (1, 2), (0, 1), (0, 2)]
    assert walk(6, "midpoint", False) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert walk(4, "fireflow", False) == [(0, 1), (0, 2), (1, 2), (2, 2)]
    assert walk(4, "fireflow", True) == [(2, 1), (2, 2), (1, 2), (0, 2)]
    assert intervals(2, "midpoint") == intervals(2, "fireflow") == 1
    with pytest.raises(ValueError, match="no whole intervals"):
        intervals(5, "midpoint")
    with pytest.raises(ValueError, match="not 'heun'"):
        StoredFeatures(solver="heun")


def test_default_sites_are_the_authors():
    flux = [Site(kind="joint", place="double", block=b) for b in range(19)]
    flux += [Site(kind="joint", place="single", block=b) for b in range(38)]
    assert [site.block for site in value_sites(flux)] == list(range(20, 38))
    hunyuan = [Site(kind="joint", place="single", block=b) for b in range(40)]
    assert [site.block for site in value_sites(hunyuan)] == list(range(21, 40))


@pytest.mark.parametrize(("solver", "count"), [("euler", 2), ("midpoint", 4), ("fireflow", 2)])
def test_what_is_kept_is_what_is_read(solver, count):
    total = {"euler": 5, "midpoint": 10, "fireflow": 6}[solver]
    generator = torch.Generator().manual_seed(0)
    store = StoredFeatures(2, solver)
    at = {}
    for i in range(total):
        q, k, v = torch.randn(3, 1, 2, 14, 8, generator=generator, dtype=torch.float64)
        at[evaluation(i, total, solver, inverse=True)] = v
        assert torch.equal(store.attention(joint(q, k, v, step=Step(i, total)), attend), attend(joint(q, k, v)))
    assert len(store.evaluations) == count and store.nbytes == count * 2 * 14 * 8 * 8
    for i in range(total):
        q, k, v = torch.randn(3, 1, 2, 14, 8, generator=generator, dtype=torch.float64)
        call = joint(q, k, v, step=Step(i, total))
        now = evaluation(i, total, solver)
        read = now.interval < 2 and not (solver == "fireflow" and now.order == 1)
        value = at[now] if read else v
        assert torch.equal(ValueSharing(store).attention(call, attend), attend(call.replace(value=value)))
        assert torch.equal(ValueSharing(store).attention(call.replace(probe=True), attend), attend(call))


def test_strategies_add_and_replace_what_they_name():
    t = torch.randn(6, 1, 2, 14, 8, dtype=torch.float64)
    (qs, ks, vs), (q, k, v) = t[:3], t[3:]
    store = recorded(joint(qs, ks, vs))
    expected = {
        ("replace_v", (1, 1, 1)): (q, k, vs),
        ("add_q replace_v", (0.5, 1, 2)): (q + 0.5 * qs, k, 2 * vs),
        ("replace_q replace_k", (1, 1, 1)): (qs, ks, v),
        ("add_k add_v", (1, 0.25, 1)): (q, k + 0.25 * ks, v + vs),
    }
    for (strategy, ratio), parts in expected.items():
        ours = FeatureInjection(store, strategy=strategy, ratio=ratio).attention(joint(q, k, v), attend)
        torch.testing.assert_close(ours, attend(joint(*parts)), rtol=0, atol=1e-14)
    for wrong in ("add_x", "", "add_q replace_q"):
        with pytest.raises(ValueError, match="strategy"):
            FeatureInjection(store, strategy=wrong)
    with pytest.raises(ValueError, match="keeps others"):
        FeatureInjection(recorded(joint(qs, ks, vs), features="v"), strategy="add_q").attention(joint(q, k, v), attend)


def test_texts_of_other_lengths_are_refused_or_images_alone_are_shared():
    q, k, v = torch.randn(3, 1, 2, 14, 8, dtype=torch.float64)
    store = recorded(joint(q, k, v))
    q2, k2, v2 = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    short = joint(q2, k2, v2).replace(query_tokens=tokens(3, 3, 3), key_tokens=tokens(3, 3, 3))
    with pytest.raises(ValueError, match="text=False"):
        ValueSharing(store).attention(short, attend)
    shared = ValueSharing(store, text=False).attention(short, attend)
    assert torch.equal(shared, attend(short.replace(value=torch.cat((v2[:, :, :3], v[:, :, 5:]), dim=2))))
    with pytest.raises(ValueError, match="masked to their own lengths"):
        masked = joint(q, k, v, mask=torch.ones(1, 1, 1, 14, dtype=torch.bool))
        ValueSharing(store).attention(masked, attend)


def test_rows_read_their_own_source_and_what_is_missing_raises():
    q, k, v = torch.randn(3, 2, 2, 14, 8, dtype=torch.float64)
    store = recorded(joint(q, k, v, rows=Rows.grid(("cond",), 1, 2)))
    q4, k4, v4 = torch.randn(3, 4, 2, 14, 8, dtype=torch.float64)
    call = joint(q4, k4, v4, rows=Rows.grid(("uncond", "cond"), 1, 2))
    ours = ValueSharing(store).attention(call, attend)
    assert torch.equal(ours, attend(call.replace(value=v[[0, 1, 0, 1]])))
    three = joint(*torch.randn(3, 3, 2, 14, 8, dtype=torch.float64), rows=Rows.grid(("cond",), 1, 3))
    with pytest.raises(MissingRows, match="image 2"):
        ValueSharing(store).attention(three, attend)
    with pytest.raises(MissingRows):
        ValueSharing(steps=(0, 1)).attention(call.replace(rows=Rows(("cond",), (1,), (0,), ("",), (0,))), attend)
    with pytest.raises(ValueError, match="nothing is stored: attach"):
        ValueSharing(StoredFeatures()).attention(call, attend)
    with pytest.raises(ValueError, match="1 iterations were stored and this run makes 4"):
        ValueSharing(store).attention(call.replace(step=Step(0, 4)), attend)


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_values_of_the_same_run_change_nothing_and_those_of_another_do(family, cfg):
    text = family.name != "qwen"  # the texts of its rows and calls differ in length
    options = {"cfg": cfg, "num_inference_steps": 3}
    plain = sample(family, PROMPTS, **options)
    own = StoredFeatures(2, "euler", inverse=False)
    assert torch.equal(sample(family, PROMPTS, own, **options), plain)
    assert torch.equal(sample(family, PROMPTS, ValueSharing(own, text=text), **options), plain)
    other = StoredFeatures(2, "euler", inverse=False)
    sample(family, PROMPTS, other, seed=5, **options)
    assert (sample(family, PROMPTS, ValueSharing(other, text=text), **options) - plain).abs().max() > 1e-4


@every
def test_in_lockstep_the_source_is_plain_and_the_target_reads_it(family):
    text = family.name != "qwen"
    plain = sample(family, PROMPTS)
    shared = sample(family, PROMPTS, ValueSharing(steps=(0.0, 0.6), text=text))
    assert torch.equal(shared[0], plain[0]) and (shared[1] - plain[1]).abs().max() > 1e-4
    assert torch.equal(sample(family, PROMPTS, ValueSharing(steps=(0, 0), text=text)), plain)
    injected = sample(family, PROMPTS, FeatureInjection(steps=(0.0, 0.6), text=text))
    assert torch.equal(injected, shared)


def test_other_steps_and_models_without_rows_together_are_refused():
    flux = FAMILIES["flux"]
    store = StoredFeatures(1, "euler", inverse=False)
    sample(flux, PROMPTS, store, num_inference_steps=2)
    with pytest.raises(ValueError, match="2 iterations were stored and this run makes 3"):
        sample(flux, PROMPTS, ValueSharing(store), num_inference_steps=3)
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), ValueSharing())


def test_one_graph_serves_all_steps():
    store = StoredFeatures(3, "euler", "qv", inverse=False)
    for control in (store, FeatureInjection(store, strategy="add_q replace_v"), ValueSharing(steps=(0, 3))):
        assert_one_graph(control, steps=3)
