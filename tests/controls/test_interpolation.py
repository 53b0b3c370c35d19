"""Attention interpolation against the authors' outputs, and its properties."""

import pytest
import torch
from controls.edits import sample
from controls.sharing_cases import close, draw, load, made, plain, precisions, written
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Step
from attnctrl.attend import attend
from attnctrl.controls import AttentionInterpolation
from attnctrl.controls.interpolation import beta_coefficients, slerp

C = [0, 0.3, 1]


@precisions
@pytest.mark.parametrize("case", ["outer_fused_t03", "inner_fused_t03"])
def test_interpolation_is_the_authors(case, dtype, tolerance):
    facts, t = load("aid", case, dtype)
    params = facts["params"]
    control = AttentionInterpolation(t["coef"].double().tolist(), form=params["kind"], fused=params["fused"])
    call = AttentionCall(t["q"], t["k"], t["v"], rows=Rows.grid(("cond",), params["size"], 1), step=Step(0, 10))
    close(control.attention(call, attend), t["out"], tolerance)


def test_slerp_is_the_authors_line_by_line():
    facts, t = load("aid", "slerp_latents")
    params = facts["params"]
    for other, out in (("v1", "out_03"), ("v0", "out_colinear")):
        close(slerp(t["v0"], t[other], params["t"], dims=(-1,), threshold=params["threshold"]), t[out])


def test_slerp_keeps_the_sphere_and_its_ends():
    x, y = draw(4, 8, 8), draw(4, 8, 8, seed=1)
    x, y = x / x.norm(), y / y.norm()
    close(slerp(x, y, 0.0), x)
    close(slerp(x, y, 1.0), y)
    middle = slerp(x, y, 0.5)
    close(middle.norm(), torch.ones((), dtype=torch.float64))
    close((middle * x).sum(), (middle * y).sum())
    close(slerp(x, 2 * x, 0.3), 1.3 * x)
    close(slerp(x, 0 * x, 0.25), 0.75 * x)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("text", [0, 3])
def test_rows_between_are_the_formulas(fused, text):
    call = made(text=text, step=Step(0, 10))
    q, k, v = call.query[4], call.key, call.value

    def side(keys, values):
        own = (torch.cat((k[4], keys), 1), torch.cat((v[4], values), 1))
        return written(q, *(own if fused else (keys, values)))

    outer = AttentionInterpolation(C, fused=fused).attention(call, attend)
    close(outer[4], 0.7 * side(k[3], v[3]) + 0.3 * side(k[5], v[5]))
    inner = AttentionInterpolation(C, form="inner", fused=fused).attention(call, attend)
    close(inner[4], side(0.7 * k[3] + 0.3 * k[5], 0.7 * v[3] + 0.3 * v[5]))
    for out in (outer, inner):
        for row in (0, 1, 2, 3, 5):  # unconditional rows, start and end
            assert torch.equal(out[row], plain(call)[row])


def test_forms_agree_where_start_and_end_do():
    call = made(step=Step(0, 10))
    call = call.replace(key=call.key[[0, 1, 0, 3, 4, 3]], value=call.value[[0, 1, 0, 3, 4, 3]])
    outer, inner = (AttentionInterpolation(C, form=form).attention(call, attend) for form in ("outer", "inner"))
    close(outer, inner)
    alike = call.replace(key=call.key[[3] * 6], value=call.value[[3] * 6])
    close(AttentionInterpolation(C).attention(alike, attend), plain(alike))


def test_masks_follow_the_coefficient():
    mask = torch.ones(6, 1, 1, 12, dtype=torch.bool)
    mask[3, ..., :4] = mask[5, ..., 2:8] = False
    call = made(mask=mask, step=Step(0, 10))
    q, k, v = call.query[4], call.key, call.value
    share = 0.7 * mask[3, 0, 0].double() + 0.3 * mask[5, 0, 0].double()
    a = torch.exp(q @ (0.7 * k[3] + 0.3 * k[5]).transpose(1, 2) / 2) * share
    expected = a / a.sum(-1, keepdim=True) @ (0.7 * v[3] + 0.3 * v[5])
    close(AttentionInterpolation(C, form="inner", fused=False).attention(call, attend)[4], expected)
    start, end = (written(q, k[row][:, mask[row, 0, 0]], v[row][:, mask[row, 0, 0]]) for row in (3, 5))
    close(AttentionInterpolation(C, fused=False).attention(call, attend)[4], 0.7 * start + 0.3 * end)


def test_nothing_happens_after_the_warmup():
    call = made(step=Step(5, 10))
    assert torch.equal(AttentionInterpolation(C).attention(call, attend), plain(call))


@pytest.mark.parametrize("noise", ["slerp", "last_axis", None])
def test_rows_between_start_between(noise):
    seen = []

    class Watch:
        def step(self, call, step):
            seen.append(call.sample)
            return step(call)

        def denoise(self, call, denoise):
            seen.append(call.latents)
            return denoise(call)

    prompts = ("a red cat", "a cat", "a blue dog")
    sample(FAMILIES["sd"], prompts, AttentionInterpolation(C, noise=noise), Watch(), num_inference_steps=1)
    own = []
    seen, own = own, seen
    sample(FAMILIES["sd"], prompts, Watch(), num_inference_steps=1)
    start, z = own[0], seen[0]
    assert torch.equal(own[0], own[1]) and torch.equal(start[[0, 2]], z[[0, 2]])
    expected = z[1] if noise is None else slerp(z[0], z[2], 0.3, dims=(-1,) if noise == "last_axis" else None)
    close(start[1], expected, 1e-6)


def test_beta_coefficients_are_quantiles():
    close(torch.tensor(beta_coefficients(5, 1, 1)), torch.linspace(0, 1, 5), 1e-6)
    p = [j / 6 for j in range(7)]
    for ours, theirs in (
        (beta_coefficients(7, 2, 1), [x**0.5 for x in p]),
        (beta_coefficients(7, 1, 3), [1 - (1 - x) ** (1 / 3) for x in p]),
    ):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-14
    for x, level in zip(beta_coefficients(7, 3, 3), p, strict=True):
        assert abs(x**3 * (10 - 15 * x + 6 * x * x) - level) < 1e-14
    many = beta_coefficients(11, 50, 50)
    assert many == sorted(many) and abs(many[5] - 0.5) < 1e-12 and many[1] > 0.4
    few = beta_coefficients(9, 0.3, 4.0)
    close(torch.tensor([1 - x for x in few[::-1]]), torch.tensor(beta_coefficients(9, 4.0, 0.3)), 1e-6)


def test_what_does_not_fit_is_named():
    for settings, message in (
        ({"coefficients": [0.1, 1]}, r"\[0.1, 1\]"),
        ({"coefficients": [0, 0.6, 0.4, 1]}, "rise from 0"),
        ({"coefficients": C, "form": "middle"}, "'middle'"),
        ({"coefficients": C, "noise": "lerp"}, "'lerp'"),
        ({"coefficients": C, "steps": (1, 0)}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionInterpolation(**settings)
    with pytest.raises(ValueError, match="at least 2"):
        beta_coefficients(1, 1, 1)
    with pytest.raises(ValueError, match="made for 3 prompts, the pipeline runs 4"):
        AttentionInterpolation(C).attention(made(prompts=4, step=Step(0, 10)), attend)
    with pytest.raises(MissingRows, match="prompt 0"):
        AttentionInterpolation(C).attention(made(step=Step(0, 10)).take([1, 4, 5]), attend)
