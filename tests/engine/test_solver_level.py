"""Solvers: an object that brings a scheduler, which steps in place of the pipeline's while the run is open."""

from __future__ import annotations

import copy
import inspect

import diffusers as d
import pytest
import torch
from tiny import FAMILIES

from attnctrl import attach


class Nothing:
    def attention(self, call, attend):
        return attend(call)


class Brings:
    """A pure solver."""

    def __init__(self, make):
        self.make, self.given = make, []

    def scheduler(self, current):
        self.given.append(current)
        return self.make(current)


def euler(current):
    return d.EulerDiscreteScheduler.from_config(current.config)


def copied(current):
    return type(current).from_config(current.config)


class Strict(d.FlowMatchEulerDiscreteScheduler):
    """Pipelines look at the signature of set_timesteps; this one takes `sigmas` and nothing they might add."""

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
        return super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu)


def state(pipe):
    """Everything of a pipeline that a solver could leave behind."""
    return pipe.scheduler, copy.deepcopy(vars(pipe.scheduler)), dict(pipe.config), set(vars(pipe)), type(pipe.scheduler)


def same(before, after):
    assert before[0] is after[0] and before[2:] == after[2:]
    assert before[1].keys() == after[1].keys()
    for name, value in before[1].items():
        assert equal(value, after[1][name])


def equal(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mochi"])
def test_a_scheduler_of_the_same_kind_gives_the_same_bits_and_is_taken_off(name):
    family = FAMILIES[name]
    pipe, solver = family.build(), Brings(copied)
    plain, before = family.run(pipe), state(pipe)
    with attach(pipe, solver) as run:
        assert solver.given == [before[0]] and pipe.scheduler is not before[0]
        assert torch.equal(family.run(pipe), plain)
        assert run.report().controls[0].levels == ("scheduler",)
    same(before, state(pipe))
    assert torch.equal(family.run(pipe), plain)


def test_another_scheduler_steps_as_if_the_pipeline_had_it_and_controls_see_its_clock():
    family = FAMILIES["sd"]
    pipe, other = family.build(), family.build()
    other.scheduler = d.HeunDiscreteScheduler.from_config(other.scheduler.config)
    steps = []

    class Watch(Nothing):
        def begin(self, call):
            steps.append((call.step.index, call.step.total))

    family.run(pipe)
    before = state(pipe)
    with attach(pipe, Brings(lambda current: d.HeunDiscreteScheduler.from_config(current.config)), Watch()):
        ours = family.run(pipe, num_inference_steps=3)
    assert torch.equal(ours, family.run(other, num_inference_steps=3))
    assert steps == [(i, 5) for i in range(5)]
    same(before, state(pipe))


def test_signatures_that_pipelines_inspect_stay_the_schedulers_own():
    family = FAMILIES["flux"]
    pipe = family.build()
    plain = family.run(pipe)
    with attach(pipe, Brings(lambda current: Strict.from_config(current.config)), Nothing()):
        assert inspect.signature(pipe.scheduler.set_timesteps) == inspect.signature(Strict().set_timesteps)
        assert isinstance(pipe.scheduler, Strict)
        assert torch.equal(family.run(pipe), plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_old_scheduler_is_back_after_an_exception(error):
    family = FAMILIES["sd"]
    pipe = family.build()
    plain, before = family.run(pipe), state(pipe)

    def fail(*args):
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"), attach(pipe, Brings(euler)):
        family.run(pipe, callback_on_step_end=fail)
    same(before, state(pipe))
    assert torch.equal(family.run(pipe), plain)


def test_the_old_scheduler_is_back_where_attaching_fails():
    pipe = FAMILIES["sd"].build()
    before = state(pipe)
    with pytest.raises(TypeError, match=r"Brings\.scheduler returned a str, which has no set_timesteps and no step"):
        attach(pipe, Brings(lambda current: "euler"))
    with pytest.raises(ValueError, match="no site"):
        bad = Nothing()
        bad.sites = "block 99"
        attach(pipe, Brings(euler), bad)
    same(before, state(pipe))


def test_runs_that_come_and_go_beside_a_solver():
    family = FAMILIES["sd"]
    pipe = family.build()
    plain, before = family.run(pipe), state(pipe)
    outer = attach(pipe, Nothing())
    solver = attach(pipe, Brings(euler))
    with_euler = family.run(pipe)
    assert not torch.equal(with_euler, plain)
    with pytest.raises(ValueError, match="Brings and Brings both bring a scheduler"):
        attach(pipe, Brings(copied))
    assert torch.equal(family.run(pipe), with_euler)
    solver.close()
    assert torch.equal(family.run(pipe), plain)
    outer.close()
    same(before, state(pipe))


def test_a_scheduler_that_the_user_sets_meanwhile_stays():
    pipe = FAMILIES["sd"].build()
    own = d.DDIMScheduler.from_config(pipe.scheduler.config)
    with attach(pipe, Brings(euler)):
        pipe.scheduler = own
    assert pipe.scheduler is own


def test_two_solvers_and_a_denoiser_alone_are_refused():
    pipe = FAMILIES["flux"].build()
    with pytest.raises(ValueError, match="both bring a scheduler; a pipeline steps by one"):
        attach(pipe, Brings(copied), Brings(copied))
    with pytest.raises(ValueError, match="FluxTransformer2DModel has none to take the place of"):
        attach(pipe.transformer, Brings(copied), Nothing())
