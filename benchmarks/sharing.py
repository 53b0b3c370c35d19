"""What sharing between rows costs in its fused form, against the authors' form with maps.

    python benchmarks/sharing.py --threads 1 --tokens 4096 --heads 8

Self-attention of a 64x64 layer of Stable Diffusion 1.5: 4096 tokens, 8 heads of 40 channels, inside every window,
float32.  Compared is the attention operation alone, from q, k, v to its output:
    explicit  the authors' code re-stated: the map of every row is formed, edited where they edit it, multiplied with v
    fused     the control and torch's scaled_dot_product_attention
Rows are what each method runs: [uncond, cond] x [reference, target] for style swap, StyleAligned and MasaCtrl, three
without guidance for cross-image attention, StyleID and interpolation.  Contrast clips entries of the map, so the
control forms it too, some queries at a time, for the output's row only.

Time and memory as in benchmarks/p2p.py: the forms alternate, the ratio is the median over pairs; memory is the most
bytes of tensors alive at once beyond the inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from p2p import Result, live_peak, paired
from torch import Tensor

from attnctrl import AttentionCall, Rows, Segment, Step, Tokens
from attnctrl.attend import attend
from attnctrl.controls import (
    AttentionInterpolation,
    CrossImageAttention,
    MutualSelfAttention,
    SketchMixture,
    StyleAligned,
    StyleInjection,
    StyleSwap,
)

CHANNELS = 40
GUIDED, THREE = Rows.grid(("uncond", "cond"), 2, 1), Rows.grid(("cond",), 3, 1)
FIRST = [0, 0, 2, 2]  # of each guided row, its reference
STEP = Step(6, 10)
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def maps(q: Tensor, k: Tensor) -> Tensor:
    return (torch.einsum("bhid,bhjd->bhij", q, k) * CHANNELS**-0.5).softmax(-1)


def swap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return maps(q, k[FIRST]) @ v[FIRST]


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As their code does with a shift: logits over both parts, the second raised."""

    def adain(x: Tensor) -> Tensor:
        mean, std = x.mean(2, keepdim=True), (x.var(2, keepdim=True) + 1e-5).sqrt()
        return (x - mean) / std * std[FIRST] + mean[FIRST]

    n, q, k = q.shape[2], adain(q), adain(k)
    logits = torch.einsum("bhid,bhjd->bhij", q, torch.cat((k, k[FIRST]), 2)) * CHANNELS**-0.5
    logits[..., n:] += 0.5
    return logits.softmax(-1) @ torch.cat((v, v[FIRST]), 2)


def masked(inside: Tensor, own: Tensor) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sim = torch.einsum("bhid,bhjd->bhij", q, k[FIRST]) * CHANNELS**-0.5
        least = torch.finfo(sim.dtype).min
        fg, bg = (sim.masked_fill(closed, least).softmax(-1) @ v[FIRST] for closed in (~inside, inside))
        out = torch.where(own[:, None], fg, bg)
        plain = maps(q, k) @ v
        return torch.stack([out[row] if row % 2 else plain[row] for row in range(len(q))])

    return form


def contrasted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = maps(q, k[[1, 1, 2]])
    a[0] = ((a[0] - a[0].mean(-1, keepdim=True)) * 1.67 + a[0].mean(-1, keepdim=True)).clip(0, 1)
    return a @ v[[1, 1, 2]]


def injected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features of content and style come from runs of their own, which are these rows."""
    query = torch.stack(((0.75 * q[2] + 0.25 * q[0]) * 1.5, q[1], q[2]))
    return maps(query, k[[1, 1, 2]]) @ v[[1, 1, 2]]


def interpolated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outer, fused: both sides for all rows, as their processor."""
    c = torch.tensor([0.0, 0.3, 1.0], dtype=q.dtype)[:, None, None, None]
    begin, end = (maps(q, torch.cat((k, k[i]), 2)) @ torch.cat((v, v[i]), 2) for i in ([0] * 3, [2] * 3))
    return (1 - c) * begin + c * end


def mixture(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = torch.tensor([0.0, 0.8, 0.0, 0.8], dtype=q.dtype)[:, None, None, None]
    return a * (maps(q, k[FIRST]) @ v[FIRST]) + (1 - a) * (maps(q, k) @ v)


def cases(grid: tuple[int, int]) -> dict[str, tuple[Rows, Any, Form]]:
    inside = torch.zeros(grid, dtype=torch.bool)
    inside[: grid[0] // 2] = True
    masks = (inside, inside.flip(0))
    return {
        "style swap, MasaCtrl": (GUIDED, StyleSwap(), swap),
        "MasaCtrl with masks": (GUIDED, MutualSelfAttention(masks=masks), masked(*(m.flatten() for m in masks))),
        "StyleAligned, shift": (GUIDED, StyleAligned(shift=0.5), shared),
        "cross-image, contrast": (THREE, CrossImageAttention(reinject_every=0), contrasted),
        "StyleID": (THREE, StyleInjection(), injected),
        "interpolation, outer": (THREE, AttentionInterpolation([0, 0.3, 1], steps=(0.0, 1.0)), interpolated),
        "sketch mixture": (GUIDED, SketchMixture(), mixture),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096, help="a square number")
    parser.add_argument("--heads", type=int, default=8, help="time and memory of both forms are proportional to it")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to spend on each pair, at least 5 pairs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    side = round(args.tokens**0.5)
    if side**2 != args.tokens:
        parser.error(f"--tokens is a square number, not {args.tokens}")
    print(f"float32, {args.threads} thread(s), torch {torch.__version__}; explicit, fused, explicit / fused\n")
    print("| tokens | what | explicit ms | fused ms | ratio | explicit MiB | fused MiB | ratio | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|", flush=True)
    tokens = Tokens((Segment("image", 0, args.tokens, (side, side)),))
    for name, (rows, control, theirs) in cases((side, side)).items():
        g = torch.Generator().manual_seed(0)
        q, k, v = inputs = tuple(
            torch.randn(len(rows), args.heads, args.tokens, CHANNELS, generator=g) for _ in range(3)
        )

        def ours(q: Tensor, k: Tensor, v: Tensor, control: Any = control, rows: Rows = rows) -> Tensor:
            call = AttentionCall(q, k, v, rows=rows, step=STEP, query_tokens=tokens, key_tokens=tokens)
            return control.attention(call, attend)

        error = (ours(q, k, v) - theirs(q, k, v)).abs().max().item()
        assert error < 1e-4, f"the forms differ by {error} in {name}"
        memory = (live_peak(theirs, inputs), live_peak(ours, inputs))
        slow, fast, ratio = paired(lambda: theirs(*inputs), lambda: ours(*inputs), args.seconds)  # noqa: B023
        print(Result((slow, fast), memory, ratio).row(str(args.tokens), name), flush=True)


if __name__ == "__main__":
    main()
