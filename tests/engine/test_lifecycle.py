"""Attaching and closing: a pipeline with no-op controls computes the same bits, and a closed one is as it was."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends
from tiny import FAMILIES, VARIANTS
from torch import Tensor, nn

from attnctrl import attach

CONTROLLED = {name: family for name, family in {**FAMILIES, **VARIANTS}.items() if name != "mochi"}
SD, FLUX = FAMILIES["sd"], FAMILIES["flux"]


# Controls ------------------------------------------------------------------------------------------------------------


class Nothing:
    """Acts on every level and changes nothing; counts its calls."""

    def __init__(self) -> None:
        self.attended = self.denoised = self.stepped = 0

    def attention(self, call, attend):
        self.attended += 1
        return attend(call)

    def denoise(self, call, denoise):
        self.denoised += 1
        return denoise(call)

    def step(self, call, step):
        self.stepped += 1
        return step(call)


class Scaled:
    """Multiplies the output of attention, so that whoever runs it shows."""

    def __init__(self, factor: float = 0.5, sites: str | None = None) -> None:
        self.factor, self.sites = factor, sites

    def attention(self, call, attend):
        return attend(call) * self.factor


class Kinds:
    """Writes down (kind, part, length of the keys) of each operation by site."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[str, int, int]]] = {}

    def attention(self, call, attend):
        self.seen.setdefault(call.site.name, []).append((call.kind, call.part, call.key.shape[2]))
        return attend(call)


# What must be as it was ----------------------------------------------------------------------------------------------


def denoisers(pipe: Any) -> list[nn.Module]:
    return [module for name in ("unet", "transformer", "transformer_2") if (module := getattr(pipe, name, None))]


def state(pipe: Any) -> dict[str, Any]:
    """Types and attributes of everything that `attach` may touch, to be compared with ==."""
    modules = {(i, name): module for i, model in enumerate(denoisers(pipe)) for name, module in model.named_modules()}
    return {
        "op": F.scaled_dot_product_attention,
        "backends": dict(Backends._backends),
        "modules": {name: (type(module), tuple(vars(module))) for name, module in modules.items()},
        "processors": {name: id(getattr(module, "processor", None)) for name, module in modules.items()},
        "pipeline": (type(pipe), {name: plain(value) for name, value in vars(pipe).items()}),
        "scheduler": (type(pipe.scheduler), {name: plain(value) for name, value in vars(pipe.scheduler).items()}),
    }


def plain(value: Any) -> Any:
    """Something that == compares by content."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (int, float, str, bool, dict, type(None))) else id(value)


@contextlib.contextmanager
def untouched(pipe: Any, run: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yields the plain result; after the block, the pipeline computes the same bits and every object is as it was."""
    expected = run()
    before = state(pipe)
    yield expected
    assert torch.equal(run(), expected)
    assert state(pipe) == before


@pytest.fixture(autouse=True)
def nothing_left_behind():
    op, backends = F.scaled_dot_product_attention, dict(Backends._backends)
    yield
    assert F.scaled_dot_product_attention is op
    assert dict(Backends._backends) == backends


# The same bits -------------------------------------------------------------------------------------------------------

PLACES = [
    {},
    {"cfg": False},
    {"images": 2, "prompts": ("a", "b")},
    {"odd": True},
]


@pytest.mark.parametrize("how", PLACES, ids=["cfg", "no_cfg", "two_images", "odd_size"])
@pytest.mark.parametrize("name", CONTROLLED)
def test_controls_that_change_nothing_change_no_bit(name, how):
    family = CONTROLLED[name]
    how = dict(how)
    if how.pop("odd", False):
        how["height"], how["width"] = family.odd_size
    pipe = family.build()
    nothing = Nothing()
    with untouched(pipe, lambda: family.run(pipe, **how)) as expected:
        with attach(pipe, nothing):
            assert torch.equal(family.run(pipe, **how), expected)
    steps = round(family.steps * family.strength)
    calls = steps * (len(family.calls) if how.get("cfg", True) else 1)
    assert nothing.stepped == steps
    assert nothing.denoised == calls
    sites = len(family.sites)
    assert nothing.attended == calls * sites


@pytest.mark.parametrize("name", CONTROLLED)
def test_controls_that_change_nothing_change_no_bit_in_bfloat16(name):
    family = CONTROLLED[name]
    pipe = family.build(dtype=torch.bfloat16)
    with untouched(pipe, lambda: family.run(pipe)) as expected:
        with attach(pipe, Nothing()):
            assert torch.equal(family.run(pipe), expected)


@pytest.mark.parametrize("name", CONTROLLED)
def test_a_control_that_acts_is_gone_after_closing(name):
    family = CONTROLLED[name]
    pipe = family.build()
    with untouched(pipe, lambda: family.run(pipe)) as expected:
        with attach(pipe, Scaled()):
            assert not torch.equal(family.run(pipe), expected)


@pytest.mark.parametrize("name", [name for name, family in CONTROLLED.items() if family.text])
def test_controls_that_change_nothing_change_no_bit_from_text(name):
    family = CONTROLLED[name]
    pipe = family.build(with_text=True)
    prompts = ("a red cat", "a blue dog")
    with untouched(pipe, lambda: family.run(pipe, prompts=prompts, text=True)) as expected:
        with attach(pipe, Nothing()) as run:
            assert torch.equal(family.run(pipe, prompts=prompts, text=True), expected)
            assert run.prompts == list(prompts)
