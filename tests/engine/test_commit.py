"""Latents that a control commits, and rows that it adds or leaves out."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, VARIANTS

from attnctrl import DenoiseCall, Rows, attach
from attnctrl.call import Prediction, RowInputs

NAMES = [name for name in (*FAMILIES, *VARIANTS) if name != "mochi"]


def family_of(name):
    return FAMILIES.get(name) or VARIANTS[name]


class Denoises:
    """A control whose `denoise` is the function given."""

    def __init__(self, function):
        self.denoise = function


class Sees:
    """What scheduler.step is given, and what every denoiser call is."""

    def __init__(self):
        self.samples, self.calls = [], []

    def step(self, call, step):
        self.samples.append(call.sample)
        return step(call)

    def denoise(self, call, denoise):
        self.calls.append(call)
        return denoise(call)


def shifted(x):
    return x * 0.9 + 0.1


# ------------------------------------------------------------------------------------------------------- commits


@pytest.mark.parametrize("name", NAMES)
def test_committed_latents_are_those_of_later_calls_and_of_the_scheduler(name):
    """As if the pipeline had had them: committing in the first call equals starting from these latents."""
    family, sees = family_of(name), Sees()
    pipe = family.build()

    def commit(call, denoise):
        if call.step.index == 0 and call.step.call == 0:
            latents = shifted(call.latents)
            return denoise(call.replace(latents=latents)).replace(latents=latents)
        return denoise(call)

    first = Sees()
    with attach(pipe, first):
        plain = family.run(pipe, cfg=True)
    with attach(pipe, Denoises(commit), sees):
        ours = family.run(pipe, cfg=True)
    start = first.calls[0].latents
    assert torch.equal(sees.samples[0], shifted(start))
    assert torch.equal(sees.calls[0].latents, shifted(start))
    if family.two_call:
        assert sees.calls[1].step.call == 1
        assert torch.equal(sees.calls[1].latents, shifted(start))
        fed = sees.calls[1].inputs["hidden_states"]
        assert torch.equal(fed, shifted(first.calls[1].inputs["hidden_states"]))
    assert not torch.equal(ours, plain)
    if family.strength == 1.0:
        noise = start if "sd" not in name or name.startswith("sd3") else start / pipe.scheduler.init_noise_sigma
        given = {"latents": shifted(start) if noise is start else shifted(start) / pipe.scheduler.init_noise_sigma}
        torch.testing.assert_close(family.run(pipe, cfg=True, **given), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_latents_committed_as_they_came_change_nothing(name):
    family = FAMILIES[name]
    pipe = family.build()
    plain = family.run(pipe)
    with attach(pipe, Denoises(lambda call, denoise: denoise(call).replace(latents=call.latents))):
        assert torch.equal(family.run(pipe), plain)
    with attach(pipe, Denoises(lambda call, denoise: denoise(call).replace(latents=call.latents.clone()))):
        assert torch.equal(family.run(pipe), plain)


def test_only_what_the_outermost_returns_commits():
    family, sees = FAMILIES["sd"], Sees()
    pipe = family.build()
    commits = Denoises(lambda call, denoise: denoise(call).replace(latents=shifted(call.latents)))
    forgets = Denoises(lambda call, denoise: Prediction(denoise(call).value))
    looks = Denoises(lambda call, denoise: denoise(call.replace(latents=shifted(call.latents))) and denoise(call))
    plain = family.run(pipe)
    with attach(pipe, forgets, commits):
        assert torch.equal(family.run(pipe), plain)
    with attach(pipe, looks):  # evaluating elsewhere commits nothing
        assert torch.equal(family.run(pipe), plain)
    with attach(pipe, commits, forgets, sees):
        family.run(pipe)
    assert all(
        torch.equal(sample, shifted(call.latents)) for sample, call in zip(sees.samples, sees.calls, strict=True)
    )


def test_latents_of_another_shape_or_without_a_scheduler_cannot_be_committed():
    family = FAMILIES["sd"]
    pipe = family.build()
    cut = Denoises(lambda call, denoise: denoise(call).replace(latents=call.latents[:1]))
    with attach(pipe, cut), pytest.raises(ValueError, match=r"shape \(1, 4, 8, 8\) in place of \(2, 4, 8, 8\)"):
        family.run(pipe)
    same = Denoises(lambda call, denoise: denoise(call).replace(latents=call.latents))
    with attach(pipe.unet, same) as run, pytest.raises(RuntimeError, match="a bare denoiser has no scheduler"):
        run.at(0, 1)
        pipe.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 3, 16))


# ---------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", NAMES)
def test_a_denoiser_asked_row_by_row_answers_as_at_once(name):
    family = family_of(name)
    pipe = family.build()

    def one_by_one(call, denoise):
        parts = [denoise(call.take([row])).value for row in range(len(call.rows))]
        return Prediction(torch.cat(parts))

    plain = family.run(pipe)
    with attach(pipe, Denoises(one_by_one)):
        torch.testing.assert_close(family.run(pipe), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_added_rows_are_copies_with_a_tag_and_reach_every_control(name):
    family, told, seen = family_of(name), [], []
    pipe = family.build()

    class Inner:
        def begin(self, call):
            told.append(call.rows)

        def attention(self, call, attend):
            seen.append(call.rows)
            out = attend(call)
            return torch.where(_batch(call, call.rows.where(variant="mine")), out * 0, out)

    def add(call, denoise):
        cond = [i for i, branch in enumerate(call.rows.branch) if branch == "cond"]
        wide = call.add_rows(cond, "mine")
        out = denoise(wide)
        assert len(out.value) == len(call.rows) + len(cond)
        own = out.take(range(len(call.rows)))
        if cond:
            assert not torch.allclose(out.value[cond], out.value[len(call.rows) :])  # Inner acts on the copies only
        return own

    plain = family.run(pipe)
    with attach(pipe, Denoises(add), Inner()):
        torch.testing.assert_close(family.run(pipe), plain, rtol=1e-4, atol=1e-4)
    wide = next(rows for rows in seen if "mine" in rows.variant)
    count = wide.variant.count("mine")
    assert wide.origin[-count:] == tuple(
        wide.origin[i] for i, branch in enumerate(wide.branch[:-count]) if branch == "cond"
    )
    assert any(rows.variant == wide.variant for rows in told)  # what begin prepares fits the rows that run


def _batch(call, rows):
    mask = torch.zeros(call.query.shape[0], dtype=torch.bool)
    mask[rows] = True
    return mask[:, None, None, None]


def test_a_prediction_of_other_rows_is_refused():
    family = FAMILIES["sd"]
    pipe = family.build()
    more = Denoises(lambda call, denoise: denoise(call.add_rows([0], "mine")))
    with attach(pipe, more), pytest.raises(ValueError, match="a prediction of 5 rows for the 4 of the unet"):
        family.run(pipe)
    assert torch.equal(family.run(pipe), family.run(family.build()))


def test_added_rows_follow_new_latents():
    """Rows that are added are fed the latents of their image, new ones too."""
    family, fed = FAMILIES["flux"], []
    pipe = family.build()
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["hidden_states"]), with_kwargs=True
    )

    def add(call, denoise):
        out = denoise(call.replace(latents=shifted(call.latents)).add_rows([1], "mine"))
        assert torch.equal(fed[-1], shifted(call.latents)[[0, 1, 1]])
        return out.take([0, 1])

    with attach(pipe, Denoises(add)):
        family.run(pipe, cfg=False)
    assert len(fed) == family.steps


def call(rows, **inputs):
    return DenoiseCall(torch.zeros(1, 2), inputs, Rows.grid(("uncond", "cond"), 1, 1), None, along=rows)


def test_inputs_lie_along_the_rows_as_the_family_says():
    known = RowInputs(frozenset({"ids"}), frozenset({"shapes"}))
    x = torch.arange(4).reshape(2, 2)
    inputs = {
        "x": x, "one": x[:1], "scalar": torch.tensor(3), "ids": x, "shapes": [["a"], ["b"]], "flag": True,
        "nested": {"y": x, "ids": x}, "several": [x, (x, None)],
    }  # fmt: skip
    given = call(known, **inputs)
    taken = given.take([1]).inputs
    assert torch.equal(taken["x"], x[1:]) and torch.equal(taken["nested"]["y"], x[1:])
    assert taken["one"] is inputs["one"] and taken["scalar"] is inputs["scalar"] and taken["flag"] is True
    assert taken["ids"] is x and taken["nested"]["ids"] is x and taken["shapes"] == [["b"]]
    assert torch.equal(taken["several"][0], x[1:]) and torch.equal(taken["several"][1][0], x[1:])
    added = given.add_rows([1], "mine")
    assert torch.equal(added.inputs["x"], x[[0, 1, 1]]) and added.inputs["shapes"] == [["a"], ["b"], ["b"]]
    assert added.rows.table() == [("uncond", 0, 0, ""), ("cond", 0, 0, ""), ("cond", 0, 0, "mine")]
    with pytest.raises(ValueError, match=r"\('cond', 0, 0, 'mine'\) already; choose another tag"):
        added.add_rows([1], "mine")


def test_inputs_that_may_not_lie_along_the_rows_are_not_guessed():
    with pytest.raises(ValueError, match="'x' has 3 entries where the denoiser has 2 rows"):
        call(RowInputs(), x=torch.zeros(3)).take([0])
    unknown = RowInputs(sure=False)
    with pytest.raises(ValueError, match="'pos_ids' has 2 entries, as many as there are rows"):
        call(unknown, pos_ids=torch.zeros(2, 3)).take([0])
    x = torch.zeros(3)
    assert call(unknown, x=x, pos_ids=x).take([0]).inputs == {"x": x, "pos_ids": x}


def test_predictions_are_taken_and_put_by_row():
    whole = Prediction(torch.arange(4.0)[:, None])
    part = whole.take([1, 3])
    assert part.value.tolist() == [[1.0], [3.0]]
    changed = whole.put([1, 3], -part.value)
    assert changed.value.tolist() == [[0.0], [-1.0], [2.0], [-3.0]] and whole.value[1] == 1
