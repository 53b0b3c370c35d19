"""Pipelines and tools of diffusers next to the engine: caches, offloading, casting, other inputs and rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as d
import pytest
import tiny
import torch
from tiny import FAMILIES

from attnctrl import attach

SD, FLUX = FAMILIES["sd"], FAMILIES["flux"]


class Nothing:
    """Acts on every level, changes nothing, and writes down what it saw."""

    def __init__(self) -> None:
        self.branches: list[tuple[str, ...]] = []
        self.latents: list[tuple[int, ...]] = []
        self.folds: set[int] = set()
        self.attended = 0

    def attention(self, call, attend):
        self.attended += 1
        self.folds.add(call.rows.fold)
        return attend(call)

    def denoise(self, call, denoise):
        self.branches.append(call.rows.branch)
        self.latents.append(tuple(call.latents.shape))
        return denoise(call)

    def step(self, call, step):
        return step(call)


def same_bits(pipe: Any, run: Any) -> Nothing:
    """Run detached, attached and detached again."""
    expected, nothing = run(), Nothing()
    with attach(pipe, nothing):
        assert torch.equal(run(), expected)
    assert torch.equal(run(), expected)
    return nothing


def unet_pipeline(kind: type, in_channels: int = 4, **extra: Any) -> Any:
    """A pipeline of another kind over the tiny UNet, made with other input channels."""
    pipe = SD.build()
    if in_channels != 4:
        config = {**pipe.unet.config, "in_channels": in_channels}
        config.pop("_use_default_values")
        with tiny.seeded(0):
            pipe.unet = d.UNet2DConditionModel.from_config(config).eval()
    components = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    other = kind(**components, **extra, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


CACHES = {
    "pyramid attention": partial(
        d.PyramidAttentionBroadcastConfig, spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000), current_timestep_callback=lambda: 500,
    ),
    "taylor": partial(d.TaylorSeerCacheConfig, cache_interval=2, disable_cache_before_step=1),
}  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
def test_caches_that_skip_attention_may_stay_on(cache):
    pipe = FLUX.build()
    steps = 4
    pipe.transformer.enable_cache(CACHES[cache]())
    seen = same_bits(pipe, lambda: FLUX.run(pipe, cfg=False, num_inference_steps=steps))
    assert 0 < seen.attended < steps * len(FLUX.sites)


@pytest.mark.parametrize("first", [True, False])
def test_group_offloading_changes_no_bit(first):
    pipe = SD.build()
    expected = SD.run(pipe)

    def offload():
        here = torch.device("cpu")
        pipe.unet.enable_group_offload(here, here, offload_type="block_level", num_blocks_per_group=1)

    if first:
        offload()
    with attach(pipe, nothing := Nothing()):
        if not first:
            offload()
        assert torch.equal(SD.run(pipe), expected)
    assert torch.equal(SD.run(pipe), expected)
    assert nothing.attended == SD.steps * len(SD.sites)


@pytest.mark.parametrize("first", [True, False])
def test_weights_kept_in_eight_bits_change_no_bit(first):
    pipe = SD.build(dtype=torch.bfloat16)

    def cast():
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)

    if first:
        cast()
    with attach(pipe, Nothing()):
        if not first:
            cast()
        attached = SD.run(pipe)
    assert torch.equal(attached, SD.run(pipe))


def test_gradient_checkpointing_runs_attention_through_the_chain_again():
    unet = SD.build().unet.train()
    sample, text = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(2, 5, 16)

    def gradient():
        return torch.autograd.grad(unet(sample, 3, text).sample.sum(), sample)[0]

    expected = gradient()
    unet.enable_gradient_checkpointing()
    with attach(unet, nothing := Nothing()) as run:
        run.at(0, 1)
        assert torch.equal(gradient(), expected)
    assert nothing.attended > len(SD.sites)


def test_autocast_changes_no_bit():
    pipe = SD.build()
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(pipe, lambda: SD.run(pipe))


def test_a_controlnet_is_not_a_denoiser():
    net = d.ControlNetModel.from_unet(SD.build().unet, conditioning_channels=3).eval()
    pipe = unet_pipeline(d.StableDiffusionControlNetPipeline, controlnet=net)
    seen = same_bits(pipe, lambda: SD.run(pipe, image=torch.ones(2, 3, 64, 64)))
    assert seen.attended == SD.steps * len(SD.sites)


def test_inpainting_gives_the_four_channels_of_the_latents():
    pipe = unet_pipeline(d.StableDiffusionInpaintPipeline, in_channels=9)
    mask = torch.zeros(2, 1, 64, 64)
    mask[..., :32] = 1
    seen = same_bits(pipe, lambda: SD.run(pipe, image=torch.ones(2, 3, 64, 64), mask_image=mask))
    assert set(seen.latents) == {(2, 4, 8, 8)}


def test_instructions_have_three_branches():
    pipe = unet_pipeline(d.StableDiffusionInstructPix2PixPipeline, in_channels=8)

    def run():
        inputs = SD.inputs(pipe, ("a", "b"), cfg=True, images=1)
        del inputs["height"], inputs["width"]
        generator = [torch.Generator().manual_seed(i) for i in range(2)]
        image = torch.ones(2, 3, 64, 64)
        return pipe(**inputs, image=image, image_guidance_scale=1.5, generator=generator, return_dict=False)[0]

    seen = same_bits(pipe, run)
    assert set(seen.branches) == {("cond", "cond", "image", "image", "uncond", "uncond")}
    assert set(seen.latents) == {(2, 4, 8, 8)}


def test_a_reference_image_is_no_part_of_the_latents():
    pipe = d.FluxKontextPipeline(**FLUX.build().components)
    pipe.set_progress_bar_config(disable=True)
    image = torch.ones(1, 3, 64, 64)
    options = {"prompts": ("a",), "cfg": False, "max_area": 64 * 64, "_auto_resize": False}
    seen = same_bits(pipe, lambda: FLUX.run(pipe, image=image, **options))
    assert set(seen.latents) == {(1, 16, 16)}


def test_rows_of_unknown_branches_are_refused():
    pipe = unet_pipeline(d.StableDiffusionPAGPipeline, pag_applied_layers="mid")
    with pytest.raises(ValueError, match="got 6 rows, but 2 prompts"), attach(pipe, Nothing()):
        SD.run(pipe, pag_scale=2.0)


def test_a_spatio_temporal_unet_folds_frames_or_pixels_into_the_batch():
    with tiny.seeded(0):
        unet = d.UNetSpatioTemporalConditionModel(
            sample_size=8, block_out_channels=(32, 64), in_channels=8, out_channels=4, layers_per_block=1,
            num_attention_heads=(2, 2), cross_attention_dim=16, addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        ).eval()  # fmt: skip
    frames, video = 3, torch.randn(2, 3, 8, 8, 8)

    @torch.no_grad()
    def run():
        return unet(video, 5, torch.ones(2, 1, 16), added_time_ids=torch.ones(2, 3)).sample

    expected = run()
    with pytest.warns(UserWarning, match="not in the table"), attach(unet, nothing := Nothing()) as handle:
        handle.at(0, 1)
        assert torch.equal(run(), expected)
    assert nothing.folds == {frames, 64, 16}
