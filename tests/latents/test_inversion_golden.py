"""Inversions and solvers against what the authors' code gives on networks that are formulas, in float64."""

import json
import math
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from attnctrl import Rows, Step, StepCall
from attnctrl.latents import PinSource, Trajectory
from attnctrl.latents.ddim import ddim_invert, ddim_sample, ddim_step, legs_of
from attnctrl.latents.edit_friendly import edit_friendly_sample, noise_maps, noisy_path
from attnctrl.latents.flow import integrate, visits
from attnctrl.latents.flow_edit import flow_edit

GOLDEN = Path(__file__).parents[1] / "golden"


def cases(method):
    return sorted(file.stem for file in (GOLDEN / method).glob("*.json") if not file.stem.startswith("rf_edit"))


def load(method, case):
    facts = json.loads((GOLDEN / method / f"{case}.json").read_text())
    return facts, load_file(GOLDEN / method / f"{case}.safetensors")


def close(ours, theirs, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def legs(facts):
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        set_alpha_to_one=False,
        steps_offset=facts["steps_offset"],
        clip_sample=False,
    )
    scheduler.set_timesteps(facts["num_steps"])
    return legs_of(scheduler)


def noise(x, t, embedding):
    mean = embedding.mean((1, 2)).reshape(-1, 1, 1, 1)
    return 0.7 * x * (t / 1000) + 0.3 * torch.tanh(x) + 0.2 * mean + 0.1 * math.sin(t / 100)


def guided(facts_guidance, source, uncond):
    def predict(x, t):
        scale = torch.as_tensor(facts_guidance, dtype=torch.float64).reshape(-1, 1, 1, 1)
        u, c = noise(x, t, uncond), noise(x, t, source)
        return u + scale * (c - u)

    return predict


@pytest.mark.parametrize("case", cases("ddim_inversion"))
def test_ddim_inversion_and_sampling(case):
    facts, t = load("ddim_inversion", case)
    steps = legs(facts)
    assert [leg.timestep for leg in steps] == t["timesteps"].tolist()
    plain = lambda x, time: noise(x, time, t["emb_source"])  # noqa: E731
    path = ddim_invert(t["x0"], plain, steps)
    close(path[:, 0], t["trajectory"])
    for name in (name for name in t if name.startswith("recon_g")):
        scale = float(name.removeprefix("recon_g"))
        found = ddim_sample(path[-1], guided(scale, t["emb_source"], t["emb_uncond"]), steps)
        close(found[:, 0], t[name])


@pytest.mark.parametrize("case", cases("direct_inversion"))
def test_a_pinned_source_is_direct_inversion(case):
    facts, t = load("direct_inversion", case)
    steps, n = legs(facts), facts["num_steps"]
    path = ddim_invert(t["x0"], lambda x, time: noise(x, time, t["emb_source"]), steps)
    close(path[:, 0], t["trajectory"])
    pin = PinSource(Trajectory(path), ["source", "target"])
    embeddings = torch.cat([t["emb_source"], t["emb_target"]])
    predict = guided(facts["guidance"], embeddings, t["emb_uncond"].expand_as(embeddings))
    x, rows = path[-1].repeat(2, 1, 1, 1), Rows.plain(2)
    for i, leg in enumerate(steps):
        moved = []

        def scheduler(call, leg=leg, moved=moved):
            moved.append(ddim_step(call.sample, call.prediction, leg.start, leg.stop))
            return moved[0]

        x = pin.step(StepCall(predict(x, leg.timestep), x, rows, Step(i, n)), scheduler)
        close(path[n - i - 1] - moved[0][:1], t["offsets"][i])
        close(x, t["branch_trajectory"][i + 1])
        assert torch.equal(x[0], path[n - i - 1][0])


@pytest.mark.parametrize("case", cases("edit_friendly_ddpm"))
def test_edit_friendly_noise_maps(case):
    facts, t = load("edit_friendly_ddpm", case)
    steps, n = legs(facts), facts["num_steps"]
    skip = facts["skip"]
    source = guided(facts["cfg_source"], t["emb_source"], t["emb_uncond"])
    target = guided(facts["cfg_target"], t["emb_target"], t["emb_uncond"])
    path = noisy_path(t["x0"], steps, noise=t["noise"][:, None])
    close(path[:, 0], t["xts_sampled"])
    official = noise_maps(path, source, steps, eta=facts["eta"], keep_last=False)
    close(official.zs[:, 0], t["zs"])
    close(edit_friendly_sample(path[-1], source, steps, official), t["recon"])
    close(edit_friendly_sample(path[n - skip], target, steps, official, skip), t[f"edited_skip{skip}"])
    embeddings = torch.cat([t["emb_source"], t["emb_target"]])
    pair = guided([facts["cfg_source"], facts["cfg_target"]], embeddings, t["emb_uncond"].expand_as(embeddings))
    close(edit_friendly_sample(path[n - skip].repeat(2, 1, 1, 1), pair, steps, official, skip), t[f"pair_skip{skip}"])
    # with the last map kept the image comes back
    exact = noise_maps(path, source, steps, eta=facts["eta"])
    close(edit_friendly_sample(path[-1], source, steps, exact), t["x0"])


@pytest.mark.parametrize("case", cases("rf_solver"))
def test_rf_solver(case):
    facts, t = load("rf_solver", case)
    p, sigmas = facts["parameters"], t["timesteps"].tolist()

    def along(guidance):
        return lambda x, time: torch.tanh(x @ t["W"]) * (1 + time) + time * t["c"] + 0.05 * guidance * x

    noisy = integrate(t["x0"], along(p["guidance_invert"]), sigmas[::-1], "rf_solver")[-1]
    close(noisy, t["z_inverted"], 1e-12)
    for name, guidance in (("x_reconstructed", p["guidance_reconstruct"]), ("x_denoised_g", p["guidance_denoise"])):
        close(integrate(noisy, along(guidance), sigmas, "midpoint")[-1], t[name], 1e-12)
    for name, times in (("log_invert", sigmas[::-1]), ("log_denoise", sigmas)):
        asked = [[visit.time, visit.order - 1, visit.key] for visit in visits(times, "rf_solver")]
        close(torch.tensor(asked, dtype=torch.float64), t[name][:, [0, 1, 3]], 1e-12)


@pytest.mark.parametrize("case", cases("flowedit"))
def test_flow_edit(case):
    facts, t = load("flowedit", case)
    p, x = facts["parameters"], t["x_src"]
    b, c, h, w = x.shape
    packed = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * w // 2, 4 * c)
    calls = []

    def velocity(guidance, text, is_target):
        def v(z, time):
            calls.append([time, guidance, is_target])
            return torch.tanh(z @ t["W"]) * (1 + time) + time * text.mean(1, keepdim=True) + 0.05 * guidance * z

        return v

    noises = iter(t["noises"])
    out = flow_edit(
        packed,
        velocity(p["src_guidance_scale"], t["e_src"], 0),
        velocity(p["tar_guidance_scale"], t["e_tar"], 1),
        t["sigmas"].tolist(),
        **{name: p[name] for name in ("n_max", "n_min", "n_avg")},
        draw=lambda: next(noises),
    )
    out = out.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
    close(out, t["x_edit"], 1e-5)
    assert next(noises, None) is None
    key = lambda table: sorted(tuple(round(float(entry), 6) for entry in row) for row in table)  # noqa: E731
    assert key(calls) == key(t["calls"])  # source and target of a step in either order
