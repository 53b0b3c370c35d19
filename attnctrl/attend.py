"""The end of the chain: one softmax-attention operation by a fused kernel.

Biases become extra query/key channels and values of another width are padded, here and nowhere else, so no control ever
sees a changed head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .call import AttentionCall, Bias

__all__ = ["Kernel", "attend", "native", "reasons_against"]

Kernel = Callable[..., Tensor]

native: Kernel = torch.nn.functional.scaled_dot_product_attention


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
