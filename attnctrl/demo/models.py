"""The two demo models: their sizes, how a pipeline is put together from parts, and how the shipped one is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from .autoencoder import PatchAutoencoder
from .scene import SIDE
from .tokenizers import LENGTH, clip_tokenizer, t5_tokenizer

NAMES = ("unet", "mmdit")
WEIGHTS = Path(__file__).parent / "weights"
PATCH, COMPONENTS, TEXT_WIDTH = 4, 16, 128


def check_name(name: str) -> str:
    """`name` itself, or an error that lists the models there are."""
    if name not in NAMES:
        raise ValueError(f"there is no demo model {name!r}; there are {', '.join(map(repr, NAMES))}")
    return name


def load(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The shipped demo pipeline: "unet" is a `StableDiffusionPipeline`, "mmdit" a `FluxPipeline`.

    Both make 64x64 pictures of captions as `prompts()` gives them. Nothing is downloaded. `defaults(name)` has the call
    arguments for good pictures."""
    return load_folder(name, WEIGHTS / check_name(name), dtype)


def load_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """A demo pipeline from a folder that `save_pretrained` wrote (the training's `pipeline/`, for example).

    `FluxPipeline.from_pretrained(folder)` works too once `attnctrl.demo` is imported; its pictures are 256x256 unless
    the call says `height=64, width=64`."""
    pipeline_class: Any = StableDiffusionPipeline if check_name(name) == "unet" else FluxPipeline
    with _quiet():
        return _finish(pipeline_class.from_pretrained(folder, dtype=dtype, local_files_only=True))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the loaders' progress bars and their remark on the autoencoder's class."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, (verbosity, bar) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            (library.enable_progress_bar if bar else library.disable_progress_bar)()


def defaults(name: str, prompts: int | None = None) -> dict[str, Any]:
    """The call arguments (steps, guidance, size) for good pictures: `pipe(prompt, **defaults(name)).images`.

    For a list of prompts say how many: FLUX pipelines want as many negative prompts."""
    size = {"height": SIDE, "width": SIDE}
    if check_name(name) == "unet":
        return {"num_inference_steps": 30, "guidance_scale": 4.0, **size}
    negative = "" if prompts is None else [""] * prompts
    return {
        "num_inference_steps": 30,
        "guidance_scale": 1.0,
        "negative_prompt": negative,
        "true_cfg_scale": 4.0,
        **size,
    }


def _finish(pipe: Any) -> Any:
    if hasattr(pipe, "default_sample_size"):
        pipe.default_sample_size = SIDE // pipe.vae_scale_factor  # else FLUX's own 128 latent pixels
    pipe.set_progress_bar_config(disable=True)
    return pipe


def new_parts(name: str, seed: int = 0) -> nn.ModuleDict:
    """Untrained parts under the names the pipeline gives them: the trainable ones and the autoencoder."""
    torch.manual_seed(seed)
    return nn.ModuleDict(_unet_parts() if check_name(name) == "unet" else _mmdit_parts())


def _clip_encoder(layers: int) -> CLIPTextModel:
    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        projection_dim=TEXT_WIDTH,
    )
    encoder = CLIPTextModel(config)
    embedding: Any = encoder.get_input_embeddings()
    nn.init.normal_(embedding.weight, std=0.3)
    return encoder


def _unet_parts() -> dict[str, nn.Module]:
    unet = UNet2DConditionModel(
        sample_size=SIDE // PATCH,
        in_channels=COMPONENTS,
        out_channels=COMPONENTS,
        block_out_channels=(96, 160),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=(3, 5),  # the number of heads, as in Stable Diffusion 1; 32 channels each
        norm_num_groups=16,
    )
    vae = PatchAutoencoder(PATCH, COMPONENTS, fold=1, latent_channels=COMPONENTS, block_out_channels=(1, 1, 1))
    return {"unet": unet, "text_encoder": _clip_encoder(2), "vae": vae}


def _mmdit_parts() -> dict[str, nn.Module]:
    transformer: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=COMPONENTS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=5,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    embedder = transformer.time_text_embed.guidance_embedder.linear_2
    nn.init.zeros_(embedder.weight)  # no effect of the guidance scale until it is distilled
    nn.init.zeros_(embedder.bias)
    tokenizer = t5_tokenizer()
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=LENGTH,
        )
    )
    _look_at_neighbours(t5)
    vae = PatchAutoencoder(PATCH, COMPONENTS, fold=2, latent_channels=COMPONENTS // 4, block_out_channels=(1, 1))
    return {"transformer": transformer, "text_encoder": _clip_encoder(1), "text_encoder_2": t5, "vae": vae}


@torch.no_grad()
def _look_at_neighbours(t5: Any) -> None:
    """Start the four heads on near words before, near words after, near words both ways, and all words.

    FLUX gives its text tokens no positions, so word order must come from this table. Gentle slopes leave room for the
    content: from a random table, or one that allows a single word, which attribute is whose was not learned."""
    table = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # (16 buckets, 4 heads)
    distance = torch.tensor([0.0, 1, 2, 3, 4.5, 7, 11, 17])  # of buckets 0-7, words before, and 8-15, words after
    table.zero_()
    for head, (slope, before, after) in enumerate(((1, 0, -4), (1, -4, 0), (0.5, 0, 0), (0, 0, 0))):
        table[:8, head] = before - slope * distance
        table[8:, head] = after - slope * distance


def assemble(name: str, parts: nn.ModuleDict) -> Any:
    """The pipeline of these parts, in evaluation mode."""
    parts = parts.eval()
    pipe: Any
    if check_name(name) == "unet":
        scheduler = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            steps_offset=1,
            set_alpha_to_one=True,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        )
        pipe = StableDiffusionPipeline(
            vae=parts["vae"],
            text_encoder=parts["text_encoder"],
            tokenizer=clip_tokenizer(),
            unet=parts["unet"],
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    else:
        pipe = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=parts["vae"],
            text_encoder=parts["text_encoder"],
            tokenizer=clip_tokenizer(),
            text_encoder_2=parts["text_encoder_2"],
            tokenizer_2=t5_tokenizer(),
            transformer=parts["transformer"],
        )
    return _finish(pipe)
