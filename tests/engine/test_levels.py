"""Noise levels of every scheduler: with a network that is never wrong, steps go from `now` to `next` exactly."""

from __future__ import annotations

import dataclasses
import itertools
import math

import diffusers as d
import pytest
import torch
from tiny import FAMILIES, VARIANTS

from attnctrl import Step, StepCall, attach
from attnctrl.call import Level, Levels, Rows
from attnctrl.levels import Reading, levels, predicts

STEPS = 5
X0, NOISE = torch.randn(2, 1, 4, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
VP = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
V = {"prediction_type": "v_prediction"}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}

EXACT = {
    "ddim": d.DDIMScheduler(**VP, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
    "ddim v trailing": d.DDIMScheduler(
        **VP, **V, clip_sample=False, timestep_spacing="trailing", rescale_betas_zero_snr=True
    ),
    "ddim x0": d.DDIMScheduler(**VP, clip_sample=False, prediction_type="sample"),
    "ddim inverse": d.DDIMInverseScheduler(**VP, clip_sample=False),
    "pndm": d.PNDMScheduler(**VP, skip_prk_steps=True, steps_offset=1),
    "euler": d.EulerDiscreteScheduler(**VP),
    "euler v": d.EulerDiscreteScheduler(**VP, prediction_type="v_prediction", use_karras_sigmas=True),
    "heun": d.HeunDiscreteScheduler(**VP),
    "dpm++": d.DPMSolverMultistepScheduler(**VP, use_karras_sigmas=True),
    "dpm++ v": d.DPMSolverMultistepScheduler(**VP, prediction_type="v_prediction"),
    "dpm flow": d.DPMSolverMultistepScheduler(**VP, **FLOW, flow_shift=3.0),
    "dpm single": d.DPMSolverSinglestepScheduler(**VP, solver_order=2, lower_order_final=True),
    "deis": d.DEISMultistepScheduler(**VP),
    "unipc": d.UniPCMultistepScheduler(**VP),
    "unipc flow": d.UniPCMultistepScheduler(**VP, **FLOW, flow_shift=3.0),
    "flow euler": d.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow heun": d.FlowMatchHeunDiscreteScheduler(),
}  # fmt: skip
NOISY = {
    "ddpm": d.DDPMScheduler(**VP, clip_sample=False, prediction_type="v_prediction"),
    "euler ancestral": d.EulerAncestralDiscreteScheduler(**VP),
    "lcm": d.LCMScheduler(**VP, clip_sample=False),
    "tcd": d.TCDScheduler(**VP, clip_sample=False),
    "sde": d.DPMSolverMultistepScheduler(**VP, algorithm_type="sde-dpmsolver++"),
}


def at(level):
    return level.alpha * X0 + level.sigma * NOISE


def perfect(level, kind):
    norm = math.hypot(level.alpha, level.sigma)
    return {
        "noise": NOISE, "x0": X0, "flow": NOISE - X0, "velocity": (level.alpha * NOISE - level.sigma * X0) / norm,
    }[kind]  # fmt: skip


def call(sample, prediction, level, kind):
    rows = Rows.plain(1)
    return StepCall(prediction, sample, rows, Step(levels=Levels(level, level, kind)))


@pytest.mark.parametrize("name", EXACT)
def test_steps_go_from_level_to_level(name):
    scheduler, kind = EXACT[name], predicts(EXACT[name])
    scheduler.set_timesteps(STEPS)
    x = None
    for i, t in enumerate(scheduler.timesteps):
        now, after = levels(scheduler, i, float(t))
        x = at(now) if x is None else x
        torch.testing.assert_close(x, at(now), rtol=0, atol=2e-3)
        if now.alpha > 1e-3 or kind != "noise":
            torch.testing.assert_close(call(at(now), perfect(now, kind), now, kind).x0(), X0)
        x = scheduler.step(perfect(now, kind), t, x).prev_sample
        torch.testing.assert_close(x, at(after), rtol=0, atol=2e-3)
        x = at(after)
    assert i + 1 == len(scheduler.timesteps)


@pytest.mark.parametrize("name", NOISY)
def test_levels_are_those_of_the_schedulers_own_noising(name):
    scheduler, kind = NOISY[name], predicts(NOISY[name])
    scheduler.set_timesteps(STEPS)
    for i, t in enumerate(scheduler.timesteps):
        now, after = levels(scheduler, i, float(t))
        noised = scheduler.add_noise(X0, NOISE, t[None])
        torch.testing.assert_close(at(now), noised, rtol=0, atol=1e-4)
        if name != "lcm":  # which knows x0 by boundary conditions of its own
            torch.manual_seed(0)
            out = scheduler.step(perfect(now, kind), t, at(now))
            if getattr(out, "pred_original_sample", None) is not None:
                torch.testing.assert_close(out.pred_original_sample, X0, rtol=0, atol=1e-4)
        assert after.sigma < now.sigma
        if i + 1 < len(scheduler.timesteps):
            assert after == levels(scheduler, i + 1, None)[0]
    assert after.sigma < 0.05


def test_a_timestep_that_is_known_finds_its_place():
    scheduler = d.EulerDiscreteScheduler(**VP)
    scheduler.set_timesteps(STEPS)
    right = levels(scheduler, 3)
    assert levels(scheduler, 0, float(scheduler.timesteps[3])) == right
    assert levels(scheduler, 3, 12345.0) == right  # the schedule has no such timestep
    assert right[0].timestep == float(scheduler.timesteps[3]) and right[1].timestep == float(scheduler.timesteps[4])


def test_unknown_tables_and_outputs_are_refused():
    scheduler = d.KDPM2DiscreteScheduler(**VP)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(ValueError, match="the noise levels of KDPM2DiscreteScheduler are not known"):
        levels(scheduler, 0)
    inverted = d.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    inverted.set_timesteps(STEPS)
    with pytest.raises(ValueError, match="invert_sigmas runs its levels the other way round"):
        levels(inverted, 0)
    with pytest.raises(ValueError, match=r"EDMEulerScheduler with prediction_type 'epsilon' takes .* for none of"):
        predicts(d.EDMEulerScheduler())
    with pytest.raises(ValueError, match="iteration 9 of a schedule of 9"):
        levels(scheduler, 9)


# -------------------------------------------------------------------------------------------------------- pipelines


class Watch:
    def __init__(self):
        self.steps, self.calls = [], []

    def begin(self, call):
        self.steps.append(call.step)

    def step(self, call, step):
        self.calls.append(call)
        return step(call)


@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *VARIANTS) if name != "mochi"])
def test_a_pipelines_steps_know_their_levels(name):
    family, watch = FAMILIES.get(name) or VARIANTS[name], Watch()
    pipe = family.build()
    with attach(pipe, watch):
        family.run(pipe, cfg=True)
    run = watch.steps[-1].total
    assert watch.steps[0].skipped == family.steps - run == round(family.steps * (1 - family.strength))
    seen = [step for step in watch.steps if step.call == 0]
    assert len(seen) == len(watch.calls) == run
    for step, call in zip(seen, watch.calls, strict=True):
        assert (step.now, step.next, step.predicts) == levels_of(pipe, step.skipped + step.index)
        assert call.step.now == step.now
        assert call.x0().shape == call.sample.shape and call.x0().isfinite().all()
    for step, later in itertools.pairwise(seen):
        assert step.next == later.now


def levels_of(pipe, index):
    return (*levels(pipe.scheduler, index), predicts(pipe.scheduler))


def test_nothing_is_read_before_it_is_asked_for():
    class Silent:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    step = dataclasses.replace(Step(levels=Reading(Silent(), 0, None)), index=3)
    assert step == Step(3) and "Reading" not in repr(step)
    with pytest.raises(AssertionError, match="was read"):
        step.now  # noqa: B018


def test_a_loop_by_hand_gives_its_levels():
    pipe, watch = FAMILIES["sd"].build(), Watch()
    given = Levels(Level(9, 0.6, 0.8), Level(5, 0.8, 0.6), "velocity")
    with attach(pipe.unet, watch) as run:
        for i, known in enumerate((given, None)):
            run.at(i, 2, known)
            pipe.unet(torch.zeros(1, 4, 8, 8), 9, torch.zeros(1, 3, 16))
    assert watch.steps[0].now == given.now and watch.steps[0].predicts == "velocity"
    with pytest.raises(ValueError, match="knows no noise levels"):
        watch.steps[1].next  # noqa: B018


def test_predictions_at_pure_noise_and_with_a_variance():
    level = Level(999, 0.0, 1.0)
    with pytest.raises(ValueError, match="a noise prediction says nothing of x0"):
        call(at(level), NOISE, level, "noise").x0()
    level = Level(10, 0.8, 0.6)
    wide = torch.cat((NOISE, NOISE * 7), 1)
    torch.testing.assert_close(call(at(level), wide, level, "noise").x0(), X0)
