"""RF-Edit (arXiv:2411.04746): the edit reads the values that the inversion of the source had, early in the run.

    out_t = att(q_t, k_t, v_s)          all tokens, text included; one fused call, no map
v_s is of the same site, interval and order of evaluation (stored_features.py says how these are told).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ..call import Attend, AttentionCall
from .stored_features import FromSource

__all__ = ["ValueSharing"]


@dataclass(eq=False)
class ValueSharing(FromSource):
    """Keep the structure of a source image by reading its values.

    stored  what an inversion kept (`StoredFeatures`): its intervals and solver are this control's, too; every row that
            has nothing stored of its own branch and prompt reads the cond row's.  None: the source is prompt 0 of the
            same pipeline call, run in lockstep (for generated sources; an inversion is another trajectory)
    steps   in which part of the run; None: all that is stored, or without a store (0.0, 0.2), the authors' 5 of 25
    text    whether text tokens are shared, too, as by the authors, whose texts have one length; False: images only
    sites   a selector or a function; the default is `late_sites`: FLUX single blocks 20-37, the authors'

    Memory: see StoredFeatures; none in lockstep.
    Raises ValueError where source and edit differ in sizes, text lengths or steps; MissingRows without a source.
    """

    def names(self) -> list[str]:
        return ["value"]

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        source = self.source(call)
        return attend(call) if source is None else attend(call.replace(**source))
