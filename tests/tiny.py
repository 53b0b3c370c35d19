"""Tiny random-weight models of every family, in their real diffusers pipelines, so that `pipe(...)` runs end to end on a CPU.

    from tiny import FAMILIES
    family = FAMILIES["sd"]
    pipe = family.build(seed=0)
    latents = family.run(pipe, prompts=("a", "b"), cfg=True)          # (2, 4, 8, 8), the same bits every time
    images = family.run(pipe, output_type="pt")                       # through the VAE, where the family has one
    family.run(family.build(with_text=True), prompts=("a red cat",), text=True)

Rows are reproducible alone: a prompt's embedding depends on its text only, and row i draws its noise from its own generator,
`seed + i`.  So a run of B prompts and B runs of one prompt (with `seed=i`) compute the same thing, and equal prompts get equal embeddings.

Nothing here is trained.  Query and key projections are doubled after initialisation, so that softmax is neither flat nor one-hot.
Facts about each family stand in its build function and as data in `Family`; test_tiny.py measures every one of them.
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

NEGATIVE = ""          # the text of the uncond rows
TEXT_LENGTH = 8        # tokens of a made-up prompt embedding, padding included
T5_LENGTH = 16         # `max_sequence_length` for the pipelines with a T5, where the default of 256 or 512 is only slow


@dataclass(frozen=True)
class Family:
    """How to build and call one pipeline, and what its denoiser does (measured in test_tiny.py)."""
    name: str
    build: Callable[..., d.DiffusionPipeline]     # build(seed=0, dtype=torch.float32, with_text=False, **variant)
    embed: Callable[..., dict[str, Any]]          # embed(prompts, cfg, repeat, dtype) -> embeddings as keyword arguments
    sites: tuple[str, ...]                        # softmax-attention modules of the denoiser, in the order in which they run
    calls: tuple[tuple[str, ...], ...]            # per step, with CFG: the branches of each denoiser call, in row order
    contexts: tuple[str | None, ...]              # the `cache_context` name of each of these calls
    order: tuple[str, ...] | None                 # segments of a joint site, in key order; None: separate self- and cross-attention
    stride: int                                   # pixels per token side, at the highest resolution
    guidance: Mapping[str, Any]                   # arguments that switch CFG on
    no_guidance: Mapping[str, Any]                # and off
    size: tuple[int, int] = (64, 64)              # height, width in pixels
    odd_size: tuple[int, int] = (80, 112)         # not square, and latents no multiple of 8
    steps: int = 2                                # denoising steps run
    frames: int = 1                               # latent frames
    per_row: bool = False                         # one op call per batch row instead of one per site
    denoisers: tuple[str, ...] = ("transformer",)
    text_lengths: tuple[int, int] = (TEXT_LENGTH, TEXT_LENGTH)   # tokens at the op: prompts ("a", "b"), negative
    text_args: Mapping[str, Any] = field(default_factory=dict)   # extra arguments with `text=True`
    extra: Callable[..., dict[str, Any]] = lambda prompts, height, width: {}
    repeats: bool = False                         # the pipeline repeats given embeddings per image; else they come repeated
    images_arg: str = "num_images_per_prompt"

    @property
    def two_call(self) -> bool:
        return len(self.calls) == 2

    def inputs(self, pipe, prompts: Sequence[str] = ("a", "b"), *, cfg: bool = True, images: int = 1, height: int | None = None,
               width: int | None = None, dtype: torch.dtype | None = None, text: bool = False) -> dict[str, Any]:
        """Keyword arguments for `pipe(...)`, all but the generator.  `text=True` passes the prompts themselves, for pipelines built `with_text`."""
        height, width = height or self.size[0], width or self.size[1]
        dtype = dtype or getattr(pipe, self.denoisers[0]).dtype
        if text:
            prompt = {"prompt": list(prompts), **({"negative_prompt": [NEGATIVE] * len(prompts)} if cfg else {}), **self.text_args}
        else:
            prompt = self.embed(prompts, cfg, 1 if self.repeats else images, dtype)
        per_prompt = images if text or self.repeats else 1
        return {**prompt, self.images_arg: per_prompt, "height": height, "width": width, "num_inference_steps": self.steps,
                "output_type": "latent", **(self.guidance if cfg else self.no_guidance), **self.extra(prompts, height, width)}

    def run(self, pipe, *, prompts: Sequence[str] = ("a", "b"), cfg: bool = True, images: int = 1, height: int | None = None,
            width: int | None = None, seed: int = 0, text: bool = False, **overrides) -> Tensor:
        """The pipeline's latents, or what `output_type` asks for.  `overrides` replace arguments of the pipeline's call."""
        inputs = self.inputs(pipe, prompts, cfg=cfg, images=images, height=height, width=width, text=text)
        rows = len(prompts) * images
        inputs["generator"] = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
        return pipe(**{**inputs, **overrides, "return_dict": False})[0]


# Embeddings ---------------------------------------------------------------------------------------------------------------------

def embedding(prompts: Sequence[str], *shape: int, repeat: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the prompt's text and the shape only; each row `repeat` times, prompts outermost."""
    rows = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{prompt}|{shape}".encode()))
        rows.append(torch.randn(shape, generator=generator))
    return torch.stack(rows).repeat_interleave(repeat, 0).to(dtype)                         # (prompts * repeat, *shape)


def text_length(prompt: str) -> int:
    """Valid tokens of a prompt, for families with a text mask: 7 for "a", 6 for "b", 8 for the negative."""
    return TEXT_LENGTH - sum(prompt.encode()) % 3


def text_mask(prompts: Sequence[str], length: int, repeat: int = 1) -> Tensor:
    mask = torch.arange(length) < torch.tensor([text_length(p) for p in prompts])[:, None]
    return mask.long().repeat_interleave(repeat, 0)                                         # (prompts * repeat, length), 1 = valid


def with_negative(embeds: Callable[[Sequence[str]], dict[str, Tensor]], prompts: Sequence[str], cfg: bool) -> dict[str, Tensor]:
    negative = {f"negative_{name}": value for name, value in embeds([NEGATIVE] * len(prompts)).items()} if cfg else {}
    return embeds(prompts) | negative


def embed_plain(prompts, cfg, repeat, dtype, *, width: int):
    def embeds(texts):
        return {"prompt_embeds": embedding(texts, TEXT_LENGTH, width, repeat=repeat, dtype=dtype)}
    return with_negative(embeds, prompts, cfg)


# Text encoders ------------------------------------------------------------------------------------------------------------------

WORDS = """a an the and or of in on at to with without by for from is are as no not very photo painting drawing watercolor oil pencil sketch
image picture style portrait landscape red green blue yellow orange purple black white pink gray brown gold silver dark bright big small
large tiny old young happy sad fluffy wooden cat dog bird horse fox bear lion rabbit mouse fish owl man woman boy girl child person people
car bike boat train house castle tree forest flower rose mountain river lake sea beach sky sun moon star cloud snow rain night day city
street table chair book hat apple lemon cake bread bowl cup circle square triangle left right above below next behind under over holding
riding sitting standing running eating wearing jumping playing sleeping near between two three four""".split()


def tokenizer(bos: str | None, eos: str, pad: str, max_length: int) -> PreTrainedTokenizerFast:
    """One token per known word; any other word falls into its characters, so "zebra" has five tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-_"
    special = list(dict.fromkeys(s for s in (pad, eos, bos, "<unk>") if s))
    tokens = dict.fromkeys([*special, *WORDS, *letters, *("##" + c for c in letters)])
    backend = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos or ''} $A {eos}".strip(), special_tokens=[(s, list(tokens).index(s)) for s in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, unk_token="<unk>", model_max_length=max_length)


def clip_text(width: int, projection: int | None = None) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """A two-layer CLIP text encoder of 77 tokens, `projection`: the class with a projected pooled output."""
    tok = tokenizer("<|startoftext|>", "<|endoftext|>", "<|endoftext|>", 77)
    config = CLIPTextConfig(
        vocab_size=len(tok), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=projection or width,
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config), tok


def t5_text(width: int) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    tok = tokenizer(None, "</s>", "<pad>", 512)
    config = T5Config(vocab_size=len(tok), d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2,
                      pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, feed_forward_proj="gated-gelu")
    return T5EncoderModel(config), tok


# Building -----------------------------------------------------------------------------------------------------------------------

def autoencoder(**config) -> d.AutoencoderKL:
    """Eight pixels per latent, 4 latent channels, one attention site in each of the two mid blocks."""
    return d.AutoencoderKL(
        block_out_channels=(4, 4, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1, norm_num_groups=2, latent_channels=4, sample_size=64, **config)


def finished(pipe: d.DiffusionPipeline, dtype: torch.dtype) -> d.DiffusionPipeline:
    for name in ("unet", "transformer"):
        for module in getattr(pipe, name, nn.Identity()).modules():
            for projection in ("to_q", "to_k"):
                if isinstance(linear := getattr(module, projection, None), nn.Linear):
                    linear.weight.data.mul_(2)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
            cast(component, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As `from_pretrained(torch_dtype=...)`: some modules stay in float32, and what is not in the state dict (RoPE tables) stays as it is."""
    keep, saved = set(getattr(model, "_keep_in_fp32_modules", None) or ()), model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and tensor.is_floating_point() and not keep & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_sd(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False, prediction_type: str = "epsilon",
             pipeline: type = d.StableDiffusionPipeline) -> d.DiffusionPipeline:
    """SD1.x in small: 7 transformer blocks at latent scales 1, 1/2 and (mid block) 1/4, 2 heads, head_dim 8, 16, 16.

    One denoiser call per step, rows [uncond, cond], no `cache_context`.  14 op calls of shape (b, h, n, d): per block `attn1`
    (self, n = m = latent tokens at that scale), then `attn2` (cross, m = text tokens, no mask).
    """
    with seeded(seed):
        unet = d.UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32, 32), layers_per_block=1, attention_head_dim=2, cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=4)
        vae = autoencoder()
        encoder, tok = clip_text(16) if with_text else (None, None)
    scheduler = d.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                                set_alpha_to_one=False, steps_offset=1, prediction_type=prediction_type)
    return finished(pipeline(
        vae=vae, text_encoder=encoder, tokenizer=tok, unet=unet, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False), dtype)


def build_flux(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False, guidance_embeds: bool = True,
               pipeline: type = d.FluxPipeline) -> d.DiffusionPipeline:
    """FLUX.1 in small: 2 double and 2 single blocks, 2 heads of 16 channels, RoPE axes (4, 6, 6).

    One denoiser call per step (embedded guidance); with `true_cfg_scale` > 1 and a negative prompt two, cond first, in
    `cache_context("cond")` and `("uncond")` (FluxPipeline only; img2img enters no context).  4 op calls, each over [text, image]
    in double and single blocks alike, no mask.  Given embeddings are not repeated per image by the pipeline.
    """
    with seeded(seed):
        transformer = d.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            pooled_projection_dim=16, guidance_embeds=guidance_embeds, axes_dims_rope=(4, 6, 6))
        vae = autoencoder(shift_factor=0.1, scaling_factor=0.3611, use_quant_conv=False, use_post_quant_conv=False)
        (clip, clip_tok), (t5, t5_tok) = (clip_text(16), t5_text(32)) if with_text else ((None, None), (None, None))
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return finished(pipeline(scheduler=scheduler, vae=vae, text_encoder=clip, tokenizer=clip_tok, text_encoder_2=t5,
                             tokenizer_2=t5_tok, transformer=transformer), dtype)


def embed_pooled(prompts, cfg, repeat, dtype, *, width: int = 32):
    def embeds(texts):
        return {"prompt_embeds": embedding(texts, TEXT_LENGTH, width, repeat=repeat, dtype=dtype),
                "pooled_prompt_embeds": embedding(texts, 16, repeat=repeat, dtype=dtype)}
    return with_negative(embeds, prompts, cfg)


def build_sd3(seed: int = 0, dtype: torch.dtype = torch.float32, with_text: bool = False,
              dual_attention_layers: tuple[int, ...] = ()) -> d.DiffusionPipeline:
    """SD3 in small: 3 joint blocks (the last drops its text output), 2 heads of 16 channels, no RoPE.  `dual_attention_layers=(0, 1)`
    makes it SD3.5-M like: q/k norm, and a second, image-only self-attention `attn2` in these blocks.

    One denoiser call per step, rows [uncond, cond], no `cache_context`.  One op call per site, `attn` over [image, text] without a
    mask, `attn2` over the image.  Given embeddings are not repeated per image by the pipeline.
    """
    with seeded(seed):
        transformer = d.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=16,
            dual_attention_layers=dual_attention_layers, qk_norm="rms_norm" if dual_attention_layers else None)
        vae = autoencoder(shift_factor=0.0609, scaling_factor=1.5305, use_quant_conv=False, use_post_quant_conv=False)
        texts = [clip_text(8, 8), clip_text(8, 8), t5_text(32)] if with_text else [(None, None)] * 3
    (clip, tok), (clip_2, tok_2), (t5, tok_3) = texts
    return finished(d.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae, text_encoder=clip, tokenizer=tok,
        text_encoder_2=clip_2, tokenizer_2=tok_2, text_encoder_3=t5, tokenizer_3=tok_3), dtype)


# The table ----------------------------------------------------------------------------------------------------------------------

SD_SITES = tuple(
    f"{block}.transformer_blocks.0.attn{n}"
    for block in ("down_blocks.0.attentions.0", "down_blocks.1.attentions.0", "mid_block.attentions.0", "up_blocks.1.attentions.0",
                  "up_blocks.1.attentions.1", "up_blocks.2.attentions.0", "up_blocks.2.attentions.1")
    for n in (1, 2))
FLUX_SITES = (*(f"transformer_blocks.{i}.attn" for i in range(2)), *(f"single_transformer_blocks.{i}.attn" for i in range(2)))

ONE_CALL: dict[str, Any] = {"calls": (("uncond", "cond"),), "contexts": (None,)}
TWO_CALLS: dict[str, Any] = {"calls": (("cond",), ("uncond",)), "contexts": ("cond", "uncond")}
SCALE: dict[str, Any] = {"guidance": {"guidance_scale": 5.0}, "no_guidance": {"guidance_scale": 1.0}}
TRUE_CFG: dict[str, Any] = {"guidance": {"true_cfg_scale": 4.0}, "no_guidance": {"true_cfg_scale": 1.0}}

FAMILIES: dict[str, Family] = {f.name: f for f in (
    Family("sd", build_sd, partial(embed_plain, width=16), SD_SITES, **ONE_CALL, order=None, stride=8, **SCALE,
           odd_size=(72, 104), denoisers=("unet",), repeats=True),
    Family("flux", build_flux, embed_pooled, FLUX_SITES, **TWO_CALLS, order=("text", "image"), stride=16, **TRUE_CFG,
           text_args={"max_sequence_length": T5_LENGTH}),
    Family("sd3", build_sd3, embed_pooled, tuple(f"transformer_blocks.{i}.attn" for i in range(3)), **ONE_CALL,
           order=("image", "text"), stride=16, **SCALE, text_args={"max_sequence_length": T5_LENGTH}),
)}
