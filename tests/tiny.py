"""Tiny random-weight models of every family, in their real diffusers pipelines, so that `pipe(...)` runs end to end
on a CPU.

    from tiny import FAMILIES
    family = FAMILIES["sd"]
    pipe = family.build(seed=0)
    latents = family.run(pipe, prompts=("a", "b"), cfg=True)          # (2, 4, 8, 8), the same bits every time
    images = family.run(pipe, output_type="pt")                       # through the VAE, where the family has one
    family.run(family.build(with_text=True), prompts=("a red cat",), text=True)

Rows are reproducible alone: a prompt's embedding depends on its text only, and row i draws its noise from its own
generator, `seed + i`. So a run of B prompts and B runs of one prompt (with `seed=i`) compute the same thing, and
equal prompts get equal embeddings.

Nothing here is trained. Query and key projections are doubled after initialisation, so that softmax is neither flat
nor one-hot. Facts about each family stand in its build function and as data in `Family`; test_tiny.py measures
every one of them.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers as d
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

NEGATIVE = ""  # the text of the uncond rows
TEXT_LENGTH = 8  # tokens of a made-up prompt embedding, padding included
T5_LENGTH = 16  # `max_sequence_length` for the pipelines with a T5, where the default of 256 or 512 is only slow


def plain_size(rows: int, height: int, width: int) -> dict[str, Any]:
    return {"height": height, "width": width}


@dataclass(frozen=True)
class Family:
    """How to build and call one pipeline, and what its denoiser does (measured in test_tiny.py)."""

    name: str
    build: Callable[..., d.DiffusionPipeline]  # build(seed=0, dtype=torch.float32, with_text=False)
    embed: Callable[..., dict[str, Any]]  # embed(prompts, cfg, repeat, dtype) -> keyword arguments
    sites: tuple[str, ...]  # softmax-attention modules of a denoiser, as they run
    calls: tuple[tuple[str, ...], ...]  # per step with CFG: branches of each denoiser call, in row order
    contexts: tuple[str | None, ...]  # the `cache_context` name of each of these calls
    guidance: Mapping[str, Any]  # arguments that switch CFG on
    no_guidance: Mapping[str, Any]  # and off
    order: tuple[str, ...] | None  # segments of a joint site, in key order; None: self and cross
    stride: int  # pixels per token side, at the highest resolution
    size: tuple[int, int] = (64, 64)  # height, width in pixels
    odd_size: tuple[int, int] = (80, 112)  # not square, and latents no multiple of 8
    steps: int = 2  # denoising steps run
    shape: Callable[..., dict[str, Any]] = plain_size  # shape(rows, height, width) -> keyword arguments
    strength: float = 1.0  # part of `steps` that runs
    frames: int = 1  # latent frames
    denoisers: tuple[str, ...] = ("transformer",)
    rowwise: bool = False  # one op call per row and site, instead of one per site
    pooling: int = 0  # op calls before the first site (text pooling)
    masked: bool = False  # the made-up prompts differ in length, with a text mask
    repeats: bool = False  # the pipeline repeats given embeddings per image; else we do
    text: bool = False  # `with_text` builds text encoders and tokenizers
    text_args: Mapping[str, Any] = field(default_factory=dict)  # extra arguments with `text=True`
    images_arg: str = "num_images_per_prompt"

    @property
    def two_call(self) -> bool:
        return len(self.calls) == 2

    def inputs(
        self,
        pipe,
        prompts: Sequence[str] = ("a", "b"),
        *,
        cfg: bool = True,
        images: int = 1,
        height: int | None = None,
        width: int | None = None,
        dtype: torch.dtype | None = None,
        text: bool = False,
    ) -> dict[str, Any]:
        """Keyword arguments for `pipe(...)`, all but the generator. `text=True` passes the prompts themselves, for
        pipelines built `with_text`.
        """
        height, width = height or self.size[0], width or self.size[1]
        dtype = dtype or getattr(pipe, self.denoisers[0]).dtype
        if text:
            prompt = {"prompt": list(prompts), **self.text_args}
            if cfg:
                prompt["negative_prompt"] = [NEGATIVE] * len(prompts)
        else:
            prompt = self.embed(prompts, cfg, 1 if self.repeats else images, dtype)
        per_prompt = images if text or self.repeats else 1
        return {
            **prompt,
            self.images_arg: per_prompt,
            "num_inference_steps": self.steps,
            "output_type": "latent",
            **(self.guidance if cfg else self.no_guidance),
            **self.shape(len(prompts) * images, height, width),
        }

    def run(
        self,
        pipe,
        *,
        prompts: Sequence[str] = ("a", "b"),
        cfg: bool = True,
        images: int = 1,
        height: int | None = None,
        width: int | None = None,
        seed: int = 0,
        text: bool = False,
        **overrides,
    ) -> Tensor:
        """The pipeline's latents, or what `output_type` asks for. `overrides` replace arguments of the pipeline's
        call.
        """
        inputs = self.inputs(pipe, prompts, cfg=cfg, images=images, height=height, width=width, text=text)
        rows = len(prompts) * images
        inputs["generator"] = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
        return pipe(**{**inputs, **overrides, "return_dict": False})[0]


# Embeddings ----------------------------------------------------------------------------------------------------------


def embedding(prompts: Sequence[str], *shape: int, repeat: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the prompt's text and the shape only; each row `repeat` times, prompts
    outermost.
    """
    rows = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{prompt}|{shape}".encode()))
        rows.append(torch.randn(shape, generator=generator))
    return torch.stack(rows).repeat_interleave(repeat, 0).to(dtype)  # (prompts * repeat, *shape)


def text_length(prompt: str) -> int:
    """Valid tokens of a prompt, for families with a text mask: 7 for "a", 6 for "b", 8 for the negative."""
    return TEXT_LENGTH - sum(prompt.encode()) % 3


def text_mask(prompts: Sequence[str], repeat: int = 1) -> Tensor:
    mask = torch.arange(TEXT_LENGTH) < torch.tensor([text_length(p) for p in prompts])[:, None]
    return mask.long().repeat_interleave(repeat, 0)  # (prompts * repeat, tokens), 1 = valid


def with_negative(embeds: Callable[[Sequence[str]], dict[str, Tensor]], prompts: Sequence[str], cfg: bool):
    negative = embeds([NEGATIVE] * len(prompts)) if cfg else {}
    return {**embeds(prompts), **{f"negative_{name}": value for name, value in negative.items()}}


def embed_plain(prompts, cfg, repeat, dtype, *, width: int):
    def embeds(texts):
        return {"prompt_embeds": embedding(texts, TEXT_LENGTH, width, repeat=repeat, dtype=dtype)}

    return with_negative(embeds, prompts, cfg)


def embed_pooled(prompts, cfg, repeat, dtype, *, width: int = 32):
    def embeds(texts):
        return {
            "prompt_embeds": embedding(texts, TEXT_LENGTH, width, repeat=repeat, dtype=dtype),
            "pooled_prompt_embeds": embedding(texts, 16, repeat=repeat, dtype=dtype),
        }

    return with_negative(embeds, prompts, cfg)


def embed_masked(prompts, cfg, repeat, dtype, *, width: int = 32):
    """Prompts of different lengths, padded to the same length in all rows."""

    def embeds(texts):
        return {
            "prompt_embeds": embedding(texts, TEXT_LENGTH, width, repeat=repeat, dtype=dtype),
            "prompt_attention_mask": text_mask(texts, repeat),
        }

    return with_negative(embeds, prompts, cfg)


def embed_pixart(prompts, cfg, repeat, dtype):
    return {**embed_masked(prompts, cfg, repeat, dtype), "negative_prompt": None}  # its default "" clashes


def embed_qwen(prompts, cfg, repeat, dtype):
    """Prompts of different lengths, each call padded to its own longest prompt: cond and uncond calls differ in
    length.
    """

    def embeds(texts):
        length = max(text_length(text) for text in texts)
        return {
            "prompt_embeds": embedding(texts, TEXT_LENGTH, 32, repeat=repeat, dtype=dtype)[:, :length],
            "prompt_embeds_mask": text_mask(texts, repeat)[:, :length],
        }

    return with_negative(embeds, prompts, cfg)


# Text encoders -------------------------------------------------------------------------------------------------------

VOCABULARY = """
a an the and or of in on at to with without by for from is are as no not very photo painting drawing watercolor oil
pencil sketch image picture style portrait landscape red green blue yellow orange purple black white pink gray brown
gold silver dark bright big small large tiny old young happy sad fluffy wooden cat dog bird horse fox bear lion rabbit
mouse fish owl man woman boy girl child person people car bike boat train house castle tree forest flower rose mountain
river lake sea beach sky sun moon star cloud snow rain night day city street table chair book hat apple lemon cake
bread bowl cup circle square triangle left right above below next behind under over holding riding sitting standing
running eating wearing jumping playing sleeping near between two three four
"""
WORDS = VOCABULARY.split()


def tokenizer(bos: str | None, eos: str, pad: str, max_length: int) -> PreTrainedTokenizerFast:
    """One token per known word; any other word falls into its characters, so "zebra" has five tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-_"
    special = list(dict.fromkeys(s for s in (pad, eos, bos, "<unk>") if s))
    tokens = dict.fromkeys([*special, *WORDS, *letters, *("##" + c for c in letters)])
    backend = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos or ''} $A {eos}".strip(), special_tokens=[(s, list(tokens).index(s)) for s in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token="<unk>",
        model_max_length=max_length,
    )


def clip_text(width: int, projection: int | None = None) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """A two-layer CLIP text encoder of 77 tokens, `projection`: the class with a projected pooled output."""
    tok = tokenizer("<|startoftext|>", "<|endoftext|>", "<|endoftext|>", 77)
    config = CLIPTextConfig(
        vocab_size=len(tok),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=projection or width,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config), tok


def t5_text(width: int) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    tok = tokenizer(None, "</s>", "<pad>", 512)
    config = T5Config(
        vocab_size=len(tok),
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        pad_token_id=tok.pad_token_id,
        eos_token_id=tok.eos_token_id,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config), tok


# Building ------------------------------------------------------------------------------------------------------------


def autoencoder(**config) -> d.AutoencoderKL:
    """Eight pixels per latent, 4 latent channels, one attention site in each of the two mid blocks."""
    return d.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        block_out_channels=(4, 4, 8, 8),
        norm_num_groups=2,
        latent_channels=4,
        sample_size=64,
        **config,
    )


def finished(pipe: d.DiffusionPipeline, dtype: torch.dtype) -> d.DiffusionPipeline:
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            for path, module in component.named_modules():
                if name in ("unet", "transformer", "transformer_2") and path.endswith((".to_q", ".to_k")):
                    module.weight.data.mul_(2)
            component.eval().requires_grad_(False)
            cast(component, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As `from_pretrained(torch_dtype=...)`: some modules stay in float32, and what is not in the state dict (RoPE
    tables) stays as it is.
    """
    keep, saved = set(getattr(model, "_keep_in_fp32_modules", None) or ()), model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and tensor.is_floating_point() and not keep & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_sd(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_text: bool = False,
    prediction_type: str = "epsilon",
    pipeline: type = d.StableDiffusionPipeline,
) -> d.DiffusionPipeline:
    """SD1.x in small: 7 transformer blocks at latent scales 1, 1/2 and (mid block) 1/4, 2 heads of 8, 16, 16.

    One denoiser call per step, rows [uncond, cond], no `cache_context`. 14 op calls of shape (b, h, n, d): per
    block `attn1` (self, n = m = latent tokens at that scale), then `attn2` (cross, m = text tokens, no mask).
    """
    with seeded(seed):
        unet = d.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=16,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )
        vae = autoencoder()
        encoder, tok = clip_text(16) if with_text else (None, None)
    scheduler = d.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    return finished(
        pipeline(
            vae=vae,
            text_encoder=encoder,
            tokenizer=tok,
            unet=unet,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
        dtype,
    )


def build_flux(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_text: bool = False,
    guidance_embeds: bool = True,
    pipeline: type = d.FluxPipeline,
) -> d.DiffusionPipeline:
    """FLUX.1 in small: 2 double and 2 single blocks, 2 heads of 16 channels, RoPE axes (4, 6, 6).

    One denoiser call per step (embedded guidance); with `true_cfg_scale` > 1 and a negative prompt two, cond first,
    in `cache_context("cond")` and `("uncond")` (FluxPipeline only; img2img enters no context). 4 op calls, each
    over [text, image] in double and single blocks alike, no mask. Given embeddings are not repeated per image by
    the pipeline.
    """
    with seeded(seed):
        transformer = d.FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        )
        vae = autoencoder(shift_factor=0.1, scaling_factor=0.3611, use_quant_conv=False, use_post_quant_conv=False)
        (clip, clip_tok), (t5, t5_tok) = (clip_text(16), t5_text(32)) if with_text else ((None, None), (None, None))
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return finished(
        pipeline(
            scheduler=scheduler,
            vae=vae,
            text_encoder=clip,
            tokenizer=clip_tok,
            text_encoder_2=t5,
            tokenizer_2=t5_tok,
            transformer=transformer,
        ),
        dtype,
    )


def build_sd3(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_text: bool = False,
    dual_attention_layers: tuple[int, ...] = (),
) -> d.DiffusionPipeline:
    """SD3 in small: 3 joint blocks (the last drops its text output), 2 heads of 16 channels, no RoPE.
    `dual_attention_layers=(0, 1)` makes it SD3.5-M like: q/k norm, and a second, image-only self-attention `attn2`
    in these blocks.

    One denoiser call per step, rows [uncond, cond], no `cache_context`. One op call per site, `attn` over [image,
    text] without a mask, `attn2` over the image. Given embeddings are not repeated per image by the pipeline.
    """
    with seeded(seed):
        transformer = d.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            pos_embed_max_size=16,
            dual_attention_layers=dual_attention_layers,
            qk_norm="rms_norm" if dual_attention_layers else None,
        )
        vae = autoencoder(shift_factor=0.0609, scaling_factor=1.5305, use_quant_conv=False, use_post_quant_conv=False)
        texts = [clip_text(8, 8), clip_text(8, 8), t5_text(32)] if with_text else [(None, None)] * 3
    (clip, tok), (clip_2, tok_2), (t5, tok_3) = texts
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return finished(
        d.StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=scheduler,
            vae=vae,
            text_encoder=clip,
            tokenizer=tok,
            text_encoder_2=clip_2,
            tokenizer_2=tok_2,
            text_encoder_3=t5,
            tokenizer_3=tok_3,
        ),
        dtype,
    )


def build_sdxl(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False) -> d.DiffusionPipeline:
    """SDXL in small: no attention at full latent scale, 1 transformer block per attention at 1/2 (2 heads of 8), 2
    at 1/4 (4 heads of 8).

    One denoiser call per step, rows [uncond, cond], no `cache_context`; `added_cond_kwargs` holds `text_embeds` and
    `time_ids`, both row-aligned. 22 op calls, as in SD.
    """
    with seeded(seed):
        unet = d.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 16, 32),
            layers_per_block=1,
            attention_head_dim=(2, 2, 4),
            transformer_layers_per_block=(1, 1, 2),
            cross_attention_dim=32,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        )
        vae = autoencoder(scaling_factor=0.13025, force_upcast=False)
        (clip, tok), (clip_2, tok_2) = (clip_text(16), clip_text(16, 16)) if with_text else ((None, None), (None, None))
    scheduler = d.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
    )
    return finished(
        d.StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=clip,
            text_encoder_2=clip_2,
            tokenizer=tok,
            tokenizer_2=tok_2,
            unet=unet,
            scheduler=scheduler,
            add_watermarker=False,
        ),
        dtype,
    )


def build_pixart(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False) -> d.DiffusionPipeline:
    """PixArt-Sigma in small: 2 blocks of self- and cross-attention, 2 heads of 16 channels, no RoPE, prediction
    with variance.

    One denoiser call per step, rows [uncond, cond], no `cache_context`. 4 op calls: `attn1` (self), then `attn2`
    (cross, with an additive float mask of shape (b, h, 1, m) from the text mask).
    """
    with seeded(seed):
        transformer = d.PixArtTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
            norm_num_groups=4,
        )
        vae = autoencoder(scaling_factor=0.13025)
        encoder, tok = t5_text(32) if with_text else (None, None)
    scheduler = d.DPMSolverMultistepScheduler(timestep_spacing="leading", steps_offset=1)
    return finished(
        d.PixArtSigmaPipeline(
            tokenizer=tok, text_encoder=encoder, vae=vae, transformer=transformer, scheduler=scheduler
        ),
        dtype,
    )


def build_qwen(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False) -> d.DiffusionPipeline:
    """Qwen-Image in small: 2 double blocks, 2 heads of 16 channels, RoPE axes (4, 6, 6) as complex numbers, no VAE.

    With `true_cfg_scale` > 1 and a negative prompt two denoiser calls per step, cond first, in
    `cache_context("cond")` and `("uncond")`; their text lengths differ. One op call per site over [text, image],
    with a boolean mask (b, 1, 1, m) only in calls with padded text: the pipeline drops a mask of ones. With several
    prompts of different lengths and several images per prompt, diffusers 0.42.1 repeats embeddings as [1, 1, 2, 2]
    but masks as [1, 2, 1, 2]: rows then see the wrong prompt's mask.
    """
    assert not with_text, "the text encoder of Qwen-Image is a vision-language model"
    with seeded(seed):
        transformer = d.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        )
    scheduler = d.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    return finished(
        d.QwenImagePipeline(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=transformer),
        dtype,
    )


def build_wan(
    seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False, two_experts: bool = False
) -> d.DiffusionPipeline:
    """Wan 2.1 text-to-video in small: 2 blocks, 2 heads of 12 channels, RoPE axes (4, 4, 4), 2 latent frames, no
    VAE. `two_experts=True` makes it Wan 2.2 A14B like: `transformer` for high noise, `transformer_2` for the rest.

    With CFG two denoiser calls per step, cond first, in `cache_context("cond")` and `("uncond")` (with step_index,
    sigma). 4 op calls without masks: `attn1` (self, over all frames, frame-major), then `attn2` (cross). Given
    embeddings are not repeated per video.
    """
    assert not with_text, "no tiny text encoder for Wan"

    def transformer():
        return d.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        )

    with seeded(seed):
        first, second = transformer(), transformer() if two_experts else None
    scheduler = d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return finished(
        d.WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=scheduler,
            transformer=first,
            transformer_2=second,
            boundary_ratio=0.875 if two_experts else None,
        ),
        dtype,
    )


def build_mochi(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False) -> d.DiffusionPipeline:
    """Mochi in small: 2 joint blocks (the last drops its text output), 2 heads of 16 channels, learned RoPE, 2
    latent frames, no VAE.

    One denoiser call per step, rows [uncond, cond], in `cache_context("cond_uncond")`. One op call of batch 1 per
    *row* and site, over [video, valid text tokens of that row], without a mask; before them one pooling call over
    the text with a boolean mask. Given embeddings are not repeated per video.
    """
    assert not with_text, "no tiny text encoder for Mochi"
    with seeded(seed):
        transformer = d.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            pooled_projection_dim=32,
            in_channels=4,
            text_embed_dim=32,
            time_embed_dim=32,
            max_sequence_length=TEXT_LENGTH,
        )
        nn.init.normal_(transformer.pos_frequencies)  # zero at initialisation, which would be no RoPE at all
    return finished(
        d.MochiPipeline(
            scheduler=d.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            vae=None,
            text_encoder=None,
            tokenizer=None,
            transformer=transformer,
        ),
        dtype,
    )


def video_size(frames: int) -> Callable[..., dict[str, Any]]:
    return lambda rows, height, width: {"height": height, "width": width, "num_frames": frames}


def picture_input(rows: int, height: int, width: int) -> dict[str, Any]:
    """A colour gradient, once per row: fewer images are tiled as [1, 2, 1, 2], while prompts stand [1, 1, 2, 2]."""
    down, right = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    image = torch.stack([down, right, (down + right) / 2]).repeat(rows, 1, 1, 1)  # (rows, 3, height, width)
    return {"image": image, "strength": 0.5}


# The table -----------------------------------------------------------------------------------------------------------


def unet_sites(*blocks: str) -> tuple[str, ...]:
    return tuple(f"{block}.attn{n}" for block in blocks for n in (1, 2))


SD_SITES = unet_sites(
    *(
        f"{block}.transformer_blocks.0"
        for block in (
            "down_blocks.0.attentions.0",
            "down_blocks.1.attentions.0",
            "mid_block.attentions.0",
            "up_blocks.1.attentions.0",
            "up_blocks.1.attentions.1",
            "up_blocks.2.attentions.0",
            "up_blocks.2.attentions.1",
        )
    )
)
SDXL_SITES = unet_sites(
    *(
        f"{block}.transformer_blocks.{i}"
        for depth, block in (
            (1, "down_blocks.1.attentions.0"),
            (2, "down_blocks.2.attentions.0"),
            (2, "mid_block.attentions.0"),
            (2, "up_blocks.0.attentions.0"),
            (2, "up_blocks.0.attentions.1"),
            (1, "up_blocks.1.attentions.0"),
            (1, "up_blocks.1.attentions.1"),
        )
        for i in range(depth)
    )
)
FLUX_SITES = (
    "transformer_blocks.0.attn",
    "transformer_blocks.1.attn",
    "single_transformer_blocks.0.attn",
    "single_transformer_blocks.1.attn",
)
SD3_SITES = tuple(f"transformer_blocks.{i}.attn" for i in range(3))
SD35_SITES = (
    "transformer_blocks.0.attn",
    "transformer_blocks.0.attn2",
    "transformer_blocks.1.attn",
    "transformer_blocks.1.attn2",
    "transformer_blocks.2.attn",
)

ONE_CALL: dict[str, Any] = {
    "calls": (("uncond", "cond"),),
    "contexts": (None,),
    "guidance": {"guidance_scale": 5.0},
    "no_guidance": {"guidance_scale": 1.0},
}
TWO_CALLS: dict[str, Any] = {**ONE_CALL, "calls": (("cond",), ("uncond",)), "contexts": ("cond", "uncond")}
TRUE_CFG: dict[str, Any] = {**TWO_CALLS, "guidance": {"true_cfg_scale": 4.0}, "no_guidance": {"true_cfg_scale": 1.0}}
T5_TEXT: dict[str, Any] = {"text": True, "text_args": {"max_sequence_length": T5_LENGTH}}
SD: dict[str, Any] = {
    **ONE_CALL,
    "order": None,
    "stride": 8,
    "odd_size": (72, 104),
    "denoisers": ("unet",),
    "repeats": True,
    "text": True,
}
FLUX: dict[str, Any] = {**TRUE_CFG, "order": ("text", "image"), "stride": 16, **T5_TEXT}
SD3: dict[str, Any] = {**ONE_CALL, "order": ("image", "text"), "stride": 16, **T5_TEXT}
WAN: dict[str, Any] = {
    **TWO_CALLS,
    "order": None,
    "stride": 16,
    "frames": 2,
    "shape": video_size(5),
    "images_arg": "num_videos_per_prompt",
}
IMG2IMG: dict[str, Any] = {"steps": 4, "strength": 0.5}
embed_sd, embed_wan = partial(embed_plain, width=16), partial(embed_plain, width=32)

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("sd", build_sd, embed_sd, SD_SITES, **SD),
        Family("sdxl", build_sdxl, embed_pooled, SDXL_SITES, **{**SD, "stride": 16}),
        Family("flux", build_flux, embed_pooled, FLUX_SITES, **FLUX),
        Family("sd3", build_sd3, embed_pooled, SD3_SITES, **SD3),
        Family(
            "pixart",
            build_pixart,
            embed_pixart,
            unet_sites("transformer_blocks.0", "transformer_blocks.1"),
            **ONE_CALL,
            order=None,
            stride=16,
            masked=True,
            repeats=True,
            text=True,
            text_args={"max_sequence_length": T5_LENGTH, "clean_caption": False},
            shape=lambda rows, height, width: {"height": height, "width": width, "use_resolution_binning": False},
        ),
        Family(
            "qwen",
            build_qwen,
            embed_qwen,
            ("transformer_blocks.0.attn", "transformer_blocks.1.attn"),
            **TRUE_CFG,
            order=("text", "image"),
            stride=16,
            masked=True,
            repeats=True,
        ),
        Family("wan", build_wan, embed_wan, unet_sites("blocks.0", "blocks.1"), **WAN),
        Family(
            "mochi",
            build_mochi,
            embed_masked,
            ("transformer_blocks.0.attn1", "transformer_blocks.1.attn1"),
            **{**ONE_CALL, "contexts": ("cond_uncond",)},
            order=("image", "text"),
            stride=16,
            frames=2,
            shape=video_size(7),
            masked=True,
            rowwise=True,
            pooling=1,
            images_arg="num_videos_per_prompt",
        ),
    )
}

VARIANTS: dict[str, Family] = {
    f.name: f
    for f in (
        Family("sd_v", partial(build_sd, prediction_type="v_prediction"), embed_sd, SD_SITES, **SD),
        Family(
            "sd_img2img",
            partial(build_sd, pipeline=d.StableDiffusionImg2ImgPipeline),
            embed_sd,
            SD_SITES,
            **SD,
            **IMG2IMG,
            shape=picture_input,
        ),
        Family(
            "flux_img2img",
            partial(build_flux, pipeline=d.FluxImg2ImgPipeline),
            embed_pooled,
            FLUX_SITES,
            **{**FLUX, "contexts": (None, None)},
            **IMG2IMG,
            shape=lambda *size: plain_size(*size) | picture_input(*size),
        ),
        Family("sd35", partial(build_sd3, dual_attention_layers=(0, 1)), embed_pooled, SD35_SITES, **SD3),
        Family(
            "wan22",
            partial(build_wan, two_experts=True),
            embed_wan,
            unet_sites("blocks.0", "blocks.1"),
            **{**WAN, "denoisers": ("transformer", "transformer_2")},
        ),
    )
}


# Watching a run ------------------------------------------------------------------------------------------------------


@dataclass
class Op:
    """One call of `F.scaled_dot_product_attention`, tensors as it received them, (b, h, n, d)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None


@dataclass
class DenoiserCall:
    denoiser: str
    context: str | None  # name of the `cache_context` it ran in
    inputs: dict[str, Any]  # keyword arguments of its forward
    ops: list[Op] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)  # attention modules entered, in order


@contextlib.contextmanager
def watch(pipe: d.DiffusionPipeline, family: Family) -> Iterator[list[DenoiserCall]]:
    """Record every denoiser call of an untouched pipeline, and the op calls in it; those of text encoders and VAE
    are not recorded.
    """
    calls: list[DenoiserCall] = []
    running: list[DenoiserCall] = []
    context: list[str] = []
    handles, shadowed = [], []
    for name in family.denoisers:
        denoiser = getattr(pipe, name)

        def enter(module, args, kwargs, name=name):
            calls.append(DenoiserCall(name, context[-1] if context else None, kwargs))
            running.append(calls[-1])

        handles.append(denoiser.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(denoiser.register_forward_hook(lambda *_: running.clear(), always_call=True))
        for path, module in denoiser.named_modules():
            if hasattr(module, "processor"):
                handles.append(module.register_forward_pre_hook(lambda *_, path=path: running[-1].sites.append(path)))
        if hasattr(denoiser, "cache_context"):

            @contextlib.contextmanager
            def named(name, *args, original=denoiser.cache_context, **kwargs):
                context.append(name)
                try:
                    with original(name, *args, **kwargs):
                        yield
                finally:
                    context.pop()

            denoiser.cache_context = named
            shadowed.append(denoiser)
    original_op = F.scaled_dot_product_attention

    def op(query, key, value, attn_mask=None, *args, **kwargs):
        if running:
            running[-1].ops.append(Op(query, key, attn_mask))
        return original_op(query, key, value, attn_mask, *args, **kwargs)

    F.scaled_dot_product_attention = op
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = original_op
        for handle in handles:
            handle.remove()
        for denoiser in shadowed:
            del denoiser.cache_context
