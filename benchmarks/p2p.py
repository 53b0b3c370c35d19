"""What one edited step of prompt-to-prompt costs in its fused form, against the authors' form with maps.

    python benchmarks/p2p.py --threads 1 --dtype float32 bfloat16

Attention layers of Stable Diffusion 1.5 at 512x512 pixels (64x64 latents): 4096, 1024, 256 and 64 tokens, 8 heads of
40, 80, 160, 160 channels, rows [uncond source, uncond target, cond source, cond target], inside every window.  Compared
is the attention operation alone, from q, k, v after their projections to its output:
    explicit  the authors' code re-stated: sim = q k^T scale and attn = softmax(sim) of all rows are formed, whether or
              not the layer is edited (their hook forms the maps of every layer), the conditional half is edited in
              place, out = attn v.  Their attention store is left out, which favours them.
    fused     PromptToPrompt and one or two calls of torch's scaled_dot_product_attention.
Edits: "replace" a word of one token by one of three (one fused call), "refine" with a reweighted added word (two fused
calls); self maps up to 32x32 tokens, the larger of the authors' two limits, for both; the row "self, edited too" edits
the 64x64 self maps as well, which they never do.  A "block" is self and cross (replace) together, times added, the
larger memory; a "step" is SD 1.5's 16 blocks: five at each of the first three sizes, one of 64 tokens.

Time: both forms alternate in one process; the ratio is the median over pairs, the times are medians (blocks and the
step: the ratio of added medians).  Memory: the most bytes of tensors alive at once beyond the inputs, counted after
every operation in a TorchDispatchMode; it sees what torch allocates as tensors, not a kernel's own scratch (a few
hundred kB a thread), so for large layers the growth of the process's resident memory (VmHWM, Linux) is measured too.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnctrl import AttentionCall, Rows, Step
from attnctrl.alignment import equalizer, refine_mapper, replace_mapper
from attnctrl.attend import attend
from attnctrl.call import DenoiseCall
from attnctrl.controls import PromptToPrompt
from attnctrl.tokens import from_pieces

HEADS, WORDS, LIMIT = 8, 77, 1024
LAYERS = ((4096, 40), (1024, 80), (256, 160), (64, 160))
ROWS = Rows.grid(("uncond", "cond"), 2, 1)
SOURCE = from_pieces("a cat on grass", ["a", "cat", "on", "grass"], WORDS)
REPLACED = from_pieces("a hippopotamus on grass", ["a", "hip", "popo", "tamus", "on", "grass"], WORDS)
REFINED = from_pieces("a black cat on grass", ["a", "black", "cat", "on", "grass"], WORDS)
EDITS = ("cross, replace", "cross, refine + reweight", "self")
BLOCKS = {4096: 5, 1024: 5, 256: 5, 64: 1}  # of each size in a step


# ---------------------------------------------------------------------------- the two forms


def explicit(q: Tensor, k: Tensor, v: Tensor, edit: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
    """(rows, heads, n, d) as the authors compute it; `edit` gets the source's and the target's conditional maps."""
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    sim = torch.einsum("b i d, b j d -> b i j", q, k) * shape[-1] ** -0.5
    attn = sim.softmax(dim=-1)
    if edit is not None:
        half = len(attn) // 2
        cond = attn[half:].reshape(2, -1, *attn.shape[1:])
        cond[1:] = edit(cond[0], cond[1:])
    return torch.einsum("b i j, b j d -> b i d", attn, v).reshape(shape)


def explicit_edit(kind: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    alpha = torch.ones(1, 1, 1, 1, WORDS, dtype=dtype)
    if kind == "cross, replace":
        mapper = replace_mapper(SOURCE, REPLACED).to(dtype)[None]
        return lambda base, own: torch.einsum("hpw,bwn->bhpn", base, mapper) * alpha[0] + (1 - alpha[0]) * own
    if kind == "self":
        return lambda base, own: base.unsqueeze(0).expand(own.shape[0], *base.shape)
    index, matched = refine_mapper(SOURCE, REFINED)
    scale, matched = equalizer(REFINED, {"black": 2.0}).to(dtype), matched.to(dtype)[None, None, None]

    def refine(base: Tensor, own: Tensor) -> Tensor:
        taken = base[:, :, index][None]
        new = (taken * matched + own * (1 - matched)) * scale
        return new * alpha[0] + (1 - alpha[0]) * own

    return refine


def fused(kind: str, limit: int, like: Tensor) -> Callable[..., Tensor]:
    """The control as it is inside a run, as a function of q, k, v."""
    if kind == "cross, refine + reweight":
        control = PromptToPrompt([SOURCE, REFINED], edit="refine", reweight={"black": 2.0}, limit=limit)
    else:
        control = PromptToPrompt([SOURCE, REPLACED], limit=limit)
    run: Any = SimpleNamespace(
        pipeline=None,
        prompts=None,
        sites=[SimpleNamespace(denoiser="unet")],
        sites_of=lambda control: [],
        family=lambda name: SimpleNamespace(joint="exact", texts=(), lowers=False),
        geometry=lambda name: SimpleNamespace(text=WORDS),
    )
    control.begin_run(run)
    step = Step(0, 50)
    control.begin(DenoiseCall(like.new_zeros(2, 4, 64, 64), {}, ROWS, step))
    call_kind = kind.split(",")[0]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return control.attention(AttentionCall(q, k, v, kind=call_kind, rows=ROWS, step=step), attend)

    return attention


# ---------------------------------------------------------------------------- measuring


class Live(TorchDispatchMode):
    """Bytes of tensors made inside and alive: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        self.known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.known:
                    self.known.add(key)
                    self.now += size
                    weakref.finalize(storage, self._gone, key, size)
        self.peak = max(self.peak, self.now)
        return out


def live_peak(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int:
    """Most bytes of tensors alive at once while `function` runs, beyond `inputs`."""
    mode = Live()
    mode.ignore(*inputs)
    with mode:
        function(*inputs)
    return mode.peak


def resident_growth(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int | None:
    """How far the process's resident memory rises while `function` runs; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        field = lambda name: int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024  # noqa: E731
        before = field("VmRSS")
        function(*inputs)
        return max(field("VmHWM") - before, 0)
    except (OSError, IndexError, ValueError):
        return None


def paired(first: Callable[[], Any], second: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """(median seconds of the first, of the second, median of first / second), alternating for about `seconds`."""

    def timed(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    first(), second()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 5 or (time.perf_counter() < end and len(pairs) < 200):
        pairs.append((timed(first), timed(second)))
    return (
        *(statistics.median(column) for column in zip(*pairs, strict=True)),
        statistics.median(a / b for a, b in pairs),
    )


@dataclass(frozen=True)
class Result:
    """Medians in seconds, bytes; explicit first."""

    seconds: tuple[float, float]
    memory: tuple[int, int]
    ratio: float
    resident: tuple[int | None, int | None] = (None, None)

    def row(self, size: str, what: str) -> str:
        (slow, fast), (large, small) = self.seconds, self.memory
        cells = [size, what, f"{1e3 * slow:.1f}", f"{1e3 * fast:.1f}", f"{self.ratio:.2f}"]
        cells += [f"{large / 2**20:.1f}", f"{small / 2**20:.1f}", f"{large / small:.1f}"]
        theirs, ours = self.resident
        cells.append(f"{theirs / 2**20:.0f} / {ours / 2**20:.0f}" if theirs is not None and ours is not None else "")
        return f"| {' | '.join(cells)} |"


def added(parts: Sequence[tuple[int, Result]]) -> Result:
    """Several layers, each so many times."""
    slow, fast = (sum(n * part.seconds[i] for n, part in parts) for i in (0, 1))
    large, small = (max(part.memory[i] for _, part in parts) for i in (0, 1))
    return Result((slow, fast), (large, small), slow / fast)


def measure(
    kind: str, tokens: int, channels: int, edited: bool, limit: int, dtype: torch.dtype, seconds: float
) -> Result:
    g = torch.Generator().manual_seed(0)
    keys = tokens if kind == "self" else WORDS
    q, k, v = (torch.randn(len(ROWS), HEADS, n, channels, generator=g).to(dtype) for n in (tokens, keys, keys))
    edit = explicit_edit(kind, dtype) if edited else None
    ours = fused(kind, limit, q)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return explicit(q, k, v, edit)

    inputs = (q, k, v)
    error = (ours(*inputs).double() - theirs(*inputs).double()).abs().max().item()
    assert error < (1e-4 if dtype == torch.float32 else 0.1), f"the forms differ by {error} at {kind}, {tokens} tokens"
    memory = (live_peak(theirs, inputs), live_peak(ours, inputs))
    resident: tuple[int | None, int | None] = (None, None)
    if memory[0] > 64 * 2**20:
        resident = (resident_growth(theirs, inputs), resident_growth(ours, inputs))
    slow, fast, ratio = paired(lambda: theirs(*inputs), lambda: ours(*inputs), seconds)
    return Result((slow, fast), memory, ratio, resident)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--seconds", type=float, default=2.0, help="time to spend on each pair, at least 5 pairs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.dtype:
        print(f"\n{name}, {args.threads} thread(s), torch {torch.__version__}; explicit, fused, explicit / fused\n")
        print("| queries x keys | what | explicit ms | fused ms | ratio | explicit MiB | fused MiB | ratio | RSS MiB |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
        step: list[tuple[int, Result]] = []
        for tokens, channels in LAYERS:
            if tokens in args.tokens:
                step += benchmark(tokens, channels, getattr(torch, name), args.seconds)
        if len(args.tokens) == len(BLOCKS):
            print(added(step).row("all", "**step**"), flush=True)


@torch.no_grad()
def benchmark(tokens: int, channels: int, dtype: torch.dtype, seconds: float) -> list[tuple[int, Result]]:
    """Prints the rows of one size; returns the layers of a block, each with its number in a step."""
    of_block = []
    for kind in EDITS:
        edited = kind != "self" or tokens <= LIMIT
        result = measure(kind, tokens, channels, edited, LIMIT, dtype, seconds)
        keys = tokens if kind == "self" else WORDS
        print(result.row(f"{tokens} x {keys}", kind if edited else f"{kind}, maps formed, not edited"), flush=True)
        if kind != "cross, refine + reweight":
            of_block.append((BLOCKS[tokens], result))
    if tokens > LIMIT:
        result = measure("self", tokens, channels, True, tokens, dtype, seconds)
        print(result.row(f"{tokens} x {tokens}", "self, edited too"), flush=True)
    print(added([(1, result) for _, result in of_block]).row(str(tokens), "**block**"), flush=True)
    return of_block


if __name__ == "__main__":
    main()
