"""Prompt-to-prompt (arXiv:2208.01626): target images read the source image's attention maps, remapped word by word.

For a conditional target row t of source s, at step i, with A = softmax(q k^T / sqrt(d)):
    cross   A* = alpha_i (c A_s P) + (1 - alpha_i) A_t             P, c, alpha: words, factors, windows (alignment.py)
            out = att(q_s, k_s, S v_t) + att(q_t, k_t, diag(beta) v_t)   S = P diag(c alpha); no map (mixing.py)
    self    out = att(q_s, k_s, v_t)                               in the self window, up to a resolution
    joint   exact: image queries read the source's map, text columns as in cross, image columns as in self
            out_i = att(q_i^s, k^s, [v_i; S v_x]) + att(q_i, k, [0; diag(beta) v_x])     text queries stay plain
            image_qk (arXiv:2508.07519): out = att([q_i^s; q_x], [k_i^s; k_x], v)
Uncond rows and the source stay plain.  Nothing is renormalised, as in the authors' code.
Fused calls per site: two at most for cross, one for self and image_qk, at most three for exact (the first two of them
for all rows or the whole sequence, so that what is not edited keeps its bits).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..alignment import Window, Windows, equalizers, refine_mapper, replace_mapper, schedule, self_window
from ..call import (
    Attend,
    AttentionCall,
    Denoise,
    DenoiseCall,
    MissingRows,
    Prediction,
    Rows,
    Step,
    StepCall,
    StepFunction,
    batch_index,
)
from ..latents.shared_noise import SharedNoise
from ..mixing import Mixing, mix, mixing
from ..prompts import Prompts, check_call, check_count, encode_in, flatten
from ..tokens import Encoded, Word, as_words, words

__all__ = ["PromptToPrompt"]


@dataclass(frozen=True)
class _Tables:
    """What is known once the prompts are encoded: per target (t), alpha over steps, S and beta per distinct alpha."""

    targets: dict[int, int]  # prompt index -> t
    moment: list[int]  # step index -> which distinct alpha
    source: Float[Tensor, "moments t n n"]
    beta: Float[Tensor, "moments t n"]


@dataclass(frozen=True)
class _Plan:
    """What the attention of some rows needs in one denoiser call."""

    index: Int[Tensor, "b"]  # every batch entry itself, a target its source
    targets: Int[Tensor, "t"]
    sources: Int[Tensor, "t"]
    rows: Rows  # of the targets
    mixing: Mixing | None  # of each target; None: nothing to edit at cross sites
    own_maps: bool  # whether self maps (image columns of joint ones) are the targets' own


@dataclass(eq=False)
class PromptToPrompt:
    """Edit images by editing their prompt.

    prompts    [source, target, ...] as given to the pipeline, or a list of such edits
    cross      when targets follow the source's cross-attention: a fraction of the run, (start, stop), or
               {"default": ..., word: ...} for words of the targets.  None, or a "default" of None: 0.8 (authors'
               notebook) at cross sites, 0.4 at joint ones; a mapping without "default" means the whole run (authors)
    self_      the same for self maps and the image columns of joint ones.  None: 0.4 (authors' notebook) at self sites;
               where there are joint ones, the default window of `cross`
    edit       "replace" word by word, "refine" (words added or removed), or "auto": replace where source and target
               have equally many words
    reweight   {word: factor} on the attention of target words; any real number
    skip       target words that keep their own attention
    limit      self sites that are edited: a float is a fraction of the latent's side (0.25: the authors' 16x16 for
               512 pixels), an int a number of tokens; None: a quarter, or the model's coarsest where all are finer
    joint      "exact" or "image_qk"; None: the family's default
    tail       "official" repeats the authors' slip after a changed word of another length
    share_noise  targets start from the source's noise (`latents.SharedNoise`)
    sites      a selector, to edit fewer sites

    Raises ValueError for prompts, words, windows that do not fit; MissingRows when source and target are not in one
    call of the denoiser.
    """

    prompts: Prompts
    cross: Windows | None = None
    self_: Window | None = None
    edit: Literal["auto", "replace", "refine"] = "auto"
    reweight: Mapping[Word, float] | None = None
    skip: Word | Iterable[Word] = ()
    limit: float | int | None = None
    joint: Literal["exact", "image_qk"] | None = None
    tail: Literal["corrected", "official"] = "corrected"
    share_noise: bool = True
    sites: str | None = None

    stage = "edit"
    kinds = frozenset({"cross", "self", "joint"})
    needs = frozenset({"all_rows"})

    _run: Any = field(default=None, init=False, repr=False)
    _tables: dict[Any, _Tables] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[Any, _Plan] = field(default_factory=dict, init=False, repr=False)
    _now: tuple[tuple[Rows, _Plan | None], ...] = field(default=(), init=False, repr=False)
    _coarse: int = field(default=1, init=False, repr=False)
    _form: str = field(default="exact", init=False, repr=False)

    def __post_init__(self) -> None:
        self._flat, self._source_of = flatten(self.prompts)
        if self.edit not in ("auto", "replace", "refine"):
            raise ValueError(f"edit is 'auto', 'replace' or 'refine', not {self.edit!r}")
        if self.joint not in (None, "exact", "image_qk"):
            raise ValueError(f"joint is 'exact', 'image_qk' or None, not {self.joint!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(
                f"limit is a fraction of the latent's side or a number of tokens, above 0, not {self.limit!r}"
            )
        if self.self_ is not None:
            self_window(self.self_, 1)
        self._form = self.joint or "exact"
        self._noise = SharedNoise(self.prompts)

    # ------------------------------------------------------------------------------------------------------- attention

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._plan_for(call)
        if plan is None or (plan.mixing is None and plan.own_maps):
            return attend(call)
        if call.kind == "cross":
            return attend(call) if plan.mixing is None else self._cross(call, attend, plan, plan.mixing)
        if call.kind == "joint":
            return self._image_qk(call, attend, plan) if self._form == "image_qk" else self._joint(call, attend, plan)
        if call.kind == "self" and not plan.own_maps and self._within(call):
            return attend(call.borrow(plan.index))
        return attend(call)

    def _cross(self, call: AttentionCall, attend: Attend, plan: _Plan, edit: Mixing) -> Tensor:
        value = call.value[plan.targets]
        mixed = call.value.index_copy(0, plan.targets, edit.source(value))
        out = attend(call.borrow(plan.index).replace(value=mixed))
        if not edit.uses_own:
            return out
        own = attend(call.borrow(plan.targets).replace(value=edit.own(value), rows=plan.rows))
        return out.index_add(0, plan.targets, own)

    def _joint(self, call: AttentionCall, attend: Attend, plan: _Plan) -> Tensor:
        tokens = call.key_tokens
        value = call.value[plan.targets]
        own = tokens.get(value, "text")
        followed = torch.zeros_like(own)
        if plan.mixing is not None:
            followed, own = plan.mixing.source(own), plan.mixing.own(own)
        nothing = torch.zeros_like(value)  # text columns are put in below
        of_source, of_target = (nothing, value) if plan.own_maps else (value, nothing)

        out = attend(call)
        # all queries, though only the image's are kept: a call of the same shape rounds alike
        edited = attend(
            call.borrow(plan.sources).replace(value=tokens.put(of_source, "text", followed), rows=plan.rows)
        )
        if plan.own_maps or plan.mixing is None or plan.mixing.uses_own:
            edited = edited + attend(
                call.borrow(plan.targets).replace(value=tokens.put(of_target, "text", own), rows=plan.rows)
            )
        return _put_images(out, edited, call, plan)

    def _image_qk(self, call: AttentionCall, attend: Attend, plan: _Plan) -> Tensor:
        if plan.own_maps:
            return attend(call)
        queries, keys = call.query_tokens, call.key_tokens
        shared = call.replace(
            query=queries.put(call.query, "image", queries.get(call.query, "image")[plan.index]),
            key=keys.put(call.key, "image", keys.get(call.key, "image")[plan.index]),
        )
        out = attend(shared)
        if not self.reweight or plan.mixing is None:
            return out
        value = call.value[plan.targets]
        scaled = keys.put(value, "text", plan.mixing.source(keys.get(value, "text")))
        return _put_images(out, attend(shared.borrow(plan.targets).replace(value=scaled, rows=plan.rows)), call, plan)

    def _within(self, call: AttentionCall) -> bool:
        """Whether the self site is coarse enough."""
        if self.limit is None:
            return call.site.scale >= self._coarse
        tokens = call.query.shape[2]
        if isinstance(self.limit, int):
            return tokens <= self.limit
        if call.latent is None:
            raise ValueError(
                f"limit={self.limit} is a fraction of the latent's side, which this call does not know; "
                "give a number of tokens"
            )
        *frames, height, width = call.latent
        return tokens <= math.prod(frames) * math.ceil(height * self.limit) * math.ceil(width * self.limit)

    # ---------------------------------------------------------------------------------------------------- shared noise

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        return self._noise.denoise(call, denoise) if self.share_noise else denoise(call)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        return self._noise.step(call, step) if self.share_noise else step(call)

    # ------------------------------------------------------------------------------------ what depends on run and step

    def begin_run(self, run: Any) -> None:
        self._run = run
        self._tables.clear()
        self._plans.clear()
        check_call("PromptToPrompt", self._flat, run.prompts)
        self_scales = [site.scale for site in run.sites_of(self) if site.kind == "self"]
        self._coarse = min(4, max(self_scales, default=4))

    def begin(self, call: DenoiseCall) -> None:
        """Plans are made outside any compiled graph: for all rows, and the conditional ones, as observers do."""
        self._form = self.joint or self._run.family(call.denoiser).joint
        check_count("PromptToPrompt", len(self._flat), call.rows.prompt)
        text, like = self._run.geometry(call.denoiser).text, call.latents
        tables = dict.fromkeys((call.rows, call.rows.take(call.rows.where(branch="cond").tolist())))
        joint = self._meets_joint()
        self._now = tuple((rows, self._plan(rows, call.step, text, joint, like.device, like.dtype)) for rows in tables)

    def _plan_for(self, call: AttentionCall) -> _Plan | None:
        for rows, plan in self._now:
            if rows == call.rows:
                return plan
        # a part of the rows, folded rows, or a call made by hand
        length: int | None = None
        if call.kind == "cross":
            length = call.key.shape[2]
        elif "text" in call.key_tokens:
            length = call.key_tokens["text"].length
        elif self._run is not None:
            length = self._run.geometry(call.site.denoiser).text
        joint = call.kind == "joint" or self._meets_joint()
        return self._plan(call.table, call.step, length, joint, call.query.device, call.value.dtype)

    def _plan(
        self, rows: Rows, step: Step, length: int | None, joint: bool, device: torch.device, dtype: torch.dtype
    ) -> _Plan | None:
        pairs = self._pairs(rows)
        if not pairs:
            return None
        steps = self._steps(step)
        cross, self_ = self._windows(joint)
        start, stop = self_window(self_, steps)
        own_maps = not start <= step.index < stop
        tables = self._tables_for(length, steps, cross)
        moment = tables.moment[min(step.index, len(tables.moment) - 1)]
        key = (rows, length, steps, moment, own_maps, device, dtype)
        if key not in self._plans:
            targets, sources = tuple(row for row, _ in pairs), tuple(source for _, source in pairs)
            of_targets, of_sources = (batch_index(some, rows.fold, device) for some in (targets, sources))
            t = [tables.targets[rows.prompt[row]] for row in targets for _ in range(rows.fold)]
            edit = mixing(tables.source[moment][t], tables.beta[moment][t])
            self._plans[key] = _Plan(
                index=torch.arange(len(rows) * rows.fold, device=device).index_copy(0, of_targets, of_sources),
                targets=of_targets,
                sources=of_sources,
                rows=rows.take(targets),
                mixing=None if edit.plain else edit.to(device, dtype),
                own_maps=own_maps,
            )
        return self._plans[key]

    def _pairs(self, rows: Rows) -> list[tuple[int, int]]:
        """(target row, its source's row) of the conditional rows."""
        at = {entry: i for i, entry in enumerate(rows.table())}
        pairs = []
        for row, (branch, prompt, image, variant) in enumerate(rows.table()):
            if branch != "cond" or self._source_of[prompt] == prompt:
                continue
            source = (branch, self._source_of[prompt], image, variant)
            if source not in at:
                raise MissingRows(
                    f"target row {row} needs its source {source} in the same call of the denoiser, which has "
                    f"{rows.table()}; hand inward the sources too"
                )
            pairs.append((row, at[source]))
        return pairs

    def _steps(self, step: Step) -> int:
        """The n that windows are counted with: the steps asked for where the loop makes n + 1 iterations (PNDM), else
        the iterations of the loop."""
        asked = getattr(getattr(getattr(self._run, "pipeline", None), "scheduler", None), "num_inference_steps", None)
        return asked if asked is not None and step.total == asked + 1 else step.total

    def _meets_joint(self) -> bool:
        return self._run is not None and any(site.kind == "joint" for site in self._run.sites_of(self))

    def _windows(self, joint: bool) -> tuple[Windows, Window]:
        """`cross` and `self_` with the defaults filled in."""
        usual = 0.4 if joint else 0.8
        given: Any = usual if self.cross is None else self.cross
        default = given
        if isinstance(given, Mapping):
            default = given.get("default", given.get("default_", 1.0))
            if default is None:
                default, given = usual, {**given, "default": usual}
        self_ = (default if joint else 0.4) if self.self_ is None else self.self_
        return given, self_

    def _tables_for(self, length: int | None, steps: int, cross: Windows) -> _Tables:
        key = (length, steps)
        if key not in self._tables:
            self._tables[key] = self._make_tables(length, steps, cross)
        return self._tables[key]

    def _make_tables(self, length: int | None, steps: int, cross: Windows) -> _Tables:
        encoded = [encode_in(self._run, prompt, length) for prompt in self._flat]
        targets = [p for p, source in enumerate(self._source_of) if p != source]
        of_targets = [encoded[p] for p in targets]
        scale = None if self.reweight is None else equalizers(of_targets, self.reweight)  # (t, n)
        if self._form == "image_qk":  # text keys are the target's own: nothing to align, factors act on their values
            if isinstance(cross, Mapping) or as_words(self.skip):
                raise ValueError("windows per word and skip need the text columns of the map: use joint='exact'")
            alpha = torch.ones(1, len(targets), of_targets[0].length, dtype=torch.float64)
        else:
            alpha = schedule(cross, of_targets, steps, skip=self.skip)  # (steps + 1, t, n)
        distinct, moment = alpha.unique(dim=0, return_inverse=True)
        sources, betas = [], []
        for t, p in enumerate(targets):
            source = encoded[self._source_of[p]]
            mapper = None if self._form == "image_qk" else self._mapper(source, encoded[p])
            s, beta = mix(mapper, distinct[:, t], None if scale is None else scale[t], n_src=source.length)
            sources.append(s)
            betas.append(beta)
        at = {p: t for t, p in enumerate(targets)}
        return _Tables(at, moment.tolist(), torch.stack(sources, 1), torch.stack(betas, 1))

    def _mapper(self, source: Encoded, target: Encoded) -> Any:
        edit = self.edit
        if edit == "auto":
            edit = "replace" if len(words(source)) == len(words(target)) else "refine"
        return replace_mapper(source, target, self.tail) if edit == "replace" else refine_mapper(source, target)


def _put_images(out: Tensor, edited: Tensor, call: AttentionCall, plan: _Plan) -> Tensor:
    """`out` with the image queries of the target rows taken from `edited`, which holds the target rows."""
    queries = call.query_tokens
    images = queries.get(out, "image").index_copy(0, plan.targets, queries.get(edited, "image"))
    return queries.put(out, "image", images)
