"""Model families as data: where their attention layers are, how tokens and rows are ordered, what they cannot do.

One `Family` per row; controls never ask what model they run on.  A model that is in no row is described by inspection
(`unknown`), and `attach` says what was assumed.  Names are those of diffusers 0.42.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .call import RowInputs, Segment, Site, Tokens
from .rope import Rope, frequencies

__all__ = [
    "FAMILIES",
    "Family",
    "Geometry",
    "family_of",
    "find_sites",
    "linear_layers",
    "seen_kind",
    "site_tokens",
    "unknown",
]


@dataclass(frozen=True)
class Geometry:
    """Sizes of one denoiser call.

    latent: the latent's own, (frames, height, width) or (height, width); empty where only `tokens`, their number, is
    known.  grid: the image's token grid, None for UNets, whose sites differ.  text: the text's length.  references:
    grids of reference images that follow the image tokens.  axis: the dimension of the latent's channels.  rope: of the
    tokens of self- and joint attention, None for models that do not rotate them.
    """

    latent: tuple[int, ...]
    grid: tuple[int, ...] | None = None
    text: int | None = None
    references: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0
    axis: int = 1
    rope: Rope | None = field(default=None, compare=False, repr=False)


Measure = Callable[[Mapping[str, Any], Any], Geometry]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    sites: (pattern of the module name, kind, place) of each attention layer, the pattern's group being the block number
    order: segments of a joint sequence, in order
    branches: rows of a batched classifier-free guidance call, in order; calls: branches of separate calls, in order
    measure: (inputs of forward, model) -> Geometry
    packed: 0 for latents with a height and width; for latents that are tokens, their channels per `out_channels` of the
    denoiser
    joint: the default of methods that know two forms of joint attention
    texts: the tokenizers whose tokens make the text sequence, in order, each with its length (None: what is left of the
    sequence); lowers: whether the pipeline lower-cases and strips prompts first
    refused: why no control can be attached; lacks: needs of controls that cannot be met
    along: how the inputs of forward lie along the rows
    """

    name: str
    models: tuple[str, ...]
    sites: tuple[tuple[str, str, str], ...]
    measure: Measure
    order: tuple[str, ...] = ()
    branches: tuple[str, ...] = ("uncond", "cond")
    calls: tuple[str, ...] = ()
    latent_input: str = "hidden_states"
    packed: int = 0
    joint: str = "exact"
    texts: tuple[tuple[str, int | None], ...] = (("tokenizer", None),)
    lowers: bool = False
    refused: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    along: RowInputs = field(default_factory=lambda: RowInputs(frozenset({"ip_adapter_masks"})))


def _text_length(inputs: Mapping[str, Any]) -> int | None:
    text = inputs.get("encoder_hidden_states")
    if isinstance(text, (tuple, list)):
        text = text[0]
    return text.shape[1] if isinstance(text, torch.Tensor) and text.ndim == 3 else None


def _unet(inputs: Mapping[str, Any], model: Any) -> Geometry:
    return Geometry(latent=tuple(inputs["sample"].shape[2:]), text=_text_length(inputs))


def _patched(inputs: Mapping[str, Any], model: Any) -> Geometry:
    latent = tuple(inputs["hidden_states"].shape[2:])
    patch = model.config.patch_size
    patches = tuple(patch) if isinstance(patch, Sequence) else (patch,) * len(latent)
    grid = tuple(size // p for size, p in zip(latent, patches, strict=True))
    return Geometry(latent=latent, grid=grid, text=_text_length(inputs))


def _wan(inputs: Mapping[str, Any], model: Any) -> Geometry:
    """Positions count frames, rows and columns from 0."""
    geometry = _patched(inputs, model)
    assert geometry.grid is not None
    channels = model.config.attention_head_dim
    side = 2 * (channels // 6)
    rope = _grid_rope(geometry.grid, (channels - 2 * side, side, side), inputs["hidden_states"].device)
    return dataclasses.replace(geometry, rope=rope)


def _flux(inputs: Mapping[str, Any], model: Any) -> Geometry:
    """FLUX position ids (tokens, 3): axis 0 is 0 for the image and 1, 2, ... for reference images; those of text are 0
    and come first."""
    ids, text = (inputs[name] for name in ("img_ids", "txt_ids"))
    known = _flux_ids.get(ids)
    if known is None or known[1]() is not text:
        own = (ids[0] if ids.ndim == 3 else ids).detach().float().cpu()
        grids = []
        for image in own[:, 0].unique(sorted=True).tolist():
            places = own[own[:, 0] == image][:, 1:]
            spans = places.amax(0) - places.amin(0) + 1
            grids.append((int(spans[0]), int(spans[1])))
        known = grids, weakref.ref(text), _flux_rope(text, ids, tuple(model.config.axes_dims_rope))
        _flux_ids[ids] = known
    grids, _, rope = known
    height, width = grids[0]
    return Geometry(
        latent=(2 * height, 2 * width),
        grid=grids[0],
        text=_text_length(inputs),
        references=tuple(grids[1:]),
        axis=2,
        rope=rope,
    )


_flux_ids = WeakIdKeyDictionary()  # by ids: a pipeline passes the same tensor all along, reading it waits for a GPU


@torch.inference_mode(False)  # what is kept must serve later calls that take gradients, too
def _flux_rope(text: torch.Tensor, image: torch.Tensor, axes: tuple[int, ...]) -> Rope:
    parts = [(ids[0] if ids.ndim == 3 else ids).detach().float() for ids in (text, image)]
    positions = torch.cat(parts).to(_angles(image.device))
    return Rope(positions, _frequencies(axes, image.device))


def _qwen(inputs: Mapping[str, Any], model: Any) -> Geometry:
    shapes = inputs["img_shapes"][0]
    shapes = [shapes] if isinstance(shapes[0], int) else shapes
    grids = [(h, w) if f == 1 else (f, h, w) for f, h, w in shapes]
    *frames, height, width = grids[0]
    text, config = _text_length(inputs), model.config
    return Geometry(
        latent=(*frames, 2 * height, 2 * width),
        grid=grids[0],
        text=text,
        references=tuple(grids[1:]),
        axis=2,
        rope=_qwen_rope(
            tuple(tuple(shape) for shape in shapes),
            text or 0,
            tuple(config.axes_dims_rope),
            bool(getattr(config, "use_layer3d_rope", False)),
            inputs["hidden_states"].device,
        ),
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _qwen_rope(
    shapes: tuple[tuple[int, ...], ...], text: int, axes: tuple[int, ...], layered: bool, device: torch.device
) -> Rope:
    """Qwen-Image positions: image i lies at i on the first axis (the condition of layered models at -1) and around 0 on
    the others; text follows along the diagonal, from half the longest side on."""
    images = []
    for i, (frames, height, width) in enumerate(shapes):
        last = layered and i == len(shapes) - 1
        first = -1 if last else i
        images.append(_places((first, -(height - height // 2), -(width - width // 2)), (frames, height, width)))
    start = max(max(height // 2, width // 2) for _, height, width in shapes)
    if layered:
        start = max(start, len(shapes) - 1)
    line = torch.arange(start, start + text, dtype=torch.float64, device="cpu")[:, None].expand(-1, 3)
    return Rope(torch.cat((line, *images)).to(device, _angles(device)), _frequencies(axes, device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _grid_rope(grid: tuple[int, ...], axes: tuple[int, ...], device: torch.device) -> Rope:
    return Rope(_places((0,) * len(grid), grid).to(device, _angles(device)), _frequencies(axes, device))


def _places(start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Positions (tokens, axes) of a grid that begins at `start`."""
    lines = [torch.arange(a, a + n, dtype=torch.float64, device="cpu") for a, n in zip(start, size, strict=True)]
    return torch.cartesian_prod(*lines)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _frequencies(axes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(frequencies(dim).to(device, _angles(device)) for dim in axes)


def _angles(device: torch.device) -> torch.dtype:
    """What positions are kept in: float64 where the device has it."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


_UNET_SITES = (
    *(
        (rf"{block}.*\.{attn}", kind, place)
        for place, block in (
            ("down", r"down_blocks\.(\d+)\."),
            ("mid", r"mid_block()\."),
            ("up", r"up_blocks\.(\d+)\."),
        )
        for attn, kind in (("attn1", "self"), ("attn2", "cross"))
    ),
    (r"down_blocks\.(\d+)\.attentions\.\d+", "added", "down"),
    (r"mid_block()\.attentions\.\d+", "added", "mid"),
    (r"up_blocks\.(\d+)\.attentions\.\d+", "added", "up"),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="sd",
        models=("UNet2DConditionModel",),
        sites=_UNET_SITES,
        measure=_unet,
        latent_input="sample",
        lacks={"rope": "its positions come from convolutions"},
    ),
    Family(
        name="flux",
        models=("FluxTransformer2DModel",),
        sites=(
            (r"transformer_blocks\.(\d+)\.attn", "joint", "double"),
            (r"single_transformer_blocks\.(\d+)\.attn", "joint", "single"),
        ),
        measure=_flux,
        order=("text", "image", "references"),
        calls=("cond", "uncond"),
        packed=1,
        texts=(("tokenizer_2", None),),
        along=RowInputs(frozenset({"img_ids", "txt_ids", "ip_adapter_masks"})),
    ),
    Family(
        name="sd3",
        models=("SD3Transformer2DModel",),
        sites=(
            (r"transformer_blocks\.(\d+)\.attn", "joint", "double"),
            (r"transformer_blocks\.(\d+)\.attn2", "self", "double"),
        ),
        measure=_patched,
        order=("image", "text"),
        joint="image_qk",
        texts=(("tokenizer", 77), ("tokenizer_3", None)),
        lacks={"rope": "its positions are added to the hidden states"},
    ),
    Family(
        name="pixart",
        models=("PixArtTransformer2DModel",),
        sites=(
            (r"transformer_blocks\.(\d+)\.attn1", "self", "block"),
            (r"transformer_blocks\.(\d+)\.attn2", "cross", "block"),
        ),
        measure=_patched,
        lowers=True,
        lacks={"rope": "its positions are added to the hidden states"},
    ),
    Family(
        name="qwen",
        models=("QwenImageTransformer2DModel",),
        sites=((r"transformer_blocks\.(\d+)\.attn", "joint", "double"),),
        measure=_qwen,
        order=("text", "image", "references"),
        calls=("cond", "uncond"),
        packed=4,
        along=RowInputs(listed=frozenset({"img_shapes"})),
    ),
    Family(
        name="wan",
        models=("WanTransformer3DModel",),
        sites=((r"blocks\.(\d+)\.attn1", "self", "block"), (r"blocks\.(\d+)\.attn2", "cross", "block")),
        measure=_wan,
        calls=("cond", "uncond"),
    ),
    Family(
        name="mochi",
        models=("MochiTransformer3DModel",),
        sites=((r"transformer_blocks\.(\d+)\.attn1", "joint", "double"),),
        measure=_patched,
        refused=(
            "it runs one attention operation per batch row, each with its own text length, so rows never meet in "
            "one call"
        ),
    ),
)


def _generic(inputs: Mapping[str, Any], model: Any) -> Geometry:
    latents, text = inputs[_latent_input(model)], _text_length(inputs)
    if latents.ndim < 4:
        return Geometry(latent=(), text=text, tokens=latents.shape[1], axis=2)
    channels = getattr(model.config, "in_channels", None)
    axis = 2 if latents.ndim == 5 and latents.shape[1] != channels == latents.shape[2] else 1  # frames may come first
    return Geometry(latent=tuple(n for d, n in enumerate(latents.shape) if d not in (0, axis)), text=text, axis=axis)


def _latent_input(model: torch.nn.Module) -> str:
    names = inspect.signature(type(model).forward).parameters
    return next((name for name in ("sample", "hidden_states", "x") if name in names), "hidden_states")


def unknown(model: torch.nn.Module) -> Family:
    """A family by inspection: self and cross sites; joint ones are found but their segments are not known."""
    latent_input = _latent_input(model)
    takes = inspect.signature(type(model).forward).parameters.get(latent_input)
    listed = takes is not None and str(takes.annotation).startswith(("list", "List", "typing.List"))
    return Family(
        name=f"unknown ({type(model).__name__})",
        models=(type(model).__name__,),
        sites=(),
        measure=_generic,
        latent_input=latent_input,
        refused=f"it takes {latent_input!r} as a list, not as one tensor with a row per image" if listed else "",
        assumed=(
            "sites are the modules with a `processor`; kinds from their names, projections and numbers of tokens",
            "guidance in one call holds the uncond rows first; in two calls, cond is the first call",
            f"latents are the input {latent_input!r}",
            "the order of text and image in joint attention is unknown: controls that need segments are refused",
        ),
        lacks={
            "segments": "the order of its tokens is not in the table",
            "rope": "its rotary embedding is not in the table",
        },
        along=RowInputs(sure=False),
    )


def family_of(model: torch.nn.Module) -> Family:
    """The table's row for this denoiser, by class name (subclasses included), else `unknown`."""
    names = {cls.__name__ for cls in type(model).__mro__}
    for family in FAMILIES:
        if names.intersection(family.models):
            return family
    return unknown(model)


def find_sites(model: torch.nn.Module, family: Family, denoiser: str) -> list[tuple[torch.nn.Module, Site]]:
    """Every softmax-attention layer of the denoiser with its module, in order of execution."""
    found = []
    for name, module in model.named_modules():
        place = _place(name, module, family) if hasattr(module, "processor") and not _is_linear(module) else None
        if place is None:
            continue
        kind, where, block = place
        heads = int(getattr(module, "heads", 0))
        inner = getattr(module, "inner_dim", None) or getattr(getattr(module, "to_q", None), "out_features", 0)
        site = Site(
            name=name,
            kind=kind,
            place=where,
            block=block,
            heads=heads,
            head_dim=(inner or 0) // heads if heads else 0,
            scale=_scale(where, block, model, family),
            denoiser=denoiser,
        )
        found.append((module, site))
    rank = {"down": 0, "mid": 1, "up": 2}
    found.sort(key=lambda entry: rank.get(entry[1].place, 0))  # stable: named_modules lists up_blocks before mid_block
    return [(module, dataclasses.replace(site, index=i)) for i, (module, site) in enumerate(found)]


def _place(name: str, module: torch.nn.Module, family: Family) -> tuple[str, str, int] | None:
    for pattern, kind, place in family.sites:
        match = re.fullmatch(pattern, name)
        if match:
            if kind == "cross" and getattr(module, "is_cross_attention", True) is False:
                kind = "self"
            return kind, place, int(match[1] or 0)
    if family.sites:
        return None
    number = re.search(r"\.(\d+)\.", f".{name}.")
    place = next((p for p in ("down", "mid", "up") if name.startswith(f"{p}_block")), "block")
    if getattr(module, "added_kv_proj_dim", None) is not None:
        kind = "joint"
    else:
        q, k = getattr(module, "to_q", None), getattr(module, "to_k", None)
        crosses = getattr(module, "is_cross_attention", None)
        if crosses is None:
            crosses = q is not None and k is not None and q.in_features != k.in_features
        kind = "cross" if crosses else "self"
        if kind == "self" and re.search(r"temp|motion|transformer_in\b", name):
            kind = "temporal"
        elif kind == "self" and "refiner" in name:
            kind = "refiner"
    return kind, place, int(number[1]) if number else 0


def seen_kind(kind: str, queries: int, keys: int, images: Sequence[int], text: int | None) -> str:
    """The kind of an operation of a transformer that is in no row, whose site was taken for `kind` from its module.

    images: the numbers of tokens that an image, or one frame of it, can have.
    """
    if kind != "self":
        return kind
    if queries != keys:
        return "cross" if keys == text else "added"
    if queries in images:
        return kind
    return "refiner" if queries == text else "joint"


def _scale(place: str, block: int, model: Any, family: Family) -> int:
    if hasattr(model, "down_blocks"):
        deepest = len(model.down_blocks) - 1
        return 2 ** {"down": block, "mid": deepest, "up": deepest - block}.get(place, 0)
    patch = getattr(getattr(model, "config", None), "patch_size", 1)
    if family.packed:
        return 2
    return int(patch[-1] if isinstance(patch, Sequence) else patch or 1)


def _coarser(size: int, scale: int) -> int:
    while scale > 1:
        size, scale = -(-size // 2), scale // 2
    return size


def site_tokens(site: Site, family: Family, geometry: Geometry) -> tuple[Tokens, Tokens]:
    """Segments of the queries and of the keys at this site for sizes `geometry`."""
    grid = geometry.grid or tuple(_coarser(size, site.scale) for size in geometry.latent) or None
    image: list[Any] = [("image", math.prod(grid) if grid else geometry.tokens, grid)]
    references: list[Any] = [(f"reference:{i}", math.prod(sizes), sizes) for i, sizes in enumerate(geometry.references)]
    text: list[Any] = [("text", geometry.text or 0, None)]
    if site.kind == "cross":
        return _line(image + references), _line(text)
    if site.kind == "added":
        return _line(image + references), _line(text + image + references)
    own = _line(image + references)
    if site.kind == "joint":
        parts: dict[str, list[Any]] = {"image": image, "text": text, "references": references}
        own = _line([part for name in family.order for part in parts[name]])
    if geometry.rope is not None and len(geometry.rope) == own.length:
        own = dataclasses.replace(own, rope=geometry.rope)
    return own, own


def linear_layers(model: torch.nn.Module) -> list[str]:
    """Names of attention layers without a softmax, which no control can reach."""
    return [name for name, module in model.named_modules() if _is_linear(module)]


def _is_linear(module: torch.nn.Module) -> bool:
    return "Linear" in type(getattr(module, "processor", None)).__name__


def _line(parts: Sequence[tuple[str, int, tuple[int, ...] | None]]) -> Tokens:
    segments, start = [], 0
    for name, length, grid in parts:
        segments.append(Segment(name, start, length, grid))
        start += length
    return Tokens(tuple(segments))
