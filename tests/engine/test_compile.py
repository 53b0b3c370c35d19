"""Compiled denoisers beyond the plain case: graphs made before attaching, several models, what may not be compiled."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from tiny import seeded

from attnctrl import attach


class Halved:
    """A pure control: a function of the call's tensors."""

    def __init__(self, kinds: set[str] | None = None) -> None:
        self.kinds = kinds

    def attention(self, call, attend):
        return attend(call) * 0.5


class Graphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small_unet(seed=0):
    """One resolution, six attention layers: what takes time is tracing."""
    with seeded(seed):
        return UNet2DConditionModel(
            sample_size=8, block_out_channels=(8,), layers_per_block=1, attention_head_dim=2, cross_attention_dim=16,
            norm_num_groups=4, mid_block_type=None, down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
        ).eval()  # fmt: skip


@torch.no_grad()
def call(unet, timestep=3):
    generator = torch.Generator().manual_seed(0)
    sample, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 16, generator=generator)
    return unet(sample, torch.tensor(timestep), text, return_dict=False)[0]


def controlled(unet, control, timesteps=(3,)):
    with attach(unet, control) as run:
        results = []
        for i, timestep in enumerate(timesteps):
            run.at(i, len(timesteps))
            results.append(call(unet, timestep))
    return results


def test_one_graph_without_and_one_with_controls_serve_every_step_and_every_run():
    unet = small_unet()
    steps = (9, 5, 1)
    plain, eager = call(unet), controlled(unet, Halved({"cross"}), steps)
    graphs = Graphs()
    unet.compile(fullgraph=True, backend=graphs)
    for _ in range(2):
        torch.testing.assert_close(call(unet), plain)
        for ours, theirs in zip(controlled(unet, Halved({"cross"}), steps), eager, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert graphs.count == 2


def test_compiled_models_of_one_class_do_not_mix():
    unets = [small_unet(seed) for seed in range(2)]
    plain = [call(unet) for unet in unets]
    eager = [controlled(unet, Halved())[0] for unet in unets]
    for unet in unets:
        unet.compile(fullgraph=True, backend="eager")
    with attach(unets[0], Halved()) as run:
        run.at(0, 1)
        torch.testing.assert_close(call(unets[0]), eager[0])
        torch.testing.assert_close(call(unets[1]), plain[1])
        torch.testing.assert_close(controlled(unets[1], Halved())[0], eager[1])
        torch.testing.assert_close(call(unets[1]), plain[1])
        torch.testing.assert_close(call(unets[0]), eager[0])
    for unet, expected in zip(unets, plain, strict=True):
        torch.testing.assert_close(call(unet), expected)


def test_a_compiled_caller_of_the_denoiser_is_told_to_compile_the_denoiser():
    unet = small_unet()

    @torch.compile(backend="eager", fullgraph=True)
    def caller(sample, text):
        return unet(sample, 3, text, return_dict=False)[0] * 2

    run = attach(unet, Halved())
    with pytest.raises(Exception, match="traced from outside; compile the denoiser itself"):
        caller(torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16))
    run.close()


def test_attention_outside_the_denoiser_compiles_as_if_nothing_was_attached():
    other = Attention(query_dim=8, heads=2, dim_head=4).eval()
    x = torch.randn(1, 3, 8)
    expected = other(x)
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    run = attach(small_unet(), Halved())
    torch.testing.assert_close(compiled(x), expected)
    run.close()
    torch.testing.assert_close(compiled(x), expected)
