"""The end of the chain: one softmax-attention operation by a fused kernel.

Biases become extra query/key channels and values of another width are padded, here and nowhere else, so no control ever
sees a changed head_dim.

What a fused kernel does not return is asked here, of a call as it stands and not through the controls behind:
`lse`, `mass` and, for methods that need the logits themselves, `chunks`; `merge` joins attention over parts of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .call import AttentionCall, Bias

__all__ = ["Kernel", "attend", "chunks", "lse", "mass", "merge", "native", "reasons_against"]

Kernel = Callable[..., Tensor]

native: Kernel = torch.nn.functional.scaled_dot_product_attention

CHUNK = 2**24  # logits held at once by `chunks`: 64 MiB in float32


def attend(call: AttentionCall, kernel: Kernel = native) -> Float[Tensor, "b h n c"]:
    """softmax(scale q k^T + bias, masked) v, by `kernel` (signature of torch's scaled_dot_product_attention), maps
    never formed."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    if call.bias:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key = _with_bias(query, key, scale, call.bias)
    width, channels = query.shape[-1], value.shape[-1]
    if channels < width:
        value = torch.nn.functional.pad(value, (0, width - channels))
    elif channels > width:
        scale = width**-0.5 if scale is None else scale
        query, key = (torch.nn.functional.pad(x, (0, channels - width)) for x in (query, key))
    out = kernel(query, key, value, attn_mask=call.mask, dropout_p=0.0, is_causal=call.causal, scale=scale)
    return out if out.shape[-1] == channels else out[..., :channels]


def _with_bias(query: Tensor, key: Tensor, scale: float, biases: tuple[Bias, ...]) -> tuple[Tensor, Tensor]:
    """[q, left / scale] [k, right]^T * scale = scale q k^T + left right^T."""
    batch, heads, n, _ = query.shape
    m = key.shape[2]
    lefts, rights = [], []
    for bias in biases:
        rank = bias.right.shape[-1]
        left = query.new_ones(1, 1, n, rank) if bias.left is None else bias.left.to(query.dtype)
        lefts.append((left / scale).expand(batch, heads, n, rank))
        rights.append(bias.right.to(key.dtype).expand(batch, heads, m, rank))
    return torch.cat((query, *lefts), dim=-1), torch.cat((key, *rights), dim=-1)


def reasons_against(backend: str, call: AttentionCall, kernel: Kernel) -> list[str]:
    """Why the user's attention backend cannot run this call; empty when it can.  `kernel.takes` names the arguments it
    knows."""
    takes = getattr(kernel, "takes", frozenset({"attn_mask", "is_causal", "scale"}))
    reasons = []
    if torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value)):
        reasons.append("gradients are taken, and only the native kernel's are relied on")
    if call.bias:
        reasons.append("the call has a bias, which widens the heads")
    if call.value.shape[-1] != call.query.shape[-1]:
        reasons.append("the value is not as wide as the query")
    if call.mask is not None and ("attn_mask" not in takes or any(word in backend for word in ("flash", "sage"))):
        reasons.append("it takes no mask")
    if call.scale is not None and "scale" not in takes:
        reasons.append("its scale is fixed")
    if call.causal and "is_causal" not in takes:
        reasons.append("it is never causal")
    return reasons


# ---------------------------------------------------------------------------------- what a fused kernel does not return


def chunks(call: AttentionCall) -> Iterator[tuple[slice, Float[Tensor, "b h c m"]]]:
    """The logits, scale q k^T + bias and -inf where masked, for some queries after the others, in float32 (float64 for
    float64 queries): never all of them at once."""
    batch, heads, n, width = call.query.shape
    m = call.key.shape[2]
    mask = _tensor_mask(call)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    scale = width**-0.5 if call.scale is None else call.scale
    key = call.key.to(wide).mT
    size = max(1, CHUNK // (batch * heads * m))
    for start in range(0, n, size):
        part = slice(start, min(start + size, n))
        cut = lambda x: x if x.shape[2] == 1 else x[:, :, part]  # noqa: B023, E731
        logits = call.query[:, :, part].to(wide) @ key * scale
        for bias in call.bias:
            right = bias.right.to(wide).mT
            logits = logits + (right.sum(-2, keepdim=True) if bias.left is None else cut(bias.left).to(wide) @ right)
        if mask is not None:
            logits = logits.masked_fill(~cut(mask), -torch.inf) if mask.dtype == torch.bool else logits + cut(mask)
        if call.causal:
            rows, columns = (torch.arange(size, device=key.device) for size in (part.stop, m))
            logits = logits.masked_fill(columns > rows[part, None], -torch.inf)
        yield part, logits


def lse(call: AttentionCall) -> Float[Tensor, "b h n"]:
    """log sum_keys exp(logits) of each query, -inf where it may see no key; float32 (float64 for float64 queries)."""
    return torch.cat([logits.logsumexp(-1) for _, logits in chunks(call)], -1)


def mass(call: AttentionCall, keys: str | Sequence[int] | Bool[Tensor, "..."]) -> Float[Tensor, "b h n"]:
    """The attention each query pays to `keys`: a segment's name, indices, or a mask (m,), (b, m) or (b, h, m).

    Fused, in float32 (float64 for float64 queries): the operation with an indicator as value."""
    batch, heads, _, _ = call.query.shape
    m = call.key.shape[2]
    wide = torch.promote_types(call.query.dtype, torch.float32)
    column = torch.zeros(1, 1, m, dtype=wide, device=call.key.device)
    if isinstance(keys, str):
        segment = call.key_tokens[keys]
        column[..., segment.start : segment.start + segment.length] = 1
    elif isinstance(keys, Tensor) and keys.dtype == torch.bool:
        if keys.shape[-1] != m or keys.ndim > 3:
            raise ValueError(
                f"a mask of keys of shape {tuple(keys.shape)} for {m} keys; give (m,), (b, m) or (b, h, m)"
            )
        column = (keys[:, None] if keys.ndim == 2 else keys.expand(1, 1, -1) if keys.ndim == 1 else keys).to(wide)
    else:
        column[..., keys] = 1
    mask = _tensor_mask(call)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(wide)
    value = column[..., None].expand(batch, heads, m, 1)
    return attend(call.replace(query=call.query.to(wide), key=call.key.to(wide), value=value, mask=mask))[..., 0]


def merge(
    parts: Sequence[tuple[Float[Tensor, "b h n c"], Float[Tensor, "b h n"]]],
) -> Float[Tensor, "b h n c"]:
    """Attention over all keys from attention over parts of them, each with its `lse`:  sum_i out_i e^lse_i / sum_i
    e^lse_i.  Queries that see no key get 0.  The lse of the whole is the logsumexp of the parts'."""
    if not parts:
        raise ValueError("merge needs at least one part, (out, lse)")
    weights = torch.stack([weight for _, weight in parts]).softmax(0).nan_to_num(0.0)[..., None]
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for (out, _), weight in zip(parts, weights, strict=True):
        total = total + torch.where(weight > 0, out.to(weights.dtype) * weight, 0)
    return total.to(parts[0][0].dtype)


def _tensor_mask(call: AttentionCall) -> Tensor | None:
    if call.mask is not None and not isinstance(call.mask, Tensor):
        raise ValueError(f"the mask of {call.site.name or 'the call'} is a {type(call.mask).__name__}, not a tensor")
    return call.mask
