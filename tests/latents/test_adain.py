"""AdaIN of latents: the authors' outputs, masks, packed latents, and which rows and steps it acts on."""

import pytest
import torch
from controls.sharing_cases import close, draw, load, precisions

from attnctrl import Rows, Step
from attnctrl.call import DenoiseCall, Level, Levels, Prediction, StepCall
from attnctrl.latents import ColorCalibration, LatentAdaIN, StartAdaIN
from attnctrl.latents.adain import adain, calibrated

ROWS = Rows.grid(("cond",), 3, 1)


def after(control, latents, index=5, total=10, **extra):
    """The control's step on a scheduler that returns `latents`."""
    call = StepCall(latents, torch.zeros_like(latents), ROWS, Step(index, total), **extra)
    return control.step(call, lambda call: latents)


def pack(x):
    """FLUX's packing: (b, c, 2h, 2w) to (b, h w, 4 c)."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


@precisions
def test_adain_is_the_authors(dtype, tolerance):
    facts, t = load("cross_image", "adain_latents", dtype)
    content, style, own, model = (t[x].flatten(-2) for x in ("content", "style", "content_mask", "style_mask"))
    eps = facts["params"]["eps"]
    close(adain(content, style, eps=eps), t["out_plain"].flatten(1), tolerance)
    close(adain(content, style, own.bool(), model.bool(), eps), t["out_masked"].flatten(1), tolerance)
    masked = LatentAdaIN(masks=(t["content_mask"], t["style_mask"]))
    latents = torch.stack((t["content"], t["style"], t["style"]))
    out = after(masked, latents, grid=(16, 16))
    close(out[0], t["out_masked"], tolerance)
    assert torch.equal(out[1:], latents[1:])


def test_packed_latents_are_the_same_pixels():
    latents, masks = draw(3, 4, 6, 8), (draw(6, 8) > 0, draw(6, 8, seed=1) > 0)
    for control in (LatentAdaIN(), LatentAdaIN(masks=masks)):
        expected = after(control, latents, grid=(6, 8))
        close(after(control, pack(latents), grid=(3, 4), packed=True), pack(expected))


def test_one_mask_serves_all_frames():
    masks = (torch.eye(6, 8), torch.eye(6, 8).flip(1))
    latents = draw(3, 4, 2, 6, 8)
    out = after(LatentAdaIN(masks=masks), latents, grid=(2, 6, 8))
    flat = [mask.bool().expand(2, 6, 8).flatten() for mask in masks]
    close(out[0].flatten(1), adain(latents[0].flatten(1), latents[1].flatten(1), *flat))


def test_it_acts_in_its_window():
    latents = draw(3, 4, 6, 8)
    assert torch.equal(after(LatentAdaIN(), latents, index=2), latents)
    assert not torch.equal(after(LatentAdaIN(), latents, index=3), latents)


def test_an_empty_mask_is_none_and_said():
    latents, full = draw(3, 4, 6, 8), torch.ones(6, 8)
    one = torch.zeros(6, 8)
    one[2, 3] = 1
    for masks, who in (((one, full), "output"), ((full, one * 0), "appearance"), ((one, one), "output and the app")):
        with pytest.warns(UserWarning, match=f"mask of the {who}"):
            out = after(LatentAdaIN(masks=masks), latents, grid=(6, 8))
        assert torch.equal(out, after(LatentAdaIN(), latents))
    with pytest.raises(ValueError, match="the content has 1 pixels"):
        adain(latents[0].flatten(1), latents[1].flatten(1), one.bool().flatten())


def test_the_start_has_the_style_s_statistics():
    latents = draw(3, 4, 6, 8)
    out = after(StartAdaIN(), torch.zeros(3, 4, 6, 8))
    assert torch.equal(out, torch.zeros(3, 4, 6, 8))  # later steps are the pipeline's
    seen = {}

    def step(call):
        seen["step"] = call.sample
        return call.sample

    def denoise(call):
        seen["denoise"] = call.latents
        return Prediction(call.latents)

    StartAdaIN().step(StepCall(latents, latents, ROWS, Step(0, 10)), step)
    StartAdaIN().denoise(DenoiseCall(latents, {}, Rows.grid(("uncond", "cond"), 3, 1), Step(0, 10)), denoise)
    assert torch.equal(seen["step"], seen["denoise"]) and torch.equal(seen["step"][1:], latents[1:])
    z_c, z_s = latents[2].flatten(1), latents[1].flatten(1)
    expected = (z_c - z_c.mean(1, True)) / z_c.std(1, keepdim=True) * z_s.std(1, keepdim=True) + z_s.mean(1, True)
    close(seen["step"][0].flatten(1), expected)


@pytest.mark.parametrize("predicts", ["noise", "velocity", "x0", "flow"])
def test_colours_are_the_reference_s_and_the_noise_stays(predicts):
    alpha, sigma = (0.3, 0.7) if predicts == "flow" else (0.8, 0.6)
    levels = Levels(Level(120, alpha, sigma), Level(100, 1, 0), predicts)
    x0, noise = draw(3, 4, 6, 8), draw(3, 4, 6, 8, seed=1)

    def predicted(x0):
        return {"noise": noise, "velocity": alpha * noise - sigma * x0, "x0": x0, "flow": noise - x0}[predicts]

    call = StepCall(predicted(x0), alpha * x0 + sigma * noise, ROWS, Step(1, 10, timestep=120, levels=levels))
    seen = []
    ColorCalibration(reference=1).step(call, lambda call: seen.append(call) or call.sample)
    expected = calibrated(x0, torch.tensor([1, 1, 1]))
    close(seen[0].sample, alpha * expected + sigma * noise)
    close(seen[0].prediction, predicted(expected))
    close(seen[0].x0(), expected)
    flat, own = expected.flatten(2), x0.flatten(2)
    close(flat.mean(2), own[1].mean(1).expand(3, 4))
    close(flat.std(2), own[1].std(1).expand(3, 4), 1e-7)
    assert torch.equal(expected[1], x0[1])
    late = call.replace(step=Step(2, 10, timestep=100, levels=levels))  # the bounds themselves are outside
    ColorCalibration(reference=1).step(late, lambda call: seen.append(call) or call.sample)
    assert seen[1] is late
    with pytest.raises(ValueError, match="prompt 5 of 3"):
        ColorCalibration(reference=5).step(call, lambda call: call.sample)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="two tensors of shape"):
        LatentAdaIN(masks=(torch.ones(3, 4), torch.ones(3)))
    with pytest.raises(ValueError, match=r"prompts \[7\] of 3"):
        after(LatentAdaIN(appearance=7), draw(3, 4, 6, 8))
    with pytest.raises(ValueError, match="grid"):
        after(LatentAdaIN(masks=(torch.ones(6, 8),) * 2), draw(3, 4, 6, 8))
