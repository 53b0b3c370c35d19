"""Inverting and editing by whole pipelines: sources come back, targets are left alone, mistakes are named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from controls.edits import SOURCE, TARGET
from PIL import Image
from tiny import FAMILIES, VARIANTS

from attnctrl import attach
from attnctrl.controls import PromptToPrompt
from attnctrl.latents import (
    EditFriendly,
    FlowEdit,
    LocalBlend,
    NegativePrompt,
    PinSource,
    PromptGuidance,
    RFInversion,
    Solver,
    Trajectory,
    encode,
    invert,
)
from attnctrl.latents.ddim import ddim_invert, legs_of
from attnctrl.latents.flow_edit import flow_edit

ALL = {**FAMILIES, **VARIANTS}
METHODS = [
    ("sd", "ddim"), ("sd_v", "ddim"), ("sdxl", "ddim"), ("pixart", "ddim"), ("flux", "euler"), ("flux", "midpoint"),
    ("sd3", "midpoint"), ("qwen", "fireflow"), ("wan", "rf_solver"),
]  # fmt: skip
STEPS, PROMPTS = 3, ["a", "b"]
_BUILT = {}


def pipeline(name):
    if name not in _BUILT:
        _BUILT[name] = ALL[name].build()
    return _BUILT[name]


def picture(name, images=1):
    """Latents of an image, as the pipeline holds them."""
    shape = ALL[name].run(pipeline(name), prompts=("a",) * images, cfg=False, num_inference_steps=2).shape
    return 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(3))


def inputs(name, prompts, cfg=False, **more):
    family = ALL[name]
    given = family.inputs(pipeline(name), prompts, cfg=cfg)
    given["generator"] = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    return {**given, **more}


def inverted(name, method, image=None, prompts=("a",), cfg=False, **options):
    drop = {"num_inference_steps", "output_type", "generator", "guidance_scale", "true_cfg_scale"}
    given = {key: value for key, value in inputs(name, prompts, cfg).items() if key not in drop}
    image = picture(name) if image is None else image
    options = {"num_inference_steps": STEPS, **options}
    return invert(pipeline(name), image, None, method=method, **options, **given)


def sampled(name, inversion, *controls, prompts=PROMPTS, cfg=False, **more):
    with attach(pipeline(name), *controls):
        return pipeline(name)(**{**inputs(name, prompts, cfg), **inversion.arguments, **more, "return_dict": False})[0]


class Watch:
    def __init__(self):
        self.seen, self.asked = [], []

    def denoise(self, call, denoise):
        self.asked.append(call.latents)
        return denoise(call)

    def step(self, call, step):
        self.seen.append(step(call))
        return self.seen[-1]


Plain = SimpleNamespace(arguments={"num_inference_steps": STEPS})  # as of an inversion

# ---------------------------------------------------------------------------- pinning


@pytest.mark.parametrize("name, method", METHODS)
def test_a_pinned_source_follows_its_inversion_exactly_and_ends_at_the_image(name, method):
    image, own = picture(name), pipeline(name).scheduler
    inversion = inverted(name, method, image)
    trajectory = inversion.trajectory
    assert inversion.nfe == len(trajectory) == {"midpoint": 6, "rf_solver": 6, "fireflow": 4}.get(method, 3)
    assert torch.equal(trajectory.image, image) and torch.equal(inversion.latents, trajectory.noise)
    for cfg in (False, True):
        watch = Watch()
        out = sampled(name, inversion, watch, *inversion.controls(PROMPTS), cfg=cfg)
        assert torch.equal(out[:1], image)
        back = trajectory.latents.flip(0)
        assert all(torch.equal(seen[:1], state) for seen, state in zip(watch.seen, back[1:], strict=True))
    assert pipeline(name).scheduler is own and "_attnctrl" not in vars(own)


@pytest.mark.parametrize("name, method", METHODS)
def test_targets_are_sampled_from_the_same_noise_as_if_nothing_were_pinned(name, method):
    inversion = inverted(name, method)
    free = sampled(name, inversion, *inversion.controls(PROMPTS, pin=False))
    held = sampled(name, inversion, *inversion.controls(PROMPTS))
    torch.testing.assert_close(held[1], free[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(held[0], free[0], atol=1e-3)


def test_the_recorded_states_are_those_of_the_formula():
    pipe, image = pipeline("sd"), picture("sd")
    text = inputs("sd", ("a",))["prompt_embeds"]
    pipe.scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        path = ddim_invert(image, lambda x, t: pipe.unet(x, t, text).sample, legs_of(pipe.scheduler))
    torch.testing.assert_close(inverted("sd", "ddim", image).trajectory.latents, path, rtol=1e-5, atol=1e-5)


def test_a_better_solver_comes_back_closer_without_being_pinned():
    image, errors = picture("sd3"), {}
    for method in ("euler", "midpoint"):
        inversion = inverted("sd3", method, image, num_inference_steps=6)
        errors[method] = (sampled("sd3", inversion, *inversion.controls(PROMPTS, pin=False))[:1] - image).abs().max()
    assert errors["midpoint"] < errors["euler"] / 10


def test_local_blend_given_first_blends_with_the_pinned_source():
    name = "sd"
    pipe = ALL[name].build(with_text=True)
    prompts, image = [SOURCE, TARGET], picture(name)
    size = {"height": 64, "width": 64, "generator": torch.Generator().manual_seed(0)}
    inversion = invert(pipe, image, SOURCE, num_inference_steps=STEPS)
    nothing = LocalBlend(prompts, ["cat", "dog"], threshold=1.0, start=0.0)
    with attach(pipe, nothing, *inversion.controls(prompts), PromptToPrompt(prompts)):
        out = pipe(prompts, output_type="latent", **{**size, **inversion.arguments}).images
    assert torch.equal(out, image.expand_as(out))


def test_images_of_their_own_for_several_edits():
    name, image = "sd", picture("sd", 2)
    inversion = inverted(name, "ddim", image, prompts=("a", "c"))
    groups, flat = [["a", "b"], ["c", "d", "e"]], ("a", "b", "c", "d", "e")
    out = sampled(name, inversion, *inversion.controls(groups), prompts=flat)
    assert torch.equal(out[[0, 2]], image)
    alone = inverted(name, "ddim", image[1:], prompts=("c",))
    other = sampled(name, alone, *alone.controls(groups[1]), prompts=flat[2:])
    torch.testing.assert_close(out[2:], other, rtol=1e-4, atol=1e-4)


def test_a_trajectory_for_another_run_is_refused():
    inversion = inverted("sd", "ddim")
    controls = inversion.controls(PROMPTS)
    with pytest.raises(ValueError, match=r"the pipeline visits .* give it the inversion's num_inference_steps"):
        sampled("sd", inversion, *controls, num_inference_steps=STEPS + 1)
    with pytest.raises(ValueError, match="made for 2 prompts, the pipeline runs 3"):
        sampled("sd", inversion, *controls, prompts=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"shape \(4, 8, 8\), the pipeline's \(4, 10, 14\)"):
        sampled("sd", inversion, *controls, height=80, width=112)
    bare = PinSource(Trajectory(inversion.trajectory.latents), PROMPTS)
    with pytest.raises(ValueError, match="makes 4 iterations, the trajectory has 3"):
        sampled("sd", inversion, bare, num_inference_steps=4)
    with pytest.raises(ValueError, match="2 images for 3 edits"):
        three = PinSource(Trajectory(torch.zeros(4, 2, 4, 8, 8)), [["a", "b"]] * 3)
        sampled("sd", inversion, three, prompts=["a", "b"] * 3)
    with pytest.raises(ValueError, match="two states at least"):
        Trajectory(torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="4 states need 3 timesteps, got 1"):
        Trajectory(torch.zeros(4, 1, 4), (1.0,))


def test_img2img_starts_in_the_middle_of_the_trajectory():
    name = "sd_img2img"
    states = torch.stack([torch.full((1, 4, 8, 8), float(k)) for k in range(5)])
    watch = Watch()
    with attach(pipeline(name), PinSource(Trajectory(states), PROMPTS), watch):
        ALL[name].run(pipeline(name), prompts=PROMPTS)
    assert watch.asked[0].unique().tolist() == [2.0]  # two of four steps
    assert watch.asked[1][0].unique().tolist() == [1.0]


def test_solvers_sample_by_themselves():
    name = "flux"
    out = {}
    for solver in ("euler", "midpoint", "fireflow"):
        with attach(pipeline(name), Solver(solver)):
            out[solver] = pipeline(name)(**inputs(name, PROMPTS, num_inference_steps=8), return_dict=False)[0]
    plain = pipeline(name)(**inputs(name, PROMPTS, num_inference_steps=8), return_dict=False)[0]
    assert torch.equal(out["euler"], plain)
    far = (out["midpoint"] - plain).abs().max()
    assert (out["midpoint"] - out["fireflow"]).abs().max() < 0.2 * far


# ---------------------------------------------------------------------------- edit-friendly, texts, steering


@pytest.mark.parametrize("name", ["sd", "sd_v"])
def test_edit_friendly_maps_bring_the_source_back_at_its_own_guidance(name):
    image = picture(name)
    inversion = inverted(name, "edit_friendly", image, cfg=True, generator=torch.Generator().manual_seed(1))
    assert inversion.nfe == STEPS
    for skip in (0, 1):
        watch = Watch()
        controls = (watch, PromptGuidance([3.5, 15.0]), *inversion.controls(PROMPTS, skip=skip))
        out = sampled(name, inversion, *controls, cfg=True, guidance_scale=7.5)
        assert len(watch.seen) == STEPS - skip
        torch.testing.assert_close(out[:1], image, rtol=0, atol=1e-4)
        assert not torch.allclose(out[1:], image, atol=0.1)
        torch.testing.assert_close(watch.seen[0][:1], inversion.maps.path[STEPS - skip - 1], rtol=0, atol=1e-4)
    again = inverted(name, "edit_friendly", image, cfg=True, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again.maps.path, inversion.maps.path)
    dropped = inverted(
        name, "edit_friendly", image, cfg=True, generator=torch.Generator().manual_seed(1), keep_last=False
    )
    assert not dropped.maps.shifts[0].any() and torch.equal(dropped.maps.shifts[1:], inversion.maps.shifts[1:])
    with pytest.raises(ValueError, match="from 0 to 2, the maps have 3, not 3"):
        EditFriendly(inversion.maps, PROMPTS, skip=3)


def test_guidance_per_prompt():
    name = "sd3"
    run = lambda *controls, **more: sampled(name, Plain, *controls, cfg=True, **more)  # noqa: E731
    plain = run(Watch(), guidance_scale=5.0)
    assert torch.equal(run(PromptGuidance([5.0, 5.0]), guidance_scale=5.0), plain)
    mixed = run(PromptGuidance([5.0, 2.0]), guidance_scale=5.0)
    assert torch.equal(mixed[0], plain[0])
    torch.testing.assert_close(mixed[1], run(Watch(), guidance_scale=2.0)[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="guidance_scale above 1"):
        sampled(name, Plain, PromptGuidance([5.0, 2.0]))
    embedded = sampled("flux", Plain, PromptGuidance([1.5, 5.5]), guidance_scale=9.0)
    torch.testing.assert_close(embedded[1], sampled("flux", Plain, Watch(), guidance_scale=5.5)[1])
    torch.testing.assert_close(embedded[0], sampled("flux", Plain, Watch(), guidance_scale=1.5)[0])


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_with_the_source_as_negative_prompt_guidance_cancels_on_the_source(name):
    inversion = inverted(name, "negative_prompt")
    unguided = sampled(name, inversion, *inversion.controls(PROMPTS, pin=False)[:2])
    out = sampled(name, inversion, *inversion.controls(PROMPTS), cfg=True, guidance_scale=7.5)
    torch.testing.assert_close(out[0], unguided[0], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(out[1], unguided[1], atol=0.1)
    half = sampled(name, inversion, *inversion.controls(PROMPTS, interpolation=0.5), cfg=True, guidance_scale=7.5)
    assert not torch.allclose(half[0], unguided[0], atol=1e-2)
    with pytest.raises(ValueError, match="guidance_scale above 1"):
        sampled(name, inversion, *inversion.controls(PROMPTS))
    with pytest.raises(ValueError, match="pass the source prompt as the pipeline's negative prompt"):
        sampled("flux", Plain, NegativePrompt(PROMPTS), cfg=True)


def test_null_texts_bring_guided_sampling_closer_to_the_image():
    name = "sd"
    image = picture(name)
    inversion = inverted(name, "null_text", image, cfg=True, guidance_scale=2.0, inner=4)
    assert inversion.nulls.embeddings.shape == (STEPS, 1, 8, 16)
    assert 3 * STEPS <= inversion.nfe <= STEPS * 6
    solver, start, texts = inversion.controls(PROMPTS)
    both, without = (
        sampled(name, inversion, *controls, cfg=True) for controls in ((solver, start, texts), (solver, start))
    )
    assert (both[:1] - image).abs().mean() < 0.98 * (without[:1] - image).abs().mean()
    _, _, single = inversion.controls(PROMPTS, single_branch=True)
    one = sampled(name, inversion, solver, start, single, cfg=True)
    torch.testing.assert_close(one[0], both[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one[1], both[1], atol=1e-4)
    with pytest.raises(ValueError, match=r"guidance_scale=2.0, the pipeline runs with 3.0"):
        sampled(name, inversion, solver, texts, cfg=True, guidance_scale=3.0)
    with pytest.raises(ValueError, match="one image at a time, got 2"):
        inverted(name, "null_text", picture(name, 2), prompts=("a", "b"), cfg=True)


def test_rf_inversion_steers():
    name = "flux"
    image, seed = picture(name), lambda: torch.Generator().manual_seed(5)
    given = inverted(name, "rf_inversion", image, gamma=1.0, generator=seed())
    noise = torch.randn(image.shape, generator=seed())
    torch.testing.assert_close(given.latents, noise, rtol=1e-5, atol=1e-5)
    inversion = inverted(name, "rf_inversion", image, generator=seed())
    assert inversion.nfe == STEPS
    exact = sampled(name, inversion, *inversion.controls(PROMPTS, eta=1.0, window=(0.0, 1.0)))
    torch.testing.assert_close(exact, image.expand_as(exact), rtol=1e-4, atol=1e-4)
    plain = sampled(name, inversion, *inversion.controls(PROMPTS, eta=0.0))
    closed = sampled(name, inversion, *inversion.controls(PROMPTS, window=(2, 2)))
    assert torch.equal(plain, closed) and not torch.allclose(plain, exact, atol=0.1)
    near, far = (sampled(name, inversion, *inversion.controls(PROMPTS, eta=eta, window=(0, 2))) for eta in (0.9, 0.3))
    assert (near - image).abs().mean() < (far - image).abs().mean() < (plain - image).abs().mean()
    compat = inverted(name, "rf_inversion", image, compat="diffusers", generator=seed())
    assert not torch.allclose(compat.latents, inversion.latents, atol=0.01)
    with pytest.raises(ValueError, match="'diffusers', not 'authors'"):
        inverted(name, "rf_inversion", image, compat="authors")
    with pytest.raises(ValueError, match=r"\[0, 1\], not 2"):
        RFInversion(image, image, PROMPTS, eta=2)


# ---------------------------------------------------------------------------- FlowEdit


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen", "wan"])
@pytest.mark.parametrize("cfg", [False, True])
def test_flow_edit_keeps_the_source_and_equal_prompts_change_nothing(name, cfg):
    image, plan = picture(name), {"num_inference_steps": 4}
    watch = Watch()
    edit = FlowEdit(image, PROMPTS, n_max=3, n_min=1, n_avg=2, generator=torch.Generator().manual_seed(0))
    out = sampled(name, Plain, watch, edit, cfg=cfg, **plan)
    assert len(watch.seen) == 2 * 2 + 1
    assert torch.equal(out[:1], image) and (out[1:] - image).abs().max() > 0.05
    same = sampled(name, Plain, FlowEdit(image, ["a", "a"], n_max=3), prompts=["a", "a"], cfg=cfg, **plan)
    torch.testing.assert_close(same, image.expand_as(same), rtol=0, atol=1e-5)


def test_flow_edit_in_a_pipeline_is_the_formula():
    """With the transformer called by hand, and the noise that the control draws."""
    name, steps = "sd3", 4
    pipe, image = pipeline(name), picture(name)
    given = inputs(name, PROMPTS)
    pipe.scheduler.set_timesteps(steps)
    sigmas = pipe.scheduler.sigmas.tolist()

    def velocity(row):
        def v(x, t):
            with torch.no_grad():
                return pipe.transformer(
                    hidden_states=x,
                    timestep=torch.tensor([t * 1000]),
                    encoder_hidden_states=given["prompt_embeds"][row : row + 1],
                    pooled_projections=given["pooled_prompt_embeds"][row : row + 1],
                ).sample

        return v

    for plan in ({"n_max": 3}, {"n_max": 4, "n_min": 2, "n_avg": 2}):
        g = torch.Generator().manual_seed(2)
        noise = lambda g=g: torch.randn(image.shape[1:], generator=g)[None]  # noqa: E731
        expected = flow_edit(image, velocity(0), velocity(1), sigmas, **plan, draw=noise)
        edit = FlowEdit(image, PROMPTS, **plan, generator=torch.Generator().manual_seed(2))
        out = sampled(name, Plain, edit, num_inference_steps=steps)
        torch.testing.assert_close(out[1:], expected, rtol=1e-4, atol=1e-4)


def test_flow_edit_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="at least one step"):
        FlowEdit(picture("flux"), PROMPTS, n_max=0)
    with pytest.raises(ValueError, match="'flow_edit' does not fit the pipeline's DDIMScheduler"):
        sampled("sd", Plain, FlowEdit(picture("sd"), PROMPTS))


# ---------------------------------------------------------------------------- what invert is given


def test_methods_that_do_not_fit_and_options_of_others():
    with pytest.raises(ValueError, match=r"'midpoint' does not fit StableDiffusionPipeline.*'ddim', 'negative_prompt'"):
        inverted("sd", "midpoint")
    with pytest.raises(ValueError, match=r"'ddim' does not fit FluxPipeline.*'euler', 'midpoint', 'rf_solver'"):
        inverted("flux", "ddim")
    with pytest.raises(ValueError, match=r"'edit_friendly' has no option gamma; it has .'eta', 'keep_last'."):
        inverted("sd", "edit_friendly", gamma=0.5)
    with pytest.raises(ValueError, match=r"'ddim' has no options \['eta'\]"):
        inverted("sd", "ddim").controls(PROMPTS, eta=1.0)
    with pytest.raises(ValueError, match="2 texts for 1 images"):
        invert(pipeline("sd"), picture("sd"), ["a", "b"])
    with pytest.raises(ValueError, match="height and width"):
        invert(pipeline("flux"), picture("flux"), None)
    with pytest.raises(ValueError, match="no trajectory"):
        inverted("flux", "rf_inversion").controls(PROMPTS, pin=True)


def test_controls_during_the_inversion():
    watch = Watch()
    inversion = inverted("sd", "ddim", controls=(watch,))
    assert torch.equal(torch.stack(watch.seen), inversion.trajectory.latents[1:])


@pytest.mark.parametrize("name, side", [("sd", 8), ("flux", 16), ("sd3", 8)])
def test_a_picture_becomes_the_latents_the_pipeline_decodes(name, side):
    pipe = pipeline(name)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 80, 3), dtype=np.uint8))
    latents = encode(pipe, image)
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        mean = pipe.vae.encode(pixels).latent_dist.mean
    mean = (mean - (pipe.vae.config.shift_factor or 0)) * pipe.vae.config.scaling_factor
    if name == "flux":
        latents = pipe._unpack_latents(latents, 64, 80, pipe.vae_scale_factor)
    torch.testing.assert_close(latents, mean)
    cropped = encode(pipe, image.resize((80 + side - 1, 64)))
    assert cropped.shape == encode(pipe, image).shape
    two = encode(pipe, [image, image])
    torch.testing.assert_close(two[1:], encode(pipe, image))
    given = invert(pipe, image, None, num_inference_steps=1, **{
        key: value for key, value in inputs(name, ("a",)).items() if "embeds" in key
    })  # fmt: skip
    assert given.arguments["height"] == 64 and given.arguments["width"] == 80
    assert torch.equal(given.image, encode(pipe, image))


def test_pictures_of_any_mode():
    pipe = pipeline("sd")
    grey = Image.fromarray(np.arange(64 * 64, dtype=np.uint32).reshape(64, 64).astype(np.uint8))
    rgb = encode(pipe, grey.convert("RGB"))
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    palette = clear.convert("P")
    palette.info["transparency"] = 0
    white = encode(pipe, Image.new("RGB", (64, 64), "white"))
    for image, same in ((grey, rgb), (deep, rgb), (clear, white), (grey.convert("LA"), rgb), (grey.convert("P"), rgb)):
        torch.testing.assert_close(encode(pipe, image), same, rtol=0, atol=1e-5)
    assert encode(pipe, Image.new("1", (64, 64), 1)).shape == white.shape
    torch.testing.assert_close(encode(pipe, Image.new("1", (64, 64), 1)), white)


def test_what_is_no_picture():
    pipe, image = pipeline("sd"), Image.new("RGB", (64, 64))
    for bad, message in (
        ("cat.png", "image is a PIL image or a list of them, got str"),
        ([], "image is a PIL image or a list"),
        ([image, Image.new("RGB", (32, 64))], "of one size"),
        (Image.new("RGB", (64, 7)), "image sides must be multiples of 8 pixels .* 64x7"),
        (Image.new("F", (64, 64)), "'F', whose range is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(pipe, bad)
    with pytest.raises(ValueError, match=r"multiples of 8 pixels .* height 60"):
        encode(pipe, image, height=60)
    with pytest.raises(ValueError, match="WanPipeline has no image autoencoder"):
        encode(pipeline("wan"), image)
    with pytest.raises(ValueError, match=r"3 .packed., 4 or 5"):
        invert(pipe, torch.zeros(4, 4), "")
