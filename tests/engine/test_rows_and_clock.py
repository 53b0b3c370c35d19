"""Rows, clock, latents and token layouts of real runs, against what the pipelines' own loops do."""

from functools import cache

import diffusers as d
import pytest
import torch
from tiny import FAMILIES, VARIANTS

from attnctrl import Prediction, Rows, attach

ALL = {name: family for name, family in {**FAMILIES, **VARIANTS}.items() if not family.rowwise}
every = pytest.mark.parametrize("name", ALL)
guided = pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])


@cache
def pipe_of(name, text=False):
    return ALL[name].build(with_text=text)


class Watch:
    """Keeps every call of every level."""

    def __init__(self):
        self.attentions, self.denoises, self.steps = [], [], []

    def attention(self, call, rest):
        self.attentions.append(call)
        return rest(call)

    def denoise(self, call, rest):
        self.denoises.append(call)
        return rest(call)

    def step(self, call, rest):
        self.steps.append(call)
        return rest(call)


def watch(pipe, run):
    watched = Watch()
    with attach(pipe, watched):
        run(pipe)
    return watched


@cache
def watched(name, cfg=True, odd=False, prompts=("a", "b"), images=1, text=False):
    family = ALL[name]
    height, width = family.odd_size if odd else family.size
    return watch(
        pipe_of(name, text),
        lambda pipe: family.run(pipe, prompts=prompts, cfg=cfg, images=images, height=height, width=width, text=text),
    )


def branches(family, cfg):
    return family.calls if cfg else (("cond",),)


# -- rows


@every
@guided
def test_each_call_has_the_branches_of_the_pipeline_in_order(name, cfg):
    family, seen = ALL[name], watched(name, cfg)
    expected = [Rows.grid(b, 2, 1) for b in branches(family, cfg)] * len(seen.steps)
    assert [call.rows for call in seen.denoises] == expected
    assert {len(call.latents) for call in seen.denoises} == {2}
    for call in seen.attentions:
        assert call.rows == expected[call.step.call] and call.query.shape[0] == len(call.rows)


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.text])
@guided
def test_images_of_a_prompt_stand_next_to_each_other(name, cfg):
    seen = watched(name, cfg, images=2, text=True)
    expected = [Rows.grid(b, 2, 2) for b in branches(FAMILIES[name], cfg)] * len(seen.steps)
    assert [call.rows for call in seen.denoises] == expected
    assert all(call.rows.table() == [("cond", p, i, "") for p in (0, 1) for i in (0, 1)] for call in seen.steps)


# -- the clock


def check_clock(seen, calls, steps):
    assert [(s.step.index, s.step.total) for s in seen.steps] == [(i, steps) for i in range(steps)]
    assert [(c.step.index, c.step.total, c.step.call) for c in seen.denoises] == [
        (i, steps, call) for i in range(steps) for call in range(calls)
    ]


@every
@guided
def test_index_total_and_call_follow_the_loop(name, cfg):
    family = ALL[name]
    check_clock(watched(name, cfg), len(branches(family, cfg)), int(family.steps * family.strength))


@pytest.mark.parametrize(
    "scheduler", [d.DDIMScheduler, d.PNDMScheduler, d.HeunDiscreteScheduler, d.EulerDiscreteScheduler]
)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_the_clock_counts_the_iterations_of_every_scheduler(scheduler, strength):
    name = "sd" if strength == 1 else "sd_img2img"
    family, pipe = ALL[name], ALL[name].build()
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    times = []

    def seen_by_the_pipeline(pipe, index, timestep, kwargs):
        times.append((index, float(timestep)))
        return {}

    seen = watch(pipe, lambda pipe: family.run(
        pipe, num_inference_steps=6, callback_on_step_end=seen_by_the_pipeline,
        callback_on_step_end_tensor_inputs=["latents"],
    ))  # fmt: skip
    check_clock(seen, 1, len(times))
    assert [(call.step.index, call.step.timestep) for call in seen.denoises] == times


def test_a_second_run_starts_anew():
    watched, pipe = Watch(), pipe_of("sd")
    with attach(pipe, watched):
        FAMILIES["sd"].run(pipe)
        FAMILIES["sd"].run(pipe, cfg=False)
    assert [(c.step.index, len(c.rows)) for c in watched.denoises] == [(0, 4), (1, 4), (0, 2), (1, 2)]


def test_wans_experts_share_one_clock():
    family, seen = VARIANTS["wan22"], Watch()
    pipe = pipe_of("wan22")
    with attach(pipe, seen):
        family.run(pipe, num_inference_steps=6)
    names = [call.denoiser for call in seen.denoises]
    assert set(names) == {"transformer", "transformer_2"} and names == sorted(names)
    check_clock(seen, 2, 6)
    assert {(c.site.denoiser, c.step.index, c.step.call) for c in seen.attentions} == {
        (c.denoiser, c.step.index, c.step.call) for c in seen.denoises
    }


# -- latents


@every
def test_denoise_gives_the_latents_the_scheduler_gets(name):
    seen = watched(name)
    for step in seen.steps:
        for call in seen.denoises:
            if call.step.index == step.step.index:
                assert torch.equal(call.latents, step.sample.to(call.latents.dtype))


class NewLatents:
    """Runs the denoiser on other latents in one iteration, and keeps what it was given and returned."""

    def __init__(self, by_hand):
        self.by_hand, self.compared = by_hand, 0

    def denoise(self, call, rest):
        out = rest(call)
        z = torch.randn(call.latents.shape, generator=torch.Generator().manual_seed(9))
        found = rest(call.replace(latents=z))
        inside = self.by_hand(call, z.to(call.latents.dtype))
        assert found.value.shape == inside.shape and torch.equal(found.value, inside)
        assert not torch.equal(found.value, out.value)
        self.compared += 1
        return out


@every
@guided
def test_new_latents_are_fed_as_the_pipeline_feeds_its_own(name, cfg):
    family, pipe = ALL[name], pipe_of(name)

    def by_hand(call, z):
        key = "sample" if "sample" in call.inputs else "hidden_states"
        fed = pipe.scheduler.scale_model_input(z, call.inputs["timestep"]) if name == "sdxl" else z
        inputs = {**call.inputs, key: torch.cat([fed] * len(set(call.rows.branch)))}
        return getattr(pipe, call.denoiser).forward(**inputs)[0]

    control, plain = NewLatents(by_hand), family.run(pipe, cfg=cfg)
    with attach(pipe, control):
        assert torch.equal(family.run(pipe, cfg=cfg), plain)  # what was returned counts, not what was tried
    assert control.compared == len(branches(family, cfg)) * int(family.steps * family.strength)


@every
def test_the_loop_goes_on_from_what_a_step_control_returns(name):
    family, pipe = ALL[name], pipe_of(name)

    class Shift:
        def step(self, call, rest):
            return rest(call) + 0.25

    seen, given = Watch(), []

    class Keep:
        def step(self, call, rest):
            given.append(rest(call))
            return given[-1]

    with attach(pipe, Keep(), Shift(), seen):
        out = family.run(pipe)
    assert all(torch.equal(call.sample, before) for call, before in zip(seen.steps[1:], given, strict=False))
    assert not torch.equal(out, family.run(pipe))


def test_the_scheduler_steps_with_the_prediction_a_control_returns():
    class Zero:
        def denoise(self, call, rest):
            return Prediction(torch.zeros_like(rest(call).value))

    seen, pipe = Watch(), pipe_of("sd")
    with attach(pipe, Zero(), seen):
        FAMILIES["sd"].run(pipe)
    assert not any(call.prediction.any() for call in seen.steps)


@every
@pytest.mark.parametrize("odd", [False, True], ids=["square", "odd"])
def test_a_step_knows_its_images_and_their_grid(name, odd):
    family, seen = ALL[name], watched(name, odd=odd)
    height, width = family.odd_size if odd else family.size
    for call in seen.steps:
        assert call.rows == Rows.plain(2) and len(call.sample) == len(call.prediction) == 2
        if call.packed:
            assert call.grid == (height // family.stride, width // family.stride)
            assert call.sample.shape[1] == call.grid[0] * call.grid[1]
        else:
            assert call.grid == tuple(call.sample.shape[2:])
            assert call.grid == (*(family.frames,) * (len(call.grid) == 3), height // 8, width // 8)
    assert {call.packed for call in seen.steps} == {name.startswith(("flux", "qwen"))}


# -- tokens


@every
@pytest.mark.parametrize("odd", [False, True], ids=["square", "odd"])
def test_segments_describe_all_tokens_in_the_order_of_the_family(name, odd):
    family, seen = ALL[name], watched(name, odd=odd)
    height, width = family.odd_size if odd else family.size
    frames = (family.frames,) if family.frames > 1 else ()
    for call in seen.attentions:
        q, k = ([segment.name for segment in tokens.segments] for tokens in (call.query_tokens, call.key_tokens))
        expected = {"joint": (list(family.order or ()),) * 2, "cross": (["image"], ["text"])}
        assert (q, k) == expected.get(call.site.kind, (["image"], ["image"]))
        assert call.query_tokens.length == call.query.shape[2] and call.key_tokens.length == call.key.shape[2]
        grid = [height // family.stride, width // family.stride]
        if name.startswith("sd") and name not in ("sd3", "sd35"):  # a stride-two convolution rounds up
            grid, scale = [height // 8, width // 8], call.site.scale
            while scale > 1:
                grid, scale = [-(-size // 2) for size in grid], scale // 2
        assert call.grid == (*frames, *grid)
        assert call.query_tokens["image"].length == torch.Size(call.grid).numel()


# -- rows alone


class Flatter:
    """Halves the logits."""

    def attention(self, call, rest):
        return rest(call.replace(query=call.query / 2))


@every
@guided
def test_rows_together_equal_rows_alone(name, cfg):
    family, pipe = ALL[name], pipe_of(name)
    prompts = ("a", "c")
    with attach(pipe, Flatter()):
        together = family.run(pipe, prompts=prompts, cfg=cfg)
        alone = [family.run(pipe, prompts=(prompt,), cfg=cfg, seed=i) for i, prompt in enumerate(prompts)]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, family.run(pipe, prompts=prompts, cfg=cfg), rtol=1e-3, atol=1e-3)


# -- frames in the batch, appended channels, gradients


def test_frames_in_the_batch_are_folded_rows():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = d.UNet3DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
            attention_head_dim=8, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ).eval()  # fmt: skip
    seen, latents, text = Watch(), torch.randn(2, 4, 3, 8, 8), torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match="not in the table"), attach(model, seen), torch.no_grad():
        model(latents, 1, text)
    assert seen.attentions
    for call in seen.attentions:
        assert len(call.rows) == 2 and call.rows.fold * 2 == call.query.shape[0]
    frames = [call for call in seen.attentions if call.rows.fold == 3]
    assert frames and all(call.rows.where(prompt=1).tolist() == [3, 4, 5] for call in frames)
    assert all(torch.equal(call.take([1]).query, call.query[3:]) for call in frames)


def test_appended_channels_stay_when_latents_are_new():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = d.UNet2DConditionModel(
            sample_size=8, in_channels=9, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
            attention_head_dim=2, cross_attention_dim=16, norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ).eval()  # fmt: skip
    sample, text, z = torch.randn(2, 9, 8, 8), torch.randn(2, 5, 16), torch.randn(2, 4, 8, 8)

    class New:
        def denoise(self, call, rest):
            assert torch.equal(call.latents, sample[:, :4])
            return rest(call.replace(latents=z))

    with torch.no_grad():
        with attach(model, New()):
            found = model(sample, 1, text)[0]
        assert torch.equal(found, model(torch.cat((z, sample[:, 4:]), 1), 1, text)[0])


@pytest.mark.parametrize("name", ["sd", "flux", "wan"])
def test_gradients_through_a_no_op_chain_equal_those_without(name):
    pipe = pipe_of(name)
    call = watched(name).denoises[0]
    model = getattr(pipe, call.denoiser)
    key = "sample" if "sample" in call.inputs else "hidden_states"

    def gradients():
        inputs = {**call.inputs, key: call.inputs[key].clone().requires_grad_()}
        text = inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].clone().requires_grad_()
        with torch.enable_grad():
            out = model(**inputs)[0].square().sum()
        return torch.autograd.grad(out, (inputs[key], text))

    plain = gradients()
    with attach(model, Watch()):
        controlled = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, controlled, strict=True))
