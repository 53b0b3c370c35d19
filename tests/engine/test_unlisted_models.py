"""Denoisers beyond the table: what is told of them by inspection, and pipelines around the ones that are in it."""

from __future__ import annotations

import contextlib
from typing import Any

import diffusers as d
import pytest
import tiny
import torch
from tiny import FAMILIES
from torch import Tensor, nn

from attnctrl import attach

FRAMES, TEXT = 3, 5


class Watch:
    """Changes nothing; keeps the calls."""

    def __init__(self) -> None:
        self.attentions: list[Any] = []
        self.denoised: list[Any] = []

    def attention(self, call, attend):
        self.attentions.append(call)
        return attend(call)

    def denoise(self, call, denoise):
        self.denoised.append(call)
        return denoise(call)


class Fresh(Watch):
    """Gives the denoiser equal latents that are another object, so that its input is built anew."""

    def denoise(self, call, denoise):
        self.denoised.append(call)
        return denoise(call.replace(latents=call.latents.clone()))


def unet(cls: type, down: str, up: str, **config: Any) -> nn.Module:
    return cls(
        block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=16,
        down_block_types=(f"CrossAttnDownBlock{down}", f"DownBlock{down}"),
        up_block_types=(f"UpBlock{up}", f"CrossAttnUpBlock{up}"), **config)  # fmt: skip


def animatediff() -> tuple[nn.Module, dict[str, Any]]:
    model = unet(
        d.UNetMotionModel, "Motion", "Motion", norm_num_groups=4, num_attention_heads=2, motion_num_attention_heads=2
    )
    return model, {
        "sample": torch.randn(2, 4, FRAMES, 8, 8),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.randn(2 * FRAMES, TEXT, 16),
    }


def video_diffusion() -> tuple[nn.Module, dict[str, Any]]:
    model = unet(
        d.UNetSpatioTemporalConditionModel, "SpatioTemporal", "SpatioTemporal", num_attention_heads=2,
        num_frames=FRAMES, addition_time_embed_dim=32, projection_class_embeddings_input_dim=96, in_channels=8,
        out_channels=4)  # fmt: skip
    return model, {
        "sample": torch.randn(2, FRAMES, 8, 8, 8),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.randn(2, 1, 16),
        "added_time_ids": torch.randn(2, 3),
    }


def dit() -> tuple[nn.Module, dict[str, Any]]:
    model = d.DiTTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        out_channels=8, num_embeds_ada_norm=10, norm_elementwise_affine=False, norm_type="ada_norm_zero",
        activation_fn="gelu-approximate")  # fmt: skip
    ones = torch.tensor([1, 1])
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": ones, "class_labels": ones}


def cogview3() -> tuple[nn.Module, dict[str, Any]]:
    model = d.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=2, out_channels=4,
        text_embed_dim=8, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=8)  # fmt: skip
    pairs = torch.tensor([[2, 2]] * 2)
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 1]),
        "encoder_hidden_states": torch.randn(2, TEXT, 8), "original_size": pairs, "target_size": pairs,
        "crop_coords": 0 * pairs,
    }  # fmt: skip


def ltx() -> tuple[nn.Module, dict[str, Any]]:
    model = d.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=1, caption_channels=16)  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 32, 8), "timestep": torch.tensor([1, 1]), "num_frames": 2, "height": 4,
        "width": 4, "encoder_hidden_states": torch.randn(2, TEXT, 16),
        "encoder_attention_mask": torch.ones(2, TEXT).bool(),
    }  # fmt: skip


def lumina2() -> tuple[nn.Module, dict[str, Any]]:
    model = d.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=[4, 2, 2], axes_lens=[128, 128, 128],
        cap_feat_dim=32)  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 16), "timestep": torch.rand(2),
        "encoder_hidden_states": torch.randn(2, TEXT, 32), "encoder_attention_mask": torch.ones(2, TEXT).bool(),
    }  # fmt: skip


def kandinsky() -> tuple[nn.Module, dict[str, Any]]:
    model = d.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, in_channels=4, out_channels=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), cross_attention_dim=16,
        attention_head_dim=4, norm_num_groups=4, encoder_hid_dim=16, encoder_hid_dim_type="text_proj",
        resnet_time_scale_shift="scale_shift")  # fmt: skip
    return model, {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.randn(2, TEXT, 16),
    }


# kinds of the operations, and the sizes (queries, keys) and folds of each
SEEN: dict[str, tuple[Any, dict[str, set[tuple[int, int, int]]]]] = {
    "animatediff": (animatediff, {
        "self": {(64, 64, FRAMES), (16, 16, FRAMES)}, "cross": {(64, TEXT, FRAMES), (16, TEXT, FRAMES)},
        "temporal": {(FRAMES, FRAMES, 64), (FRAMES, FRAMES, 16)}}),
    "video_diffusion": (video_diffusion, {
        "self": {(64, 64, FRAMES), (16, 16, FRAMES)},
        "cross": {(64, 1, FRAMES), (16, 1, FRAMES), (FRAMES, 1, 64), (FRAMES, 1, 16)},
        "temporal": {(FRAMES, FRAMES, 64), (FRAMES, FRAMES, 16)}}),
    "dit": (dit, {"self": {(16, 16, 1)}}),
    "cogview3": (cogview3, {"joint": {(16 + TEXT, 16 + TEXT, 1)}}),
    "ltx": (ltx, {"self": {(32, 32, 1)}, "cross": {(32, TEXT, 1)}}),
    "lumina2": (lumina2, {"refiner": {(TEXT, TEXT, 1), (64, 64, 1)}, "joint": {(64 + TEXT, 64 + TEXT, 1)}}),
    "kandinsky": (kandinsky, {"added": {(16, 16 + TEXT, 1)}}),
}  # fmt: skip


def built(make: Any) -> tuple[nn.Module, dict[str, Any]]:
    with tiny.seeded(0):
        model, inputs = make()
    return model.eval().requires_grad_(False), inputs


@pytest.mark.filterwarnings("ignore:.*is not in the table")
@pytest.mark.parametrize("name", SEEN)
def test_operations_of_models_beyond_the_table_have_the_kinds_they_show(name):
    model, inputs = built(SEEN[name][0])
    expected = model(**inputs)[0]
    watch = Watch()
    with attach(model, watch):
        assert torch.equal(model(**inputs)[0], expected)
    seen: dict[str, set[tuple[int, int, int]]] = {}
    for call in watch.attentions:
        sizes = call.query.shape[2], call.key.shape[2], call.table.fold
        seen.setdefault(call.kind, set()).add(sizes)
        for tokens, x in ((call.query_tokens, call.query), (call.key_tokens, call.key)):
            assert not tokens.segments or tokens.length == x.shape[2]
    assert seen == SEEN[name][1]


@pytest.mark.filterwarnings("ignore:.*is not in the table")
@pytest.mark.parametrize("name", SEEN)
def test_latents_of_models_beyond_the_table_can_be_built_anew(name):
    model, inputs = built(SEEN[name][0])
    expected, fresh = model(**inputs)[0], Fresh()
    with attach(model, fresh):
        assert torch.equal(model(**inputs)[0], expected)
    latents = fresh.denoised[0].latents
    given = inputs.get("sample", inputs.get("hidden_states"))
    own = list(given.shape)
    if name == "video_diffusion":
        own[2] = 4  # the other four channels are the conditioning image's
    assert list(latents.shape) == own


def test_added_keys_are_text_before_image():
    model, inputs = built(kandinsky)
    watch = Watch()
    with attach(model, watch):
        model(**inputs)
    for call in watch.attentions:
        names = [(part.name, part.start, part.length) for part in call.key_tokens.segments]
        assert names == [("text", 0, TEXT), ("image", TEXT, 16)]
        assert call.grid == (4, 4)


def test_models_that_take_lists_are_refused_with_the_reason():
    model = d.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[64, 32, 32])  # fmt: skip
    with pytest.raises(ValueError, match="ZImageTransformer2DModel cannot be controlled: it takes 'x' as a list"):
        attach(model, Watch())


@pytest.mark.filterwarnings("ignore:.*is not in the table")
def test_layers_of_linear_attention_are_named_at_attach():
    model = d.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
        sample_size=4, mlp_ratio=1.0)  # fmt: skip
    with pytest.warns(UserWarning, match="2 layers of the transformer have linear attention.*transformer_blocks.0"):
        attach(model, Watch()).close()


def test_a_cache_that_skips_layers_is_named_at_attach():
    pipe = FAMILIES["flux"].build()
    pipe.transformer.enable_cache(d.FirstBlockCacheConfig(threshold=0.0))
    with pytest.warns(UserWarning, match="the transformer has a cache"):
        attach(pipe, Watch()).close()


def cogview4(pipeline: type) -> Any:
    with tiny.seeded(0):
        transformer = d.CogView4Transformer2DModel(
            patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, out_channels=4,
            text_embed_dim=16, time_embed_dim=8, condition_dim=4, rope_axes_dim=(16, 16))  # fmt: skip
        vae = tiny.autoencoder()
    scheduler = d.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
    )
    pipe = pipeline(tokenizer=None, text_encoder=None, vae=vae, transformer=transformer, scheduler=scheduler)
    return tiny.finished(pipe, torch.float32)


@pytest.mark.filterwarnings("ignore:.*is not in the table")
@pytest.mark.parametrize("contexts", [True, False], ids=["in a cache context", "by order"])
def test_two_calls_of_a_model_beyond_the_table_are_cond_and_uncond(contexts):
    pipe = cogview4(d.CogView4Pipeline)
    if not contexts:
        pipe.transformer.cache_context = lambda name: contextlib.nullcontext()
    embeds, negative = torch.randn(2, 2, 16, 16)

    def run(scale):
        return pipe(
            prompt_embeds=embeds, negative_prompt_embeds=negative, height=64, width=64, num_inference_steps=2,
            guidance_scale=scale, output_type="latent", return_dict=False,
            generator=torch.Generator().manual_seed(0))[0]  # fmt: skip

    for scale, branches in ((5.0, ["cond", "uncond"] * 2), (1.0, ["cond"] * 2)):
        expected = run(scale)
        with attach(pipe, watch := Watch()):
            assert torch.equal(run(scale), expected)
        assert [set(call.rows.branch) for call in watch.denoised] == [{branch} for branch in branches]


# -- pipelines that feed the denoiser more than latents

SD, FLUX = FAMILIES["sd"], FAMILIES["flux"]
SIZE = {"height": 64, "width": 64}


def widened(model: nn.Module, **config: Any) -> nn.Module:
    kept = {name: value for name, value in model.config.items() if not name.startswith("_")}
    with tiny.seeded(0):
        return type(model).from_config({**kept, **config}).eval().requires_grad_(False)


def around(pipe: Any, cls: type, without: tuple[str, ...] = (), **components: Any) -> Any:
    kept = {name: part for name, part in pipe.components.items() if name not in without}
    extra = {"requires_safety_checker": False} if "safety_checker" in kept else {}
    made = cls(**{**kept, **components}, **extra)
    made.set_progress_bar_config(disable=True)
    return made


def picture() -> Tensor:
    return torch.linspace(0, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64)


def square() -> Tensor:
    mask = torch.zeros(2, 1, 64, 64)
    mask[:, :, 16:48, 16:48] = 1
    return mask


def inpaint() -> tuple[Any, dict[str, Any]]:
    sd = SD.build()
    scheduler = d.EulerDiscreteScheduler.from_config(sd.scheduler.config)
    pipe = around(sd, d.StableDiffusionInpaintPipeline, unet=widened(sd.unet, in_channels=9), scheduler=scheduler)
    return pipe, {"image": picture(), "mask_image": square(), "guidance_scale": 5.0, **SIZE}


def pix2pix() -> tuple[Any, dict[str, Any]]:
    sd = SD.build()
    pipe = around(
        sd, d.StableDiffusionInstructPix2PixPipeline, unet=widened(sd.unet, in_channels=8),
        scheduler=d.EulerDiscreteScheduler.from_config(sd.scheduler.config))  # fmt: skip
    return pipe, {"image": picture(), "guidance_scale": 5.0, "image_guidance_scale": 1.5}


def kontext() -> tuple[Any, dict[str, Any]]:
    pipe = around(FLUX.build(), d.FluxKontextPipeline)
    return pipe, {"image": picture()[:1], "max_area": 64 * 64, "_auto_resize": False, **SIZE}


def fill() -> tuple[Any, dict[str, Any]]:
    flux = FLUX.build()
    wide = widened(flux.transformer, in_channels=16 + 16 + 256, out_channels=16)
    without = ("image_encoder", "feature_extractor")
    pipe = around(flux, d.FluxFillPipeline, without, transformer=wide)
    return pipe, {"image": picture(), "mask_image": square(), **SIZE}


FED = {
    "inpaint": (inpaint, SD, (2, 4, 8, 8), ("uncond", "cond")),
    "pix2pix": (pix2pix, SD, (2, 4, 8, 8), ("cond", "image", "uncond")),
    "kontext": (kontext, FLUX, (2, 16, 16), ("cond",)),
    "fill": (fill, FLUX, (2, 16, 16), ("cond",)),
}


@pytest.mark.parametrize("name", FED)
def test_what_a_pipeline_appends_to_the_latents_stays_when_they_are_built_anew(name):
    make, family, shape, branches = FED[name]
    pipe, extra = make()
    embeds = family.embed(("a", "b"), family is SD, 1, torch.float32)

    def run():
        return pipe(
            **embeds, **extra, num_inference_steps=2, output_type="latent", return_dict=False,
            generator=torch.Generator().manual_seed(0))[0]  # fmt: skip

    expected, fresh = run(), Fresh()
    with attach(pipe, fresh):
        assert torch.equal(run(), expected)
    assert torch.equal(run(), expected)
    for call in fresh.denoised:
        assert call.latents.shape == shape
        assert call.rows.table() == [(branch, prompt, 0, "") for branch in branches for prompt in range(2)]
        assert call.step.total == 2
