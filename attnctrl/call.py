"""The call objects: what a control is given at each level, and what it may hand on.

All of them are frozen.  A control changes a call with `call.replace(...)` and never writes into a tensor it was given.
Every field but the tensors has a default, so an `AttentionCall` can be made by hand from three tensors and a control
can be tested without a model.

Shapes: b rows of the batch, h heads, n queries, m keys, d channels of a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .rope import Rope

__all__ = [
    "Attend",
    "AttentionCall",
    "Bias",
    "Denoise",
    "DenoiseCall",
    "Level",
    "Levels",
    "MissingRows",
    "Module",
    "ModuleCall",
    "Prediction",
    "Predicts",
    "Rope",
    "RowInputs",
    "Rows",
    "Segment",
    "Site",
    "Step",
    "StepCall",
    "StepFunction",
    "Tokens",
    "Window",
    "in_window",
]


# ---------------------------------------------------------------------------------------------------------------- sites


@dataclass(frozen=True)
class Site:
    """One softmax-attention layer of a denoiser.

    `name` is the module path, `kind` one of self, cross, joint, temporal, added, refiner, ip; `place` is down, mid, up,
    double, single or block; `block` counts within the place, `index` over the whole denoiser in order of execution.
    `scale` is how many times coarser than the latent its image tokens lie, along height and width (1 for the full
    latent, 2 for half of it ...).
    """

    name: str = ""
    kind: str = "self"
    place: str = "block"
    block: int = 0
    index: int = 0
    heads: int = 0
    head_dim: int = 0
    scale: int = 1
    denoiser: str = "unet"

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.place} {self.block}, {self.heads} heads, latent/{self.scale})"


# ----------------------------------------------------------------------------------------------------------------- rows


_COLUMNS = ("branch", "prompt", "image", "variant")


class MissingRows(ValueError):
    """A control needs rows that are not in this call of the denoiser."""


@dataclass(frozen=True)
class Rows:
    """What each row of the batch is: its branch, prompt, image and variant.

    `branch` is "cond", "uncond" or a family's own name; `prompt` and `image` are indices; `variant` is "" for the
    pipeline's own rows, else the tag of the control that added the row; `origin` is the row of the pipeline it copies.
    Where attention sees several batch entries per row (video frames folded into the batch), `fold` is their number,
    row-major.
    """

    branch: tuple[str, ...]
    prompt: tuple[int, ...]
    image: tuple[int, ...]
    variant: tuple[str, ...]
    origin: tuple[int, ...]
    fold: int = 1

    @classmethod
    def plain(cls, count: int) -> Rows:
        """`count` conditional rows, each its own prompt."""
        return cls.grid(("cond",), count, 1)

    @classmethod
    def grid(cls, branches: Sequence[str], prompts: int, images: int) -> Rows:
        """Rows in diffusers' order: branch by branch, prompt by prompt, the images of a prompt next to each other."""
        table = [(b, p, i) for b in branches for p in range(prompts) for i in range(images)]
        return cls(
            branch=tuple(b for b, _, _ in table),
            prompt=tuple(p for _, p, _ in table),
            image=tuple(i for _, _, i in table),
            variant=("",) * len(table),
            origin=tuple(range(len(table))),
        )

    def __len__(self) -> int:
        return len(self.branch)

    def table(self) -> list[tuple[str, int, int, str]]:
        """(branch, prompt, image, variant) of each row."""
        return list(zip(self.branch, self.prompt, self.image, self.variant, strict=True))

    def where(self, **columns: Any) -> Int[Tensor, "rows"]:
        """Batch indices whose columns have the values given, e.g. `rows.where(branch="cond")`."""
        return _where(self, tuple(sorted(columns.items())))

    def partner(self, **columns: Any) -> Int[Tensor, "b"]:
        """For every batch entry, the entry equal to it in all columns but those given, e.g. `rows.partner(prompt=0)`.

        Raises MissingRows when one is not in this call.
        """
        return _partner(self, tuple(sorted(columns.items())))

    def take(self, index: Sequence[int]) -> Rows:
        """The table of the rows at `index` (rows of the table, not folded batch entries)."""
        pick = lambda column: tuple(column[i] for i in index)  # noqa: E731
        return Rows(
            pick(self.branch), pick(self.prompt), pick(self.image), pick(self.variant), pick(self.origin), self.fold
        )

    def add(self, index: Sequence[int], variant: str) -> Rows:
        """These rows and then copies of those at `index`, whose variant is the tag of the control that adds them."""
        more = self.take(index)
        known = set(self.table())
        for branch, prompt, image, _ in more.table():
            if (branch, prompt, image, variant) in known:
                raise ValueError(f"there is a row {(branch, prompt, image, variant)} already; choose another tag")
        return Rows(
            self.branch + more.branch,
            self.prompt + more.prompt,
            self.image + more.image,
            self.variant + (variant,) * len(more),
            self.origin + more.origin,
            self.fold,
        )


def _unfold(rows: Sequence[int], fold: int, device: torch.device | str = "cpu") -> Tensor:
    if torch.is_inference_mode_enabled():  # what is kept must serve later calls that take gradients, too
        with torch.inference_mode(False):
            return _unfold(rows, fold, device)
    index = torch.tensor(rows, dtype=torch.long, device="cpu")
    if fold > 1:
        index = (index[:, None] * fold + torch.arange(fold, device="cpu")).flatten()
    return index.to(device)


def _known(columns: Iterable[str], names: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            raise ValueError(f"rows have no column {column!r}; they have {', '.join(names)}")


@lru_cache(maxsize=1024)
def batch_index(rows: tuple[int, ...], fold: int, device: torch.device) -> Int[Tensor, "b"]:
    """Batch entries of these rows of the table, on `device` (kept, so a denoiser on a GPU does not wait for it
    again)."""
    return _unfold(rows, fold, device)


@lru_cache(maxsize=256)
def _where(rows: Rows, columns: tuple[tuple[str, Any], ...]) -> Tensor:
    _known(dict(columns), (*_COLUMNS, "origin"))
    match = [i for i in range(len(rows)) if all(getattr(rows, name)[i] == value for name, value in columns)]
    return _unfold(match, rows.fold)


@lru_cache(maxsize=256)
def _partner(rows: Rows, columns: tuple[tuple[str, Any], ...]) -> Tensor:
    names = _COLUMNS
    _known(dict(columns), names)
    at = {entry: i for i, entry in enumerate(rows.table())}
    found = []
    for entry in rows.table():
        wanted = tuple(dict(zip(names, entry, strict=True), **dict(columns)).values())
        if wanted not in at:
            raise MissingRows(
                f"row {dict(zip(names, entry, strict=True))} needs the row {dict(zip(names, wanted, strict=True))} in "
                "the same call of the "
                f"denoiser, which has {rows.table()}; hand inward the partners too, or run source and target in one "
                "batch"
            )
        found.append(at[wanted])
    return _unfold(found, rows.fold)


# --------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Segment:
    """A named slice of tokens: text, image, reference:<i>, register, ...  `grid` is (height, width) or (frames, height,
    width)."""

    name: str
    start: int
    length: int
    grid: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Tokens:
    """The segments of the queries, or of the keys, of one call; `rope` tells where they lie, None where the model does
    not rotate them."""

    segments: tuple[Segment, ...] = ()
    rope: Rope | None = None

    @property
    def length(self) -> int:
        """Number of tokens described; 0 where nothing is known."""
        return sum(segment.length for segment in self.segments)

    def __contains__(self, name: str) -> bool:
        return any(segment.name == name for segment in self.segments)

    def __getitem__(self, name: str) -> Segment:
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(f"no segment {name!r} here; there are {[segment.name for segment in self.segments]}")

    def get(self, x: Float[Tensor, "b h n d"], name: str) -> Float[Tensor, "b h s d"]:
        """The tokens of segment `name`, a view."""
        segment = self[name]
        return x.narrow(2, segment.start, segment.length)

    def put(self, x: Float[Tensor, "b h n d"], name: str, value: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h n d"]:
        """A copy of `x` whose tokens of segment `name` are `value`."""
        segment = self[name]
        stop = segment.start + segment.length
        return torch.cat((x[:, :, : segment.start], value, x[:, :, stop:]), dim=2)

    def named(self, name: str, new: str) -> Tokens:
        """These tokens with segment `name` called `new`."""
        if new in self:
            raise ValueError(f"there is a segment {new!r} already: {[segment.name for segment in self.segments]}")
        self[name]
        return dataclasses.replace(
            self, segments=tuple(dataclasses.replace(s, name=new) if s.name == name else s for s in self.segments)
        )

    def concat(self, other: Tokens) -> Tokens:
        """These tokens and then those of `other`; of segments with one name the first stays the one that is found.

        Nothing is known of the whole where nothing is known of a part.  Tokens without a Rope beside others with one
        are tokens that are not rotated.
        """
        if not self.segments or not other.segments:
            return Tokens()
        start = self.length
        later = (dataclasses.replace(segment, start=segment.start + start) for segment in other.segments)
        return Tokens((*self.segments, *later), self._joined_rope(other))

    def take(self, index: Sequence[int] | Int[Tensor, "k"] | Bool[Tensor, "n"]) -> Tokens:
        """The tokens at `index` (on the CPU, or it is waited for).  Segments keep their names; one that is not taken
        whole and in order has no grid.

        Raises ValueError when an index is no token, or when tokens of one segment come to lie apart.
        """
        if not self.segments:
            return self
        if isinstance(index, Tensor):
            if index.dtype == torch.bool:
                if len(index) != self.length:
                    raise ValueError(f"a mask of {len(index)} tokens for {self.length} tokens")
                index = index.nonzero()[:, 0]
            index = index.tolist()
        chosen = tuple(index)
        segments, rope = _cut(self.segments, chosen), self.rope
        if rope is not None:
            rope = rope.take(batch_index(chosen, 1, rope.positions.device))
        return Tokens(segments, rope)

    def only(self, name: str) -> Tokens:
        """The tokens of segment `name`."""
        segment = self[name]
        rope = self.rope
        if rope is not None:
            rope = rope.take(slice(segment.start, segment.start + segment.length))
        return Tokens((dataclasses.replace(segment, start=0),), rope)

    def _joined_rope(self, other: Tokens) -> Rope | None:
        if self.rope is None and other.rope is None:
            return None
        first = self.rope or other.rope.unrotated(self.length)  # type: ignore[union-attr]
        return first.concat(other.rope or first.unrotated(other.length))


@lru_cache(maxsize=256)
def _cut(segments: tuple[Segment, ...], index: tuple[int, ...]) -> tuple[Segment, ...]:
    owner = [number for number, segment in enumerate(segments) for _ in range(segment.length)]
    outside = [i for i in index if not 0 <= i < len(owner)]
    if outside:
        raise ValueError(f"token {outside[0]} of {len(owner)} tokens")
    cut: list[Segment] = []
    taken: set[int] = set()
    for number, run in groupby(range(len(index)), key=lambda at: owner[index[at]]):
        places, segment = list(run), segments[number]
        if number in taken:
            raise ValueError(f"the tokens of segment {segment.name!r} come to lie apart; take them in one piece")
        taken.add(number)
        own = [index[at] for at in places] == list(range(segment.start, segment.start + segment.length))
        cut.append(Segment(segment.name, places[0], len(places), segment.grid if own else None))
    return tuple(cut)


# ----------------------------------------------------------------------------------------------------------------- time


Window = tuple[float, float] | tuple[int, int]


Predicts = Literal["noise", "velocity", "x0", "flow"]


@dataclass(frozen=True)
class Level:
    """A noise level: x = alpha * x0 + sigma * noise, in the scale of the pipeline's latents."""

    timestep: float
    alpha: float
    sigma: float


@dataclass(frozen=True)
class Levels:
    """The noise levels before and after a scheduler step, and what the network is trained to return: the noise, the
    velocity (alpha noise - sigma x0), x0, or the flow (noise - x0)."""

    now: Level
    next: Level
    predicts: Predicts


@dataclass(frozen=True)
class Step:
    """Where the sampling loop is.

    `index` counts calls of `scheduler.step` since `set_timesteps`, which is the loop's own counter; `total` is the
    number of iterations this run makes (n+1 for PNDM, fewer with strength); `call` counts the denoiser's calls since
    the last scheduler step; `skipped` is the number of iterations of the full schedule before the first one run.

    `now`, `next` and `predicts` are those of `levels`.  In a pipeline they are read from the scheduler when first asked
    for, which may wait for an accelerator: ask in `begin`, not inside compiled graphs.
    """

    index: int = 0
    total: int = 1
    call: int = 0
    timestep: float = 0.0
    skipped: int = 0
    levels: Levels | None = field(default=None, repr=False, compare=False)

    @property
    def now(self) -> Level:
        """The noise level before this scheduler step."""
        return self._levels.now

    @property
    def next(self) -> Level:
        """The noise level after it."""
        return self._levels.next

    @property
    def predicts(self) -> Predicts:
        """What the network returns."""
        return self._levels.predicts

    @property
    def _levels(self) -> Levels:
        if self.levels is None:
            raise ValueError(
                "this step knows no noise levels: it was made without a scheduler; give it levels=Levels(...)"
            )
        return self.levels

    def x0(self, sample: Float[Tensor, "images ..."], prediction: Float[Tensor, "images ..."]) -> Tensor:
        """The clean latents that `prediction` makes of `sample` at the level `now`."""
        level, width = self.now, sample.shape[1]
        if prediction.shape[1] == 2 * width and prediction.shape[2:] == sample.shape[2:]:
            prediction = prediction[:, :width]  # the rest is a learned variance
        if self.predicts == "x0":
            return prediction
        if self.predicts == "flow":
            return sample - level.sigma * prediction
        if self.predicts == "velocity":
            norm = math.hypot(level.alpha, level.sigma)
            return level.alpha / norm**2 * sample - level.sigma / norm * prediction
        if level.alpha == 0:
            raise ValueError("at a level of pure noise (alpha 0) a noise prediction says nothing of x0")
        return (sample - level.sigma * prediction) / level.alpha


def in_window(step: Step, window: Window) -> bool:
    """Whether `step` lies in the half-open window: fractions of the run when a bound is a float, step indices when both
    are ints."""
    start, stop = window
    if isinstance(start, int) and isinstance(stop, int):
        return start <= step.index < stop
    return int(start * step.total) <= step.index < int(stop * step.total)


# ------------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Bias:
    """An additive low-rank bias: logits += left @ right^T, after the scale and before the softmax.  `left` None stands
    for ones (a key bias)."""

    left: Float[Tensor, "#b #h n r"] | None
    right: Float[Tensor, "#b #h m r"]


@dataclass(frozen=True)
class AttentionCall:
    """One softmax-attention operation: after projections, q/k norms and RoPE, before the output projection.

    `scale` None stands for 1/sqrt(d).  `part` numbers the operations of one module (an image adapter issues several).
    A call with `probe=True` carries an indicator as value: the chain must stay linear in it, and nobody counts, stores
    or reuses it.
    """

    query: Float[Tensor, "b h n d"]
    key: Float[Tensor, "b h m d"]
    value: Float[Tensor, "b h m c"]
    mask: Bool[Tensor, "#b #h #n m"] | Float[Tensor, "#b #h #n m"] | None = None
    bias: tuple[Bias, ...] = ()
    scale: float | None = None
    causal: bool = False
    probe: bool = False
    kind: str = "self"
    part: int = 0
    site: Site = field(default_factory=Site)
    rows: Rows | None = None
    query_tokens: Tokens = field(default_factory=Tokens)
    key_tokens: Tokens = field(default_factory=Tokens)
    latent: tuple[int, ...] | None = None
    step: Step = field(default_factory=Step)

    def replace(self, **changes: Any) -> AttentionCall:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def table(self) -> Rows:
        """The row table; every row its own conditional prompt where none was given."""
        return Rows.plain(self.query.shape[0]) if self.rows is None else self.rows

    @property
    def grid(self) -> tuple[int, ...] | None:
        """(height, width) or (frames, height, width) of the queries' image tokens, where known."""
        for segment in self.query_tokens.segments:
            if segment.name == "image":
                return segment.grid
        return None

    def take(self, rows: Sequence[int]) -> AttentionCall:
        """The call for these rows of the table only."""
        table = self.table
        index = batch_index(tuple(rows), table.fold, self.query.device)
        return self.borrow(index).replace(value=self.value[index], rows=table.take(rows))

    def borrow(self, index: Int[Tensor, "b"]) -> AttentionCall:
        """The call with queries, keys, mask and bias of the batch entries `index`, and its own values: their attention
        maps on these values."""
        pick = lambda x: x if x is None or x.shape[0] == 1 else x[index]  # noqa: E731
        return self.replace(
            query=self.query[index],
            key=self.key[index],
            mask=pick(self.mask),
            bias=tuple(Bias(pick(bias.left), pick(bias.right)) for bias in self.bias),
        )

    def queries(self, name: str) -> AttentionCall:
        """The call for the queries of segment `name` only, all keys."""
        segment = self.query_tokens[name]
        cut = lambda x: x if x is None or x.shape[2] == 1 else x.narrow(2, segment.start, segment.length)  # noqa: E731
        return self.replace(
            query=self.query_tokens.get(self.query, name),
            mask=cut(self.mask),
            bias=tuple(Bias(cut(bias.left), bias.right) for bias in self.bias),
            query_tokens=self.query_tokens.only(name),
        )

    def forbid(self, mask: Bool[Tensor, "#b #h #n m"]) -> AttentionCall:
        """The call with these (query, key) pairs closed, on top of the mask that is there (True = forbidden here)."""
        if self.mask is None:
            return self.replace(mask=~mask)
        if self.mask.dtype == torch.bool:
            return self.replace(mask=self.mask & ~mask)
        return self.replace(mask=self.mask.masked_fill(mask, float("-inf")))


class Attend(Protocol):
    """The rest of the chain at one site."""

    def __call__(self, call: AttentionCall, /) -> Float[Tensor, "b h n c"]: ...


# --------------------------------------------------------------------------------------------------------------- module


@dataclass(frozen=True)
class ModuleCall:
    """One call of a submodule of a denoiser: `inputs` are the arguments of its forward by name, `rows` the table of the
    batch entries (folded where frames lie in the batch)."""

    name: str
    inputs: Mapping[str, Any]
    rows: Rows
    step: Step = field(default_factory=Step)
    denoiser: str = "unet"

    def replace(self, **changes: Any) -> ModuleCall:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_inputs(self, **inputs: Any) -> ModuleCall:
        """A copy with these arguments of forward changed."""
        return self.replace(inputs={**self.inputs, **inputs})


Module = Callable[[ModuleCall], Any]
"""The rest of the chain at one submodule; returns what its forward returns."""


# ----------------------------------------------------------------------------------------------- denoiser and scheduler


@dataclass(frozen=True)
class RowInputs:
    """How the arguments of a denoiser's forward lie along its rows: every tensor has one entry per row (or a single one
    for all), but those named `shared`; lists named `listed` have one entry per row.  `sure` is False for a model that
    is in no table, where a tensor of another length is taken for shared."""

    shared: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    sure: bool = True

    def take(self, inputs: Mapping[str, Any], rows: Sequence[int], count: int) -> dict[str, Any]:
        """The inputs of the rows at `rows`, of inputs for `count` rows."""
        return {name: self._take(name, value, tuple(rows), count) for name, value in inputs.items()}

    def _take(self, name: str, value: Any, rows: tuple[int, ...], count: int) -> Any:
        if name in self.shared:
            return value
        if isinstance(value, Mapping):
            return {key: self._take(key, entry, rows, count) for key, entry in value.items()}
        if name in self.listed and isinstance(value, (list, tuple)) and len(value) == count:
            return type(value)(value[row] for row in rows)
        if isinstance(value, (list, tuple)):
            return type(value)(self._take(name, entry, rows, count) for entry in value)
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if len(value) == count:
            if not self.sure and name.endswith(("ids", "mask_index", "freqs", "rotary_emb")):
                raise ValueError(
                    f"input {name!r} has {count} entries, as many as there are rows, and this model is in no table: "
                    "whether it lies along the rows is not known"
                )
            return value[batch_index(rows, 1, value.device)]
        if len(value) == 1 or not self.sure:
            return value
        raise ValueError(
            f"input {name!r} has {len(value)} entries where the denoiser has {count} rows: which are whose is not known"
        )


@dataclass(frozen=True)
class DenoiseCall:
    """One call of the denoiser.

    `latents` has one row per image, as `scheduler.step` will get them: unscaled, without channels or reference tokens
    the pipeline appends. `inputs` holds every argument of `forward` by name, as the pipeline gave it.  `denoiser` is
    the name of the pipeline's component.  `along` tells how inputs lie along the rows.
    """

    latents: Float[Tensor, "images ..."]
    inputs: Mapping[str, Any]
    rows: Rows
    step: Step
    denoiser: str = "unet"
    along: RowInputs = field(default_factory=RowInputs)

    def replace(self, **changes: Any) -> DenoiseCall:
        """A copy with these fields changed.  New `latents` are scaled, repeated over branches and put into the model's
        input by the engine."""
        return dataclasses.replace(self, **changes)

    def take(self, rows: Sequence[int]) -> DenoiseCall:
        """The call for these rows of the table only (`latents` stay one per image).  Controls behind need the partners
        of the rows they edit, or raise MissingRows."""
        return self._with_rows(rows, self.rows.take(rows))

    def add_rows(self, index: Sequence[int], variant: str) -> DenoiseCall:
        """The call with copies of the rows at `index` after its own, tagged `variant`.  The prediction then has their
        rows last; the control that added them hands outward as many rows as it was given."""
        return self._with_rows([*range(len(self.rows)), *index], self.rows.add(index, variant))

    def _with_rows(self, index: Sequence[int], rows: Rows) -> DenoiseCall:
        return self.replace(inputs=self.along.take(self.inputs, index, len(self.rows)), rows=rows)


@dataclass(frozen=True)
class Prediction:
    """What the denoiser returned, one row per row of the call.

    `latents`, one row per image, commits: where the outermost control returns them, later denoiser calls of this
    iteration and `scheduler.step` use them instead of the pipeline's.
    """

    value: Float[Tensor, "rows ..."]
    latents: Float[Tensor, "images ..."] | None = None

    def replace(self, **changes: Any) -> Prediction:
        return dataclasses.replace(self, **changes)

    def take(self, rows: Sequence[int]) -> Prediction:
        """The prediction for these rows only."""
        return self.replace(value=self.value[batch_index(tuple(rows), 1, self.value.device)])

    def put(self, rows: Sequence[int], value: Float[Tensor, "some ..."]) -> Prediction:
        """A copy whose rows at `rows` are `value`."""
        index = batch_index(tuple(rows), 1, self.value.device)
        return self.replace(value=self.value.index_copy(0, index, value.to(self.value.dtype)))


Denoise = Callable[[DenoiseCall], Prediction]


@dataclass(frozen=True)
class StepCall:
    """One `scheduler.step`: the guided prediction and the latents before it, one row per image.

    `rows` has one row per image (prompt and image columns); `grid` is the image's token grid for latents that are
    packed into tokens (batch, tokens, channels), else the latent's own height and width (or frames, height, width).
    """

    prediction: Float[Tensor, "images ..."]
    sample: Float[Tensor, "images ..."]
    rows: Rows
    step: Step
    grid: tuple[int, ...] | None = None
    packed: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def replace(self, **changes: Any) -> StepCall:
        return dataclasses.replace(self, **changes)

    def x0(self) -> Float[Tensor, "images ..."]:
        """The clean latents that the prediction makes of the sample."""
        return self.step.x0(self.sample, self.prediction)


StepFunction = Callable[[StepCall], Tensor]
