"""K-LoRA (arXiv:2502.18461): of a content and a style LoRA, each layer applies the one that matters more at this step.

For a linear layer with the updates W_c = B_c A_c of rank r_c and W_s = B_s A_s of rank r_s, at progress u of the run:
    S = sum of the r_c r_s largest |entries| of W         gamma = balance of the two LoRAs (`balance`)
    rho = S_c / (gamma S_s)                                content where rho > s(u), else style
    "s"     s = alpha u + beta                             alpha 1.5, beta 0.5: content early, style late
    "s*"    s = (alpha u + beta) mod alpha                 beta 0.85 alpha: the authors' scripts use this one
rho does not change with the step, so it is computed once; W is never formed when the layer runs:
    out = base(x) + scale B A x        of the chosen one, with peft's scale (alpha / rank, and the user's weight), which
                                       the authors' code leaves out; a factor of all layers changes no choice
The authors count calls of layers over a run whose length they assume; here u is the step's, so any run has the whole
schedule (`within_step` adds the layer's place in the step, as their counter does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..call import DenoiseCall, Module, ModuleCall

__all__ = ["LoraChoice", "balance", "preference", "strength", "threshold"]

Pattern = Literal["s", "s*"]


def strength(
    up: Float[Tensor, "out r"], down: Float[Tensor, "r in"], k: int
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum of the k largest absolute entries of up @ down (all, where there are fewer), and of all of them."""
    wide = torch.promote_types(up.dtype, torch.float32)
    entries = (up.to(wide) @ down.to(wide)).abs().flatten()
    return entries.topk(min(k, entries.numel())).values.sum(), entries.sum()


def balance(ratios: Sequence[float]) -> float:
    """gamma: the mean over layers of sum |W_c| / sum |W_s|, without those of three times the mean or more."""
    mean = sum(ratios) / len(ratios)
    kept = [ratio for ratio in ratios if ratio < 3 * mean]
    return sum(kept) / len(kept)


def preference(
    content: tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]],
    style: tuple[Float[Tensor, "out q"], Float[Tensor, "q in"]],
) -> tuple[float, float]:
    """S_c / S_s and sum |W_c| / sum |W_s| of one layer, for (B, A) of each LoRA; rho is the former over gamma, which is
    the balance of the latter."""
    k = content[1].shape[0] * style[1].shape[0]
    (of_content, whole_content), (of_style, whole_style) = strength(*content, k), strength(*style, k)
    return float(of_content / of_style), float(whole_content / whole_style)


def threshold(progress: float, pattern: Pattern = "s*", alpha: float = 1.5, beta: float | None = None) -> float:
    """s at this part of the run, 0 to 1 (what lies beyond begins anew).  beta None: 0.5 for "s", 0.85 alpha for "s*".

    Raises ValueError for an unknown pattern.
    """
    if pattern not in ("s", "s*"):
        raise ValueError(f"pattern is 's' or 's*', not {pattern!r}")
    if beta is None:
        beta = 0.5 if pattern == "s" else 0.85 * alpha
    value = alpha * (progress % 1) + beta
    return value % alpha if pattern == "s*" else value


@dataclass(frozen=True)
class _Update:
    """One LoRA of one layer."""

    down: Float[Tensor, "r in"]
    up: Float[Tensor, "out r"]
    bias: Float[Tensor, "out"] | None
    scale: Float[Tensor, ""]  # on the CPU, a number to the tensors it multiplies


@dataclass(frozen=True)
class _Layer:
    """A layer that both LoRAs change."""

    module: Any
    content: _Update
    style: _Update
    rho: float
    place: float  # in the order of the model's modules, 0 to 1


@dataclass(eq=False)
class LoraChoice:
    """Combine a content and a style LoRA, loaded with `pipe.load_lora_weights(..., adapter_name=...)`, not fused.

    content, style  names of the adapters; where a layer has both, one is chosen, whether they are active or not, and
                    others are not applied.  Layers without both do what the pipeline has set
    pattern, alpha, beta   of s(u); beta None: 0.5 for "s", 0.85 alpha for "s*"
    within_step     u advances from layer to layer, as the authors' counter, not from step to step
    modules         which layers: a selector of submodules; the linear layers of attention

    A compiled denoiser has one graph for all choices where both adapters are active (`pipe.set_adapters`), of one rank.
    After a call of the pipeline began, `rho` and `chosen` tell of each layer by name.
    Raises ValueError where no layer has both adapters, and for adapters that are fused into the weights, that are DoRA,
    or whose weights are offloaded layer by layer.
    """

    content: str
    style: str
    pattern: Pattern = "s*"
    alpha: float = 1.5
    beta: float | None = None
    within_step: bool = False
    modules: str = r".*\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"

    _layers: dict[tuple[str, str], _Layer] = field(default_factory=dict, init=False, repr=False)
    _known: dict[tuple[str, str], tuple[list[Any], float, float]] = field(default_factory=dict, init=False, repr=False)
    _now: dict[tuple[str, str], _Update] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        threshold(0.0, self.pattern, self.alpha, self.beta)
        if self.content == self.style:
            raise ValueError(f"content and style are two adapters, not both {self.content!r}")

    @property
    def rho(self) -> dict[str, float]:
        """By layer: content is chosen while this exceeds s."""
        return {name: layer.rho for (_, name), layer in self._layers.items()}

    @property
    def chosen(self) -> dict[str, str]:
        """By layer: the adapter of the current step."""
        return {
            name: self.content if self._now[key] is layer.content else self.style
            for key, layer in self._layers.items()
            for name in key[1:]
        }

    def begin_run(self, run: Any) -> None:
        if run.pipeline is None:
            raise ValueError("LoraChoice needs a pipeline with loaded adapters, not a bare denoiser")
        found, seen = {}, set()
        for denoiser in dict.fromkeys(site.denoiser for site in run.sites):
            model = getattr(run.pipeline, denoiser)
            of_name = dict(getattr(model, "_orig_mod", model).named_modules())
            for name in run.modules_of(self):
                module = of_name.get(name)
                adapters = set(getattr(module, "lora_A", ()))
                seen |= adapters
                if {self.content, self.style} <= adapters:
                    found[denoiser, name] = module
        if not found:
            raise ValueError(
                f"no layer among {self.modules!r} has both adapters {self.content!r} and {self.style!r}; these layers "
                f"have {sorted(seen) or 'none'}"
            )
        updates = {key: self._updates(key[1], module) for key, module in found.items()}
        ratios = {key: self._ratios(key, *pair) for key, pair in updates.items()}
        gamma = balance([whole for _, whole in ratios.values()])
        self._layers = {
            key: _Layer(found[key], *updates[key], rho=ratios[key][0] / gamma, place=(number + 1) / len(found))
            for number, key in enumerate(found)
        }

    def begin(self, call: DenoiseCall) -> None:
        """Layers are told which LoRA they apply, outside any compiled graph."""
        index, total = call.step.index, call.step.total
        for key, layer in self._layers.items():
            u = (index + layer.place if self.within_step else index) / total
            wins = layer.rho > threshold(u, self.pattern, self.alpha, self.beta)
            self._now[key] = layer.content if wins else layer.style

    def module(self, call: ModuleCall, module: Module) -> Any:
        key = (call.denoiser, call.name)
        if key not in self._layers or self._layers[key].module.disable_adapters:
            return module(call)
        update = self._now[key]
        base = self._layers[key].module.base_layer(call.inputs["x"])
        x = call.inputs["x"].to(update.down.dtype)
        return (base + F.linear(F.linear(x, update.down), update.up, update.bias) * update.scale).to(base.dtype)

    def _updates(self, name: str, module: Any) -> tuple[_Update, _Update]:
        if module.merged:
            raise ValueError(f"the adapters {module.merged_adapters} are fused into {name}: call pipe.unfuse_lora()")
        pair = []
        for adapter in (self.content, self.style):
            down, up = module.lora_A[adapter], module.lora_B[adapter]
            if down.weight.ndim != 2 or adapter in module.lora_variant:
                raise ValueError(
                    f"{adapter!r} at {name} is no plain LoRA of a linear layer; choose others with modules="
                )
            if down.weight.is_meta:
                raise ValueError(f"{adapter!r} at {name} is offloaded layer by layer: use enable_model_cpu_offload()")
            scale = torch.tensor(float(module.scaling[adapter]), dtype=torch.float64)
            pair.append(_Update(down.weight, up.weight, up.bias, scale))
        return pair[0], pair[1]

    def _ratios(self, key: tuple[str, str], content: _Update, style: _Update) -> tuple[float, float]:
        """`preference`, computed anew only where weights changed since the last run."""
        weights = [content.up, content.down, style.up, style.down]
        state = [(id(weight), weight._version) for weight in weights]
        if key not in self._known or self._known[key][0] != state:
            with torch.no_grad():
                self._known[key] = (state, *preference((content.up, content.down), (style.up, style.down)))
        return self._known[key][1:]
