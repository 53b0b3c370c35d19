"""Every sharing control in the real pipelines of every family: what it leaves alone, what it changes, how it fits
other runs."""

import pytest
import torch
from controls.edits import EDITABLE, sample
from controls.sharing_cases import made
from diffusers import PixArtTransformer2DModel
from tiny import FAMILIES, seeded

from attnctrl import attach
from attnctrl.attend import attend
from attnctrl.controls import (
    AttentionInterpolation,
    CrossImageAttention,
    MutualSelfAttention,
    QueryBlend,
    ReferenceOverlay,
    SketchMixture,
    StyleAligned,
    StyleInjection,
    StyleSwap,
)

PROMPTS = ("a red cat", "a blue dog", "a green bird")
ALWAYS, NEVER = (0.0, 1.0), (0.0, 0.0)
RAMP = torch.linspace(0, 1, 6).reshape(2, 3)

# name -> (control for these steps, prompts it changes)
CONTROLS = {
    "style_swap": (lambda steps: StyleSwap(steps=steps), (1, 2)),
    "swap_query": (lambda steps: StyleSwap(negative="swap_query", steps=steps), (1, 2)),
    "style_aligned": (lambda steps: StyleAligned(scale=1.2, shift=0.3, steps=steps), (1, 2)),
    "full_share": (lambda steps: StyleAligned(full_attention_share=True, steps=steps), (0, 1, 2)),
    "injection": (lambda steps: StyleInjection(gamma=lambda step, site: 0.5, steps=steps), (0,)),
    "mutual": (lambda steps: MutualSelfAttention(steps=steps), (1, 2)),
    "union": (lambda steps: MutualSelfAttention(union=True, steps=steps), (1, 2)),
    "masked": (lambda steps: MutualSelfAttention(masks=(RAMP > 0.4, RAMP > 0.6), steps=steps), (1, 2)),
    "cross_image": (
        lambda steps: CrossImageAttention(half=steps, full=steps, guidance_steps=steps, swap_guidance=2), (0,)
    ),
    "no_contrast": (lambda steps: CrossImageAttention(contrast=1, half=steps, full=steps, swap_guidance=1), (0,)),
    "outer": (lambda steps: AttentionInterpolation([0, 0.3, 1], noise=None, steps=steps), (1,)),
    "inner": (
        lambda steps: AttentionInterpolation([0, 0.3, 1], form="inner", fused=False, noise=None, steps=steps), (1,)
    ),
    "mixture": (lambda steps: SketchMixture({0: 0.5, 1: 0.2}, steps=steps), (2,)),
    "blend": (lambda steps: QueryBlend({1: 1.0, 2: 0.5}, steps=steps), (0,)),
    "overlay": (lambda steps: ReferenceOverlay(RAMP, steps=steps), (0,)),
}  # fmt: skip
named = pytest.mark.parametrize("name", CONTROLS)
SIZES = {"height": 48, "width": 80}


@pytest.fixture(scope="module")
def plain():
    kept = {}

    def of(family, **options):
        key = (family.name, *sorted(options.items()))
        if key not in kept:
            kept[key] = sample(family, PROMPTS, num_inference_steps=2, **options)
        return kept[key]

    return of


@named
@pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)
def test_it_changes_its_rows_and_no_others(family, name, plain):
    """A picture that is not square, guided."""
    make, changed = CONTROLS[name]
    before = plain(family, **SIZES)
    after = sample(family, PROMPTS, make(ALWAYS), num_inference_steps=2, **SIZES)
    assert torch.isfinite(after).all()
    for row in range(len(PROMPTS)):
        assert torch.equal(after[row], before[row]) != (row in changed)


@named
@pytest.mark.parametrize("family", [FAMILIES["sd"], FAMILIES["flux"]], ids=lambda family: family.name)
def test_outside_its_steps_it_is_not_there(family, name, plain):
    make, _ = CONTROLS[name]
    assert torch.equal(sample(family, PROMPTS, make(NEVER), num_inference_steps=2), plain(family))


@named
@pytest.mark.parametrize("text", [0, 3])
def test_a_probe_is_linear_in_the_value(name, text):
    control, call = CONTROLS[name][0](ALWAYS), made(text=text, probe=True, grid=(2, 3))
    a = control.attention(call, attend)
    b = control.attention(call.replace(value=call.value.flip(2)), attend)
    both = control.attention(call.replace(value=2 * call.value - 3 * call.value.flip(2)), attend)
    torch.testing.assert_close(both, 2 * a - 3 * b, rtol=0, atol=1e-12)


@named
def test_images_of_a_prompt_read_their_own_reference(name):
    """Two images per prompt are two runs."""
    family, (make, _) = FAMILIES["sd"], CONTROLS[name]
    options = {"num_inference_steps": 1, "dtype": torch.float64}
    both = sample(family, PROMPTS, make(ALWAYS), images=2, **options)
    noise = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(6)]
    for image in range(2):
        latents = torch.cat([noise[2 * prompt + image] for prompt in range(3)])
        alone = sample(family, PROMPTS, make(ALWAYS), latents=latents, **options)
        torch.testing.assert_close(both[image::2], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, (_, changed) in CONTROLS.items() if len(changed) > 1])
def test_alike_rows_stay_alike(name):
    """Equal prompts and noises: what rows read is what they have, so all of them do the same."""
    make, _ = CONTROLS[name]
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).expand(3, -1, -1, -1)
    out = sample(FAMILIES["sd"], (PROMPTS[0],) * 3, make(ALWAYS), num_inference_steps=2, latents=latents)
    assert torch.equal(out[1], out[2])


@pytest.mark.parametrize("name", ["style_aligned", "injection"])
def test_a_compiled_denoiser_has_one_graph_for_all_steps(name):
    with seeded(0):
        model = PixArtTransformer2DModel(
            sample_size=4, num_layers=1, num_attention_heads=1, attention_head_dim=8, cross_attention_dim=8,
            caption_channels=8, in_channels=4, out_channels=4, norm_num_groups=1,
        ).eval()  # fmt: skip
    g = torch.Generator().manual_seed(0)
    sample_, text = torch.randn(3, 4, 4, 4, generator=g), torch.randn(3, 5, 8, generator=g)
    sizes = {"resolution": None, "aspect_ratio": None}

    @torch.no_grad()
    def outputs():
        with attach(model, CONTROLS[name][0](ALWAYS)) as run:
            for index in range(3):
                run.at(index, 3)
                yield model(sample_, text, torch.full((3,), 9 - index), sizes, return_dict=False)[0]

    eager = list(outputs())
    graphs = []
    torch.compiler.reset()
    model.compile(fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled = list(outputs())
    torch.compiler.reset()
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected)
    assert len(graphs) == 1
