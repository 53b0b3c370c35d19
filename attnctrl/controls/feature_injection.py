"""FireFlow's editing strategies (arXiv:2412.07517): add or replace queries, keys, values by those of the source.

    add_x      x <- x + r_x x_s        replace_x      x <- r_x x_s        for x of q, k, v; out = att(q, k, v)
One fused call.  The authors add after the q/k norm and before RoPE; RoPE is linear and positions are the same, so what
is added after it is equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ..call import Attend, AttentionCall
from .stored_features import FromSource

__all__ = ["FeatureInjection"]

_STRATEGIES = {f"{verb}_{name[0]}": (verb, name) for verb in ("add", "replace") for name in ("query", "key", "value")}


@dataclass(eq=False)
class FeatureInjection(FromSource):
    """Add or replace queries, keys and values by a source's.

    stored, steps, text, sites   as in ValueSharing; `stored` must keep the features named ("qv" for "add_q replace_v")
    strategy  words of add_q, add_k, add_v, replace_q, replace_k, replace_v; "replace_v" is ValueSharing.  The authors:
              "add_q", "add_k" or "add_v" where too little changes, "add_q replace_v" where too much
    ratio     factors of the source's q, k, v; the authors' default is (1, 1, 1)
    """

    strategy: str = "replace_v"
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.strategy.split()
        for word in words:
            if word not in _STRATEGIES:
                raise ValueError(f"no strategy {word!r} in {self.strategy!r}; there are {', '.join(_STRATEGIES)}")
        twice = [word for word in words if sum(w[-1] == word[-1] for w in words) > 1]
        if twice or not words:
            raise ValueError(f"strategy names one or more of q, k, v, each once, not {self.strategy!r}")
        if len(self.ratio) != 3:
            raise ValueError(f"ratio has a factor for each of q, k, v, not {self.ratio!r}")
        self._verbs = {name: verb for verb, name in map(_STRATEGIES.__getitem__, words)}
        self._ratios = dict(zip(("query", "key", "value"), self.ratio, strict=True))

    def names(self) -> list[str]:
        return list(self._verbs)

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        source = self.source(call)
        if source is None:
            return attend(call)
        changed = {}
        for name, x in source.items():
            scaled = x if self._ratios[name] == 1 else self._ratios[name] * x
            changed[name] = getattr(call, name) + scaled if self._verbs[name] == "add" else scaled
        return attend(call.replace(**changed))
