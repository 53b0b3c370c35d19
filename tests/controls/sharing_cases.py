"""What the tests of sharing have in common: golden data, calls made by hand, attention written out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnctrl import AttentionCall, Rows, Segment, Step, Tokens
from attnctrl.attend import attend

GOLDEN = Path(__file__).parents[1] / "golden"
EXACT, SINGLE = 1e-9, 2e-6  # what is asked of float64 and float32

precisions = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)])


def load(method, case, dtype=torch.float64):
    facts = json.loads((GOLDEN / method / f"{case}.json").read_text())
    tensors = load_file(GOLDEN / method / f"{case}.safetensors")
    return facts, {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def made(branches=("uncond", "cond"), prompts=3, grid=(3, 4), heads=2, d=4, step=None, text=0, **extra):
    """A call of self-attention, or of joint attention with `text` tokens in front."""
    rows = Rows.grid(branches, prompts, 1)
    n = grid[0] * grid[1]
    segments = (Segment("text", 0, text), Segment("image", text, n, grid))[not text :]
    tokens = Tokens(segments)
    q, k, v = (draw(len(rows), heads, text + n, d, seed=i) for i in (1, 2, 3))
    fields = {"kind": "joint" if text else "self", "rows": rows, "query_tokens": tokens, "key_tokens": tokens}
    return AttentionCall(q, k, v, step=step or Step(5, 10), **{**fields, **extra})


def written(query, key, value, scale=None):
    """softmax(scale q k^T) v with its map."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (query @ key.transpose(-2, -1) * scale).softmax(-1) @ value


def plain(call):
    return attend(call)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
