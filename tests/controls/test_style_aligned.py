"""StyleAligned against the authors' outputs, and its properties."""

import math

import pytest
import torch
from controls.edits import pipe_of, sample
from controls.sharing_cases import close, draw, load, made, plain, precisions, written
from tiny import FAMILIES

from attnctrl import AttentionCall, Rows, Site, attach
from attnctrl.attend import attend
from attnctrl.call import ModuleCall
from attnctrl.controls import SharedGroupNorm, StyleAligned
from attnctrl.controls.style_aligned import shared_sites
from attnctrl.sharing import token_adain


@precisions
@pytest.mark.parametrize("case", ["default", "shift_and_scale"])
def test_shared_attention_is_the_authors(case, dtype, tolerance):
    facts, t = load("style_aligned", case, dtype)
    params = facts["params"]
    control = StyleAligned(
        scale=params["shared_score_scale"],
        shift=params["shared_score_shift"],
        **{name: params[name] for name in ("share_attention", "full_attention_share")},
        **{f"adain_{x}": params[f"adain_{x}"] for x in ("queries", "keys", "values")},
    )
    call = AttentionCall(t["q"], t["k"], t["v"], rows=Rows.grid(("uncond", "cond"), 3, 1))
    close(control.attention(call, attend), t["out"], tolerance)


def test_the_reference_keeps_its_bits_and_halves_do_not_mix():
    call = made()
    control = StyleAligned(shift=0.5, adain_values=True)
    out = control.attention(call, attend)
    assert torch.equal(out[[0, 3]], plain(call)[[0, 3]])
    assert not torch.allclose(out[[1, 4]], plain(call)[[1, 4]])
    other = call.replace(value=call.value.index_fill(0, torch.tensor([0, 1, 2]), 0.5))
    assert torch.equal(control.attention(other, attend)[3:], out[3:])


def test_rows_alike_stay_alike_and_plain():
    call = made()
    alike = [x[[0, 0, 0, 3, 3, 3]] for x in (call.query, call.key, call.value)]
    call = call.replace(query=alike[0], key=alike[1], value=alike[2])
    out = StyleAligned().attention(call, attend)
    assert torch.equal(out[1], out[2])
    close(out, plain(call))


def test_minus_infinity_takes_statistics_only():
    call = made()
    index = torch.tensor([0, 0, 0, 3, 3, 3])
    expected = plain(call.replace(query=token_adain(call.query, index), key=token_adain(call.key, index)))
    for control in (StyleAligned(shift=-math.inf), StyleAligned(share_attention=False)):
        close(control.attention(call, attend), expected)
    close(StyleAligned(shift=-60).attention(call, attend), expected)


def test_full_sharing_reads_all_rows_of_the_half():
    call = made()
    q, k, v = call.query, call.key, call.value
    out = StyleAligned(full_attention_share=True).attention(call, attend)
    for half in (slice(0, 3), slice(3, 6)):
        keys, values = (x[half].transpose(0, 1).flatten(1, 2) for x in (k, v))  # (h, 3 m, d)
        close(out[half], written(q[half], keys, values))


def test_joint_rows_share_the_image_only():
    call = made(text=3)
    q, k, v = call.query, call.key, call.value
    out = StyleAligned(scale=1.3, adain_queries=False, adain_keys=False).attention(call, attend)
    keys, values = torch.cat((k[1], 1.3 * k[0, :, 3:]), 1), torch.cat((v[1], v[0, :, 3:]), 1)
    close(out[1], written(q[1], keys, values))
    aligned = StyleAligned(share_attention=False).attention(call, attend)
    index = torch.tensor([0, 0, 0, 3, 3, 3])
    query, key = (torch.cat((x[:, :, :3], token_adain(x[:, :, 3:], index)), 2) for x in (q, k))
    close(aligned, written(query, key, v))


def test_masks_of_both_rows_hold():
    mask = torch.ones(6, 1, 1, 12, dtype=torch.bool)
    mask[0, ..., :4] = mask[1, ..., 6:] = False
    call = made(mask=mask)
    out = StyleAligned(adain_queries=False, adain_keys=False).attention(call, attend)
    open_ = torch.cat((mask[1, 0, 0], mask[0, 0, 0]))
    keys, values = (torch.cat((x[1], x[0]), 1)[:, open_] for x in (call.key, call.value))
    close(out[1], written(call.query[1], keys, values))


def test_layers_left_out_are_counted_as_the_authors_do():
    sites = [Site(name=str(i), place=place) for i, place in enumerate(["down"] * 24 + ["mid"] * 10 + ["up"] * 36)]
    left = [int(site.name) for site in sites if site not in shared_sites(sites, 0.25)]
    assert len(left) == 18  # of 70, where 17.5 were asked for
    assert left == [i for i in range(70) if ([*range(24), *range(34, 70), *range(24, 34)].index(i)) % 4 == 0]
    assert shared_sites(sites) == sites and shared_sites(sites, 0.01) == sites
    assert len(shared_sites(sites, 0.75)) == 18
    assert shared_sites([*sites, Site(kind="cross")]) == sites


def test_group_statistics_are_those_of_row_and_reference_together():
    x, rows = draw(4, 8, 5, 6), Rows.grid(("uncond", "cond"), 2, 1)
    norm = torch.nn.GroupNorm(4, 8).double()
    inner = lambda call: norm(call.inputs["input"])  # noqa: E731
    out = SharedGroupNorm().module(ModuleCall("norm1", {"input": x}, rows), inner)
    assert torch.equal(out[[0, 2]], norm(x)[[0, 2]])
    for row, reference in ((1, 0), (3, 2)):
        groups, both = x[row].unflatten(0, (4, 2)), torch.stack((x[row], x[reference])).unflatten(1, (4, 2))
        mean, var = both.mean((0, 2, 3, 4)), both.var((0, 2, 3, 4), unbiased=False)
        expected = (groups - mean[:, None, None, None]) / (var + norm.eps).sqrt()[:, None, None, None]
        close(out[row], expected.flatten(0, 1))


def test_shared_norms_act_in_a_unet_and_leave_the_reference():
    prompts = ("a red cat", "a blue dog")
    plainly, shared = (sample(FAMILIES["sd"], prompts, *c, num_inference_steps=1) for c in ((), (SharedGroupNorm(),)))
    assert torch.equal(plainly[0], shared[0]) and not torch.allclose(plainly[1], shared[1])
    never = sample(FAMILIES["sd"], prompts, SharedGroupNorm(steps=(0, 0)), num_inference_steps=1)
    assert torch.equal(never, plainly)
    with attach(pipe_of("sd"), control := SharedGroupNorm()) as run:
        unet = pipe_of("sd").unet
        norms = [name for name, module in unet.named_modules() if isinstance(module, torch.nn.GroupNorm)]
        assert sorted(run.modules_of(control)) == sorted(norms)
        FAMILIES["sd"].run(pipe_of("sd"), prompts=prompts, num_inference_steps=1, text=True)
    with pytest.raises(ValueError, match="SharedGroupNorm"):
        attach(pipe_of("flux"), SharedGroupNorm())


def test_what_does_not_fit_is_named():
    for settings, message in (
        ({"only_self_level": 1.0}, "only_self_level"),
        ({"only_self_level": 0.5, "sites": "up"}, "not both"),
        ({"full_attention_share": True, "shift": 1.0}, "no reference part"),
        ({"shift": math.inf}, "-inf"),
        ({"scale": math.nan}, "scale"),
        ({"steps": (0.5, 0.1)}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            StyleAligned(**settings)
