"""Runs in the company of others: who replaces, keeps, copies or shares what is hooked, and loops written by hand."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import diffusers as d
import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES

from attnctrl import attach

SD = FAMILIES["sd"]
OPERATIONS = len(SD.sites)  # of a step: both branches in one call


class Watch:
    """Changes nothing; counts operations, keeps denoiser calls and steps."""

    def __init__(self) -> None:
        self.operations = 0
        self.calls: list[Any] = []
        self.steps: list[Any] = []

    def attention(self, call, attend):
        self.operations += 1
        return attend(call)

    def denoise(self, call, denoise):
        self.calls.append(call)
        return denoise(call)

    def step(self, call, step):
        self.steps.append(call)
        return step(call)


class Halved:
    """Acts, so that a run with it shows."""

    def attention(self, call, attend):
        return attend(call) * 0.5


@pytest.fixture
def pipe() -> Any:
    return SD.build()


@pytest.fixture
def op():
    original = F.scaled_dot_product_attention
    yield original
    F.scaled_dot_product_attention = original


# -- what others put in place of the operation


def test_a_wrapper_that_others_put_around_the_operation_stays_and_works(pipe, op):
    expected = SD.run(pipe)
    run = attach(pipe, Watch())
    inner, seen = F.scaled_dot_product_attention, []

    def wrapper(*args, **kwargs):
        seen.append(1)
        return inner(*args, **kwargs)

    F.scaled_dot_product_attention = wrapper
    assert torch.equal(SD.run(pipe), expected)
    run.close()
    assert F.scaled_dot_product_attention is wrapper
    assert torch.equal(SD.run(pipe), expected)
    assert len(seen) == 2 * SD.steps * OPERATIONS

    with attach(pipe, watch := Watch()):  # ours around theirs around ours
        assert torch.equal(SD.run(pipe), expected)
    assert watch.operations == SD.steps * OPERATIONS
    assert F.scaled_dot_product_attention is wrapper

    F.scaled_dot_product_attention = inner  # they put back what they found, which is ours
    with attach(pipe, watch := Watch()):
        assert torch.equal(SD.run(pipe), expected)
    assert watch.operations == SD.steps * OPERATIONS
    assert F.scaled_dot_product_attention is op


@pytest.mark.filterwarnings("ignore:Watch was attached but never called")
def test_an_operation_put_back_behind_our_back_is_an_error_not_silence(pipe, op):
    with attach(pipe, Watch()):
        F.scaled_dot_product_attention = op
        with pytest.raises(RuntimeError, match="no attention operation was seen"):
            SD.run(pipe)


# -- methods and objects that outlive a run


def test_a_method_of_the_scheduler_kept_by_somebody_works_after_closing(pipe):
    with attach(pipe, Watch()):
        step, encode = pipe.scheduler.step, pipe.encode_prompt
        SD.run(pipe)
    pipe.scheduler.set_timesteps(2)
    x, t = torch.ones(1, 4, 8, 8), pipe.scheduler.timesteps[0]
    assert torch.equal(step(x, t, x).prev_sample, pipe.scheduler.step(x, t, x).prev_sample)
    assert encode.__wrapped__.__self__ is pipe


def test_a_copy_of_the_scheduler_steps_by_itself(pipe):
    class Copies(Watch):
        def denoise(self, call, denoise):
            self.copy = copy.deepcopy(pipe.scheduler)
            x = torch.ones(1, 4, 8, 8)
            self.copy.step(x, self.copy.timesteps[0], x)
            return super().denoise(call, denoise)

    expected = SD.run(pipe)
    with attach(pipe, control := Copies()):
        assert torch.equal(SD.run(pipe), expected)
    assert [call.step.index for call in control.steps] == list(range(SD.steps))
    assert type(control.copy) is type(pipe.scheduler)


@pytest.mark.parametrize("before", [True, False])
def test_a_step_function_that_others_set_on_the_scheduler_is_the_one_that_runs(pipe, before):
    expected, scheduler, seen = SD.run(pipe), pipe.scheduler, []
    original = scheduler.step

    def own(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    if before:
        scheduler.step = own
    with attach(pipe, watch := Watch()):
        if not before:
            scheduler.step = own
        assert torch.equal(SD.run(pipe), expected)
    assert len(seen) == len(watch.steps) == SD.steps
    assert vars(scheduler)["step"] is own
    del scheduler.step
    assert torch.equal(SD.run(pipe), expected)


# -- closing and counting


@pytest.mark.parametrize("elsewhere", [False, True], ids=["callback", "another thread"])
def test_a_run_closed_in_the_middle_of_a_pipeline_call_lets_go_at_once(pipe, elsewhere):
    expected = SD.run(pipe)
    run = attach(pipe, watch := Watch())

    def close(pipe, index, timestep, kept):
        if elsewhere:
            thread = threading.Thread(target=run.close)
            thread.start()
            thread.join()
        else:
            run.close()
        return kept

    assert torch.equal(SD.run(pipe, callback_on_step_end=close), expected)
    assert len(watch.calls) == 1 and watch.operations == OPERATIONS
    assert torch.equal(SD.run(pipe), expected)


def test_a_report_counts_from_where_its_run_came(pipe):
    with attach(pipe, Watch()) as first:
        SD.run(pipe)
        with pytest.warns(UserWarning, match="Watch was attached but never called"), attach(pipe, Watch()) as second:
            pass
        with attach(pipe, Watch()) as third:
            SD.run(pipe)
    for run, times in ((first, 2), (second, 0), (third, 1)):
        report = run.report()
        assert report.denoiser_calls == {"unet": times * SD.steps}
        assert {site.calls for site in report.sites} == {times * SD.steps}
        assert {sum(site.kernels.values()) for site in report.sites} == {times * SD.steps}


# -- components that change while attached


def test_a_denoiser_put_in_place_while_attached_is_controlled_from_the_next_call_on(pipe):
    other = SD.build(seed=1)
    plain, controlled = [], []
    for model in (pipe.unet, other.unet):
        pipe.unet = model
        plain.append(SD.run(pipe))
        with attach(pipe, Halved()):
            controlled.append(SD.run(pipe))
    new = pipe.unet = SD.build().unet
    fresh = [type(module) for module in new.modules()]
    with attach(pipe, Halved()):
        assert torch.equal(SD.run(pipe), controlled[0])
        pipe.unet = other.unet
        assert torch.equal(SD.run(pipe), controlled[1])
        assert [type(module) for module in new.modules()] == fresh
        assert not any("_attnctrl" in vars(module) for module in new.modules())
    assert torch.equal(SD.run(pipe), plain[1])


def test_the_clock_follows_a_scheduler_put_in_place_while_attached(pipe):
    old = pipe.scheduler
    with attach(pipe, watch := Watch()):
        SD.run(pipe)
        pipe.scheduler = d.HeunDiscreteScheduler.from_config(old.config)
        SD.run(pipe, num_inference_steps=3)
        assert "_attnctrl" not in vars(old) and "_attnctrl_base" not in vars(type(old))
    assert [(call.step.index, call.step.total) for call in watch.steps] == [(0, 2), (1, 2), *((i, 5) for i in range(5))]
    assert "_attnctrl" not in vars(pipe.scheduler)


# -- pipelines that share parts


@pytest.mark.filterwarnings("ignore:the unet is shared")
@pytest.mark.parametrize("first", [0, 1])
def test_pipelines_that_share_denoiser_and_scheduler_keep_their_own_clock_and_rows(pipe, first):
    other = d.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    assert other.scheduler is pipe.scheduler and other.unet is pipe.unet

    def text():
        return SD.run(pipe)

    def picture():
        inputs = SD.inputs(other, ("a",))
        inputs = {name: value for name, value in inputs.items() if name not in ("height", "width")}
        inputs |= {"num_inference_steps": 8, "strength": 0.5, "image": torch.ones(1, 3, 64, 64) / 2}
        return other(**inputs, generator=torch.Generator().manual_seed(0), return_dict=False)[0]

    expected = text(), picture()
    watches = Watch(), Watch()
    runs = [attach(target, watch) for target, watch in zip((pipe, other), watches, strict=True)]
    assert torch.equal(text(), expected[0]) and torch.equal(picture(), expected[1])
    for watch in watches:
        assert [(len(call.latents), call.step.total) for call in watch.calls] == [(2, 2)] * 2 + [(1, 4)] * 4
        assert [call.step.index for call in watch.steps] == [0, 1, 0, 1, 2, 3]
    runs[first].close()
    assert torch.equal(text(), expected[0]) and torch.equal(picture(), expected[1])
    runs[1 - first].close()
    assert torch.equal(text(), expected[0]) and torch.equal(picture(), expected[1])
    assert "_attnctrl" not in vars(pipe.scheduler)


# -- loops written by hand


@torch.no_grad()
def loop(pipe: Any, prompts: list[str], steps: int) -> None:
    embeds, negative = pipe.encode_prompt(prompts, "cpu", 1, True)
    pipe.scheduler.set_timesteps(steps)
    x = torch.zeros(len(prompts), 4, 8, 8)
    for t in pipe.scheduler.timesteps:
        given = pipe.scheduler.scale_model_input(torch.cat((x, x)), t)
        _, cond = pipe.unet(given, t, encoder_hidden_states=torch.cat((negative, embeds)))[0].chunk(2)
        x = pipe.scheduler.step(cond, t, x).prev_sample


def test_loops_written_by_hand_have_the_clock_the_texts_and_the_rows_of_a_pipeline_call():
    class Texts(Watch):
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[Any] = []

        def begin_run(self, run):
            self.texts.append(run.prompts)

    pipe = SD.build(with_text=True)
    with attach(pipe, watch := Texts()):
        loop(pipe, ["a red cat", "a dog"], 2)
        loop(pipe, ["a cat"], 3)
        SD.run(pipe, prompts=("a", "b", "an owl"), text=True)
        loop(pipe, ["a dog"], 2)
    assert watch.texts == [["a red cat", "a dog"], ["a cat"], ["a", "b", "an owl"], ["a dog"]]
    counts = [(call.step.index, call.step.total, len(call.latents)) for call in watch.calls]
    assert counts == [(0, 2, 2), (1, 2, 2), (0, 3, 1), (1, 3, 1), (2, 3, 1), (0, 2, 3), (1, 2, 3), (0, 2, 1), (1, 2, 1)]
    assert all(call.rows.branch == ("uncond",) * n + ("cond",) * n for call in watch.calls for n in [len(call.latents)])


@torch.no_grad()
def test_a_loop_that_encodes_nothing_does_not_take_the_prompts_of_the_last_call(pipe):
    with attach(pipe, watch := Watch()) as run:
        SD.run(pipe, cfg=False)
        pipe.scheduler.set_timesteps(1)
        x, t = torch.zeros(5, 4, 8, 8), pipe.scheduler.timesteps[0]
        pipe.unet(x, t, encoder_hidden_states=torch.zeros(5, 8, 16))
        assert run.prompts is None
    assert watch.calls[-1].rows.prompt == (0, 1, 2, 3, 4)
    assert watch.calls[-1].step.index == 0 and watch.calls[-1].step.total == 1


def test_warnings_that_are_errors_leave_nothing_behind(pipe):
    expected = SD.run(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="never called"), attach(pipe, Halved()):
            pass
    assert torch.equal(SD.run(pipe), expected)
    assert "_attnctrl" not in vars(pipe) and "_attnctrl" not in vars(pipe.unet)
