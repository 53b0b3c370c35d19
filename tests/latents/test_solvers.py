"""What solvers and inversions promise on networks that are formulas, in float64."""

import diffusers
import pytest
import torch

from attnctrl.latents.ddim import Leg, ddim_invert, ddim_mean, ddim_sample, ddim_step, ddim_unstep, legs_of
from attnctrl.latents.edit_friendly import edit_friendly_sample, noise_maps, noisy_path
from attnctrl.latents.flow import Walk, integrate, visits
from attnctrl.latents.flow_edit import flow_edit
from attnctrl.latents.negative_prompt import negative_prompt_embedding
from attnctrl.latents.null_text import fit_null_text, null_text
from attnctrl.latents.rf_inversion import rf_edit, rf_invert
from attnctrl.latents.schedulers import (
    DDIMInversionScheduler,
    EulerFlowInverseScheduler,
    FireFlowInverseScheduler,
    FireFlowScheduler,
    FlowEditScheduler,
    MidpointFlowInverseScheduler,
    MidpointFlowScheduler,
    RFInversionCompatScheduler,
    RFInversionInverseScheduler,
    RFSolverScheduler,
    solver_for,
    way_back,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def ddim(steps=6, predicts="epsilon", **config):
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, prediction_type=predicts,
        **{"set_alpha_to_one": False, "steps_offset": 1, **config},
    )  # fmt: skip
    scheduler.set_timesteps(steps)
    return scheduler


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "set_alpha_to_one": True}

# ---------------------------------------------------------------------------- DDIM


@pytest.mark.parametrize(
    "predicts, config",
    [
        ("epsilon", {}),
        ("v_prediction", {}),
        ("v_prediction", ZERO_SNR),
        ("sample", {}),
        ("epsilon", {"steps_offset": 0}),
    ],
)
def test_sampling_undoes_inversion_where_the_prediction_depends_on_the_timestep_only(predicts, config):
    legs = legs_of(ddim(predicts=predicts, **config))
    x = random(2, 4, 3, 3)
    at = {leg.timestep: random(2, 4, 3, 3, seed=leg.timestep + 1) for leg in legs}
    path = ddim_invert(x, lambda x, t: at[t], legs, predicts)
    back = ddim_sample(path[-1], lambda x, t: at[t], legs, predicts)
    close(back, path.flip(0), 1e-8)
    assert (path[-1] - x).abs().max() > 0.1


def test_without_an_offset_the_first_inversion_step_is_the_identity():
    legs = legs_of(ddim(steps_offset=0))
    path = ddim_invert(random(1, 2, 2, 2), lambda x, t: torch.tanh(x), legs)
    close(path[1], path[0], 1e-15)
    assert not torch.allclose(path[2], path[1])


@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction", "sample"])
def test_the_steps_are_those_of_diffusers(predicts):
    scheduler = ddim(predicts=predicts)
    leg, x, p, z = legs_of(scheduler)[2], random(1, 2, 3, 3), random(1, 2, 3, 3, seed=1), random(1, 2, 3, 3, seed=2)
    close(
        ddim_step(x, p, leg.start, leg.stop, predicts), scheduler.step(p, leg.timestep, x).prev_sample, 1e-6
    )  # alphas are float32 there
    mean, deviation = ddim_mean(x, p, leg.start, leg.stop, predicts, eta=0.7)
    theirs = scheduler.step(p, leg.timestep, x, eta=0.7, variance_noise=z).prev_sample
    close(mean + deviation * z, theirs, 1e-6)


def test_inversion_of_a_noise_prediction_is_that_of_diffusers_and_of_a_v_prediction_is_exact():
    x, p = random(1, 2, 3, 3), random(1, 2, 3, 3, seed=1)
    for predicts in ("epsilon", "v_prediction"):
        forward = ddim(predicts=predicts)
        theirs = diffusers.DDIMInverseScheduler.from_config(forward.config)
        ours = DDIMInversionScheduler.from_config(forward.config)
        for scheduler in (theirs, ours):
            scheduler.set_timesteps(6)
        assert ours.timesteps.tolist() == forward.timesteps.flip(0).tolist()
        t = int(ours.timesteps[3])
        found = ours.step(p, t, x, return_dict=False)[0]
        close(forward.step(p, t, found).prev_sample, x, 1e-6)
        same = torch.allclose(found, theirs.step(p, t, x).prev_sample, atol=1e-6)
        assert same == (predicts == "epsilon")


def test_what_does_not_tell_the_image_is_refused():
    x = random(1, 2)
    with pytest.raises(ValueError, match="zero terminal SNR"):
        ddim_step(x, x, 0.0, 0.5, "epsilon")
    with pytest.raises(ValueError, match="set_alpha_to_one=False"):
        ddim_unstep(x, x, 0.5, 1.0, "sample")
    with pytest.raises(ValueError, match="'epsilon', 'v_prediction' or 'sample', not 'flow'"):
        ddim_step(x, x, 0.5, 0.6, "flow")
    assert ddim_unstep(x, x, 0.0, 0.5, "epsilon").isfinite().all()


@pytest.mark.parametrize("predicts, config", [("epsilon", {"steps_offset": 0}), ("v_prediction", ZERO_SNR)])
def test_edit_friendly_maps_rebuild_the_image_at_any_guidance_and_schedule(predicts, config):
    """Also where the last step has no deviation, and where the first level has no image."""
    legs, x = legs_of(ddim(5, predicts, **config)), random(2, 3, 4, 4)
    for scale in (1.0, 15.0):
        predict = lambda x, t, scale=scale: torch.tanh(x + scale * t / 1000)  # noqa: E731
        path = noisy_path(x, legs, generator=torch.Generator().manual_seed(0))
        maps = noise_maps(path, predict, legs, predicts)
        assert maps.deviations[0] == 0 and maps.zs.isfinite().all() and maps.zs[1].abs().max() > 0
        for skip in (0, 2):
            close(edit_friendly_sample(path[len(legs) - skip], predict, legs, maps, skip, predicts), x, 1e-9)
        dropped = edit_friendly_sample(path[-1], predict, legs, maps.without_last(), 0, predicts)
        close(dropped + maps.shifts[0], x, 1e-9)


def test_null_texts_follow_the_trajectory_where_guidance_leaves_it():
    legs = [Leg(t, a, b) for t, a, b in ((3, 0.2, 0.4), (2, 0.4, 0.7), (1, 0.7, 0.95))]
    source, null, x = random(1, 3, 2, seed=1), random(1, 3, 2, seed=2), random(1, 2, 3, 3)

    def predict(x, t, text):
        return torch.tanh(x + 0.3 * text.mean((1, 2)).reshape(-1, 1, 1, 1)) + 0.2 * text.sum((1, 2)).reshape(
            -1, 1, 1, 1
        )

    path = ddim_invert(x, lambda x, t: predict(x, t, source), legs)

    def guided(x, t):
        u, c = predict(x, t, null), predict(x, t, source)
        return u + 7.5 * (c - u)

    without = (ddim_sample(path[-1], guided, legs)[-1] - x).abs().max()
    errors = []
    for inner in (1, 30):
        nulls, found = null_text(path, predict, source, null, legs, inner=inner)
        assert nulls.shape == (3, 1, 3, 2) and torch.equal(found[0], path[-1])
        errors.append(((found[-1] - x).abs().max() / without).item())
    assert errors[1] < 0.2 < errors[0] < 1


def test_a_text_that_fits_is_updated_once_more_and_no_further():
    """The loss is read before the update that ends the search; the tolerance grows with the step, the rate falls."""
    null, wish = random(1, 2, 2), random(1, 3, seed=1)
    step = lambda null: wish + 1e-3 * null.sum()  # noqa: E731
    target = step(null) + 0.003  # a loss of 9e-6
    found, updates = fit_null_text(null, step, target, index=0)
    assert updates == 1 and not torch.equal(found, null)
    close((found - null).abs(), torch.full_like(null, 1e-2), 1e-4)  # Adam's first step is its rate
    target = step(null) + 0.005  # 2.5e-5: above 1e-5, below 1e-5 + 50 * 2e-5
    assert fit_null_text(null, lambda null: wish + 0 * null.sum() + 1e-3, wish + 0.006, 0)[1] == 10
    later, updates = fit_null_text(null, step, target, index=50)
    assert updates == 1
    close((later - null).abs(), torch.full_like(null, 5e-3), 1e-4)


def test_the_negative_prompt_is_the_source_or_on_the_way_to_the_empty_one():
    source, null = random(2, 3, 4), random(2, 3, 4, seed=1)
    assert negative_prompt_embedding(source, null) is source
    close(negative_prompt_embedding(source, null, 1.0), null)
    half = negative_prompt_embedding(source, null, 0.5).flatten(1)
    to = lambda other: torch.cosine_similarity(half, other.flatten(1))  # noqa: E731
    unit = torch.nn.functional.normalize
    equal = negative_prompt_embedding(unit(source.flatten(1)), unit(null.flatten(1)), 0.5)
    close(equal.norm(dim=1), torch.ones(2, dtype=torch.float64))  # an arc, not a chord
    assert (to(source) > 0).all() and (to(null) > 0).all()
    with pytest.raises(ValueError, match=r"\[0, 1\], not 2"):
        negative_prompt_embedding(source, null, 2)


# ---------------------------------------------------------------------------- flows

GRID = [1.0, 0.8, 0.55, 0.3, 0.1, 0.0]


def curved(x, t):
    return torch.sin(2 * x) + t * torch.cos(3 * x)


def halves(n):
    return torch.linspace(1, 0, n + 1, dtype=torch.float64).tolist()


@pytest.mark.parametrize("solver, evaluations", [("euler", 5), ("midpoint", 10), ("rf_solver", 10), ("fireflow", 6)])
def test_evaluations_and_constant_velocities(solver, evaluations):
    v, x = random(2, 3, seed=1), random(2, 3)
    for times in (GRID, GRID[::-1]):
        assert len(visits(times, solver)) == evaluations
        close(integrate(x, lambda x, t: v, times, solver)[-1], x + (times[-1] - times[0]) * v)


def test_order_of_convergence():
    x = random(8)
    exact = integrate(x, curved, halves(1024), "midpoint")[-1]
    error = lambda solver, n: (integrate(x, curved, halves(n), solver)[-1] - exact).abs().max().item()  # noqa: E731
    for solver, ratio in (("euler", 2), ("midpoint", 4), ("fireflow", 4)):
        assert error(solver, 32) / error(solver, 64) == pytest.approx(ratio, rel=0.2)
    assert error("midpoint", 32) < error("fireflow", 32) < error("euler", 32)


def test_fireflow_of_one_step_is_the_midpoint_and_differs_later():
    x = random(5)
    assert torch.equal(integrate(x, curved, [1.0, 0.4], "fireflow"), integrate(x, curved, [1.0, 0.4], "midpoint"))
    assert not torch.allclose(integrate(x, curved, GRID, "fireflow")[-1], integrate(x, curved, GRID, "midpoint")[-1])


def test_up_and_down_again_comes_closer_with_the_order():
    x = random(6)
    error = {}
    for solver in ("euler", "midpoint"):
        up = integrate(x, curved, halves(16)[::-1], solver)[-1]
        error[solver] = (integrate(up, curved, halves(16), solver)[-1] - x).abs().max()
    assert error["midpoint"] < error["euler"] / 20
    told = integrate(x, lambda x, t: torch.tensor(t).sin(), GRID[::-1], told="stop")[-1]
    close(integrate(told, lambda x, t: torch.tensor(t).sin(), GRID)[-1], x, 1e-6)


@pytest.mark.parametrize("solver", ["midpoint", "fireflow"])
def test_what_others_change_at_a_midpoint_is_carried_over(solver):
    """A shift of every state, made where the solver hands them out, is the same shift of the result."""
    x, v, shift = random(3), random(3, seed=1), 0.25
    walk, y = Walk(GRID, solver), x
    for i, _ in enumerate(walk.visits):
        y = walk(v, y)
        y = y + shift if i == 2 else y
    close(y, x - v + shift)
    half = Walk(GRID, solver)
    y = x.half()
    for _ in half.visits:
        y = half(v.half(), y)
    assert y.dtype == torch.float16 and (y - (x - v)).abs().max() < 2e-3


def test_times_that_cannot_be_walked():
    for times in ([1.0], [1.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.5]):
        with pytest.raises(ValueError, match="strictly"):
            visits(times)
    with pytest.raises(ValueError, match="'rf_solver', 'fireflow', not 'heun'"):
        visits(GRID, "heun")
    with pytest.raises(ValueError, match="'stop' with 'midpoint'"):
        visits(GRID, "midpoint", told="stop")
    walk = Walk([1.0, 0.0])
    walk(random(2), random(2))
    with pytest.raises(RuntimeError, match="makes 1 evaluations"):
        walk(random(2), random(2))


def test_rf_inversion_at_its_limits():
    x, noise = random(4), random(4, seed=1)
    close(rf_invert(x, curved, GRID, noise, gamma=0), integrate(x, curved, GRID[::-1])[-1])
    close(rf_invert(x, curved, GRID, noise, gamma=1), noise)
    assert torch.equal(rf_edit(noise, curved, GRID, x, eta=0), integrate(noise, curved, GRID)[-1])
    close(rf_edit(noise, curved, GRID, x, eta=1, steps=(0, 5)), x)
    asked = []
    rf_invert(x, lambda x, t: asked.append(t) or x, GRID, noise, compat="diffusers")
    close(torch.tensor(asked), torch.arange(5) / 6, 1e-6)
    with pytest.raises(ValueError, match="'diffusers', not 'paper'"):
        rf_invert(x, curved, GRID, noise, compat="paper")


def test_flow_edit_at_its_limits():
    x = random(1, 4)
    source, target = (lambda x, t: torch.sin(x) + t), (lambda x, t: torch.cos(x) * t)
    close(flow_edit(x, source, source, GRID, n_max=5, n_avg=2), x, 1e-15)
    assert torch.equal(flow_edit(x, source, target, GRID, n_max=0), x)
    noise = random(1, 4, seed=3)
    close(
        flow_edit(x, source, target, GRID, n_max=5, n_min=5, draw=lambda: noise),
        integrate(noise, target, GRID)[-1],
    )
    linear = lambda shift: lambda x, t: t * x + shift  # noqa: E731
    a, b = (flow_edit(x, linear(0), linear(1), GRID, 4, draw=lambda s=s: random(1, 4, seed=s)) for s in (1, 2))
    close(a, b)
    assert (a - x).abs().max() > 0.1
    for bad, message in (({"n_max": -1}, "n_max"), ({"n_avg": 0}, "n_avg"), ({"n_max": 2, "n_min": 3}, "n_min=3")):
        with pytest.raises(ValueError, match=message):
            flow_edit(x, source, target, GRID, **bad)


# ---------------------------------------------------------------------------- schedulers

FLOW = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


@pytest.mark.parametrize(
    "kind, solver, rising",
    [
        (MidpointFlowScheduler, "midpoint", False),
        (MidpointFlowInverseScheduler, "midpoint", True),
        (FireFlowScheduler, "fireflow", False),
        (FireFlowInverseScheduler, "fireflow", True),
        (EulerFlowInverseScheduler, "euler", True),
        (RFInversionInverseScheduler, "euler", True),
    ],
)
def test_a_scheduler_walks_the_pipelines_grid_by_its_solver(kind, solver, rising):
    own = diffusers.FlowMatchEulerDiscreteScheduler.from_config(FLOW.config)
    own.set_timesteps(5, mu=0.7)
    times = own.sigmas.tolist()[::-1] if rising else own.sigmas.tolist()
    scheduler, x = kind.from_config(FLOW.config), random(2, 3).float()
    scheduler.set_timesteps(5, mu=0.7)
    told = "stop" if kind is EulerFlowInverseScheduler else "start"
    y = x
    for t in scheduler.timesteps:
        y = scheduler.step(curved(y, t / 1000), t, y, return_dict=False)[0]
    close(y, integrate(x, lambda x, t: curved(x, torch.tensor(t)), times, solver, told)[-1], 1e-5)
    assert len(scheduler.sigmas) == len(scheduler.timesteps) + 1 and scheduler.num_inference_steps == 5
    if rising and told == "start" and solver != "euler":
        forward = (MidpointFlowScheduler if solver == "midpoint" else FireFlowScheduler).from_config(FLOW.config)
        forward.set_timesteps(5, mu=0.7)
        close(torch.tensor(way_back(scheduler)), forward.timesteps.float(), 1e-3)


def test_sigmas_of_the_caller_and_what_is_refused():
    scheduler = RFSolverScheduler()
    scheduler.set_timesteps(sigmas=[1.0, 0.5])
    assert scheduler.timesteps.tolist() == [1000, 750, 500, 250]
    with pytest.raises(ValueError, match="give sigmas"):
        scheduler.set_timesteps(timesteps=[900.0, 500.0])
    with pytest.raises(ValueError, match="begin at index 1"):
        scheduler.set_begin_index(1)
    with pytest.raises(ValueError, match="stochastic_sampling=True"):
        MidpointFlowScheduler(stochastic_sampling=True).set_timesteps(4)


def test_the_grids_of_rf_inversion_and_flow_edit():
    compat = RFInversionCompatScheduler()
    compat.set_timesteps(sigmas=[1.0, 0.7, 0.3])
    close(compat.timesteps, torch.tensor([0, 250, 500.0]), 1e-3)
    close(compat.sigmas, torch.tensor([0, 0.3, 0.7, 1.0]), 1e-6)
    edit = FlowEditScheduler()
    edit.n_max, edit.n_min, edit.n_avg = 3, 1, 2
    edit.set_timesteps(sigmas=[1.0, 0.8, 0.6, 0.2])
    close(edit.sigmas, torch.tensor([0.8, 0.8, 0.6, 0.6, 0.2, 0.0]), 1e-6)


def test_solvers_are_chosen_for_the_pipelines_scheduler():
    assert type(solver_for(FLOW, "rf_solver")) is MidpointFlowScheduler
    assert solver_for(FLOW, "fireflow", inverse=True).config.use_dynamic_shifting
    unipc = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    assert solver_for(unipc, "euler").config.shift == 3.0
    spaced = diffusers.EulerDiscreteScheduler(timestep_spacing="linspace", steps_offset=1)
    made = solver_for(spaced, "ddim", inverse=True)
    assert type(made) is DDIMInversionScheduler and made.config.timestep_spacing == "leading"
    assert not made.config.clip_sample
    with pytest.raises(ValueError, match=r"'ddim' does not fit.*'euler', 'midpoint'"):
        solver_for(FLOW, "ddim")
    with pytest.raises(ValueError, match=r"'midpoint' does not fit.*'ddim'"):
        solver_for(spaced, "midpoint")
