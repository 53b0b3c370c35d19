"""A control's attention in one compiled graph for all steps, as it runs in a compiled denoiser."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from attnctrl import AttentionCall, DenoiseCall, Rows, Segment, Site, Step, Tokens
from attnctrl.attend import attend
from attnctrl.families import Family, Geometry, _generic


class Graphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@dataclass
class Denoiser:
    """What attention operations read of the engine: the step, set before each call."""

    step: Step


def assert_one_graph(control, steps, *, rows=None, graphs=1, text=3, rope=None):
    """The control's output at a joint site is the same compiled and eager, and steps make no graphs but `graphs`."""
    rows = rows or Rows.grid(("uncond", "cond"), 2, 1)
    line = Tokens((Segment("text", 0, text), Segment("image", text, 4, (2, 2))), rope)
    site, denoiser = Site("blocks.0.attn", "joint", heads=2, head_dim=8), Denoiser(Step())
    q, k, v = torch.randn(3, len(rows), 2, text + 4, 8, dtype=torch.float64)

    def operation(q, k, v):
        call = AttentionCall(
            q, k, v, kind="joint", site=site, rows=rows, query_tokens=line, key_tokens=line, step=denoiser.step
        )
        return control.attention(call, attend)

    torch.compiler.reset()
    counted = Graphs()
    compiled = torch.compile(operation, fullgraph=True, backend=counted)
    if hasattr(control, "begin_run"):
        family = Family("small", (), (), _generic, order=("text", "image"))
        geometry = Geometry(latent=(4, 4), grid=(2, 2), text=text)
        control.begin_run(
            SimpleNamespace(
                sites_of=lambda control: [site],
                family=lambda name: family,
                geometry=lambda name: geometry,
                prompts=None,
            )
        )
    for i in range(steps):
        denoiser.step = Step(i, steps)
        control.begin(DenoiseCall(q[:2, 0], {}, rows, denoiser.step))
        torch.testing.assert_close(compiled(q, k, v), operation(q, k, v), rtol=0, atol=1e-12)
    torch.compiler.reset()
    assert counted.count == graphs
