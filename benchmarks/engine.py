"""What the engine costs: the time of a denoising step with a control that does nothing, over the same step detached.

    python benchmarks/engine.py --threads 1 --pairs 7

"SD 1.5" is a UNet2DConditionModel with its block sizes (320, 640, 1280, 1280), 64x64 latents, 2 rows, 77 text tokens
and random weights; the demo's UNet is small, so the engine weighs most there. Attached and detached steps alternate
in one process, which of the two comes first alternates too, and the ratio is the median over pairs. The last column
is the engine's share per attention operation: from the operation to the call object, the chain of one control and to
the kernel, as the median difference of attached and detached steps over the operations of a step. On a machine with
other work, --cpu-time counts the process's time on the processor instead of time that passes (summed over its
threads).
Target: at most 1.02 for SD 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from attnctrl import attach

TARGET = 1.02


class NoOp:
    """A control at every site that changes nothing."""

    def attention(self, call, rest):
        return rest(call)


def unet(channels: Sequence[int], side: int, heads: int, text: int, groups: int, dtype: torch.dtype) -> nn.Module:
    """A UNet of SD 1.5's shape with random weights, made without the slow initialisation."""
    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=side, block_out_channels=tuple(channels), attention_head_dim=heads, cross_attention_dim=text,
            norm_num_groups=groups,
        )  # fmt: skip
    model = nn.Module.to(model, dtype).to_empty(device="cpu").eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.uniform_(-0.02, 0.02)
    return model


def ratios(
    model: nn.Module, inputs: tuple[Tensor, ...], pairs: int, clock: Callable[[], float], repeats: int = 1
) -> tuple[float, float, float, float, int]:
    """Medians of a step's seconds detached and attached, of their ratio, their difference, and the operations."""

    def seconds() -> float:
        start = clock()
        for _ in range(repeats):
            model(*inputs)
        return (clock() - start) / repeats

    def attached() -> float:
        nonlocal operations
        with attach(model, NoOp()) as run:
            took = seconds()
        operations = sum(site.calls for site in run.report().sites) // repeats
        return took

    operations = 0
    with torch.no_grad():
        seconds(), attached()  # warm up
        times = []
        for pair in range(pairs):
            if pair % 2:
                with_control = attached()
                times.append((seconds(), with_control))
            else:
                times.append((seconds(), attached()))
    detached, controlled = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    return detached, controlled, ratio, statistics.median(b - a for a, b in times), operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=7, help="of steps of SD 1.5; small models run ten times as many")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of SD 1.5")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--small", action="store_true", help="leave out SD 1.5")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| step of | detached | attached | ratio | operations | microseconds an operation |")
    print("|---|---|---|---|---|---|", flush=True)

    def row(name, detached, controlled, ratio, difference, operations, small) -> None:
        cost = f"{difference / operations * 1e6:.0f}" if small else ""
        print(
            f"| {name} | {detached * 1e3:.1f} ms | {controlled * 1e3:.1f} ms | {ratio:.3f} | {operations} | {cost} |",
            flush=True,
        )

    small = unet((32, 32, 32, 32), 8, 2, 16, 8, torch.float32)
    given = (torch.randn(2, 4, 8, 8), 500, torch.randn(2, 8, 16))
    row("a tiny UNet, 2 rows of 8x8", *ratios(small, given, 10 * arguments.pairs, clock, 3), small=True)
    try:
        from attnctrl import demo

        pipe = demo.load("unet")
    except Exception as error:
        print(f"\nno demo UNet: {error}\n")
    else:
        config = pipe.unet.config
        side, width = config.sample_size, config.cross_attention_dim
        given = (torch.randn(2, config.in_channels, side, side), 500, torch.randn(2, 24, width))
        measured = ratios(pipe.unet, given, 10 * arguments.pairs, clock)
        row(f"the demo's UNet, 2 rows of {side}x{side}", *measured, small=True)
    if arguments.small:
        return
    dtype = getattr(torch, arguments.dtype)
    large = unet((320, 640, 1280, 1280), 64, 8, 768, 32, dtype)
    given = (torch.randn(2, 4, 64, 64, dtype=dtype), 500, torch.randn(2, 77, 768, dtype=dtype))
    measured = ratios(large, given, arguments.pairs, clock)
    row(f"SD 1.5 in {arguments.dtype}, 2 rows of 64x64", *measured, small=False)
    print(f"\nSD 1.5: {measured[2]:.4f}, target {TARGET}: {'met' if measured[2] <= TARGET else 'missed'}")


if __name__ == "__main__":
    main()
