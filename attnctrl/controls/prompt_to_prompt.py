"""Prompt-to-prompt (arXiv:2208.01626): target images read the source image's attention maps, remapped word by word.

For a conditional target row t of source s, at step i, with A = softmax(q k^T / sqrt(d)):
    cross   A* = alpha_i (c A_s P) + (1 - alpha_i) A_t                  P, c, alpha: words, strengths, windows (alignment.py)
            out = att(q_s, k_s, S v_t) + att(q_t, k_t, diag(beta) v_t)   S = P diag(c alpha); two fused calls, no map (mixing.py)
    self    out = att(q_s, k_s, v_t)                                     in the self window, up to a resolution; one fused call
    joint   exact: image queries read the source's whole map, text columns remapped as in cross, image columns as in self
            out_i = att(q_i^s, k^s, [v_i; S v_x]) + att(q_i, k, [0; diag(beta) v_x])       text queries stay plain
            image_qk (arXiv:2508.07519): out = att([q_i^s; q_x], [k_i^s; k_x], v)           one fused call
Uncond rows and the source stay plain.  Nothing is renormalised, as in the authors' code.
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
from ..call import Attend, AttentionCall, Denoise, DenoiseCall, MissingRows, Prediction, Rows, Step, StepCall, StepFunction
from ..latents.shared_noise import SharedNoise
from ..mixing import Mixing, mix, mixing
from ..prompts import Prompts, encode_for, flatten
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
    """What one denoiser call needs: batch entries, and the mixing of each target entry."""

    index: Int[Tensor, "b"]  # every entry itself, a target its source
    rows: tuple[int, ...]  # the target rows of the table
    targets: Int[Tensor, "t"]
    sources: Int[Tensor, "t"]
    mixing: Mixing | None  # None: nothing to edit at cross sites
    own_maps: bool  # whether self maps (image columns of joint ones) are the targets' own

    @property
    def idle(self) -> bool:
        return self.mixing is None and self.own_maps


@dataclass(eq=False)
class PromptToPrompt:
    """Edit images by editing their prompt.

    prompts    [source, target, ...] as given to the pipeline, or a list of such edits
    cross      when targets follow the source's cross-attention: a fraction of the run, (start, stop), or {"default": ..., word: ...} per target word.
               None: 0.8 (authors' notebook) at cross sites, 0.4 at joint sites
    self_      the same for self-attention maps and the image columns of joint ones.  None: 0.4 (authors' notebook) at self sites, at joint sites
               the default window of `cross`
    edit       "replace" word by word, "refine" (words added or removed), or "auto": replace where the prompts have equally many words
    reweight   {word: factor} on the attention of target words; any real number
    skip       target words that keep their own attention
    limit      self sites that are edited: a float is a fraction of the latent's side (0.25: the authors' 16x16 for 512 px), an int a number of
               tokens; None: a quarter, or the model's coarsest self sites where it has none that coarse
    joint      "exact" or "image_qk", None: the family's default
    tail       "official" repeats the authors' slip after a changed word of another length
    share_noise  all rows of an edit start from the source's noise
    sites      a selector, to edit fewer sites

    Raises ValueError for prompts, words, windows that do not fit; MissingRows when source and target are not in one call of the denoiser.
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
    _now: _Plan | None = field(default=None, init=False, repr=False)
    _now_rows: Rows | None = field(default=None, init=False, repr=False)
    _coarse: int = field(default=1, init=False, repr=False)
    _form: str = field(default="exact", init=False, repr=False)

    def __post_init__(self) -> None:
        self._flat, self._source_of = flatten(self.prompts)
        if self.edit not in ("auto", "replace", "refine"):
            raise ValueError(f"edit is 'auto', 'replace' or 'refine', not {self.edit!r}")
        if self.joint not in (None, "exact", "image_qk"):
            raise ValueError(f"joint is 'exact', 'image_qk' or None, not {self.joint!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is a fraction of the latent's side or a number of tokens, above 0, not {self.limit!r}")
        if self.self_ is not None:
            self_window(self.self_, 1)
        self._form = self.joint or "exact"

    # ------------------------------------------------------------------------------------------------------ attention

    def attention(self, call: AttentionCall, attend: Attend) -> Float[Tensor, "b h n c"]:
        plan = self._now if self._now is not None and call.rows is self._now_rows else self._plan_of_call(call)
        if plan is None or plan.idle:
            return attend(call)
        if call.kind == "cross":
            return self._cross(call, attend, plan)
        if call.kind == "joint":
            return self._image_qk(call, attend, plan) if self._form == "image_qk" else self._joint(call, attend, plan)
        if call.kind == "self" and not plan.own_maps and self._within(call):
            return attend(call.borrow(plan.index))
        return attend(call)

    def _cross(self, call: AttentionCall, attend: Attend, plan: _Plan) -> Tensor:
        if plan.mixing is None:
            return attend(call)
        value = call.value[plan.targets]
        mixed = call.value.index_copy(0, plan.targets, plan.mixing.source(value))
        out = attend(call.borrow(plan.index).replace(value=mixed))
        if not plan.mixing.uses_own:
            return out
        own = attend(call.take(plan.rows).replace(value=plan.mixing.own(value)))
        return out.index_add(0, plan.targets, own)

    def _joint(self, call: AttentionCall, attend: Attend, plan: _Plan) -> Tensor:
        text, tokens = call.key_tokens["text"], call.key_tokens
        value = call.value[plan.targets]
        words_value = tokens.get(value, "text")
        if plan.mixing is None:
            followed, own = torch.zeros_like(words_value), words_value
        else:
            followed, own = plan.mixing.source(words_value), plan.mixing.own(words_value)
        image = torch.ones(value.shape[2], 1, dtype=torch.bool, device=value.device)
        image[text.start : text.start + text.length] = False
        image_value = torch.where(image, value, 0)
        of_source = tokens.put(torch.zeros_like(value) if plan.own_maps else image_value, "text", followed)
        of_target = tokens.put(image_value if plan.own_maps else torch.zeros_like(value), "text", own)

        out = attend(call)
        # all queries, though only the image's are kept: a call of the same shape rounds alike, so equal prompts give equal bits
        edited = attend(call.borrow(plan.index).take(plan.rows).replace(value=of_source))
        if plan.own_maps or plan.mixing is None or plan.mixing.uses_own:
            edited = edited + attend(call.take(plan.rows).replace(value=of_target))
        queries = call.query_tokens
        images = queries.get(out, "image").index_copy(0, plan.targets, queries.get(edited, "image"))
        return queries.put(out, "image", images)

    def _image_qk(self, call: AttentionCall, attend: Attend, plan: _Plan) -> Tensor:
        if plan.own_maps:
            return attend(call)
        queries, keys = call.query_tokens, call.key_tokens
        shared = call.replace(
            query=queries.put(call.query, "image", queries.get(call.query, "image")[plan.index]),
            key=keys.put(call.key, "image", keys.get(call.key, "image")[plan.index]),
        )
        out = attend(shared)
        if self.reweight is None or plan.mixing is None:
            return out
        value = call.value[plan.targets]
        scaled = keys.put(value, "text", plan.mixing.source(keys.get(value, "text")))
        edited = attend(shared.take(plan.rows).queries("image").replace(value=scaled))
        return queries.put(out, "image", queries.get(out, "image").index_copy(0, plan.targets, edited))

    def _within(self, call: AttentionCall) -> bool:
        """Whether the self site is coarse enough."""
        if self.limit is None:
            return call.site.scale >= self._coarse
        tokens = call.query.shape[2]
        if isinstance(self.limit, int):
            return tokens <= self.limit
        if call.latent is None:
            raise ValueError(f"limit={self.limit} is a fraction of the latent's side, which this call does not know; give a number of tokens")
        return tokens <= math.prod(math.ceil(size * self.limit) for size in call.latent[-2:]) * math.prod(call.latent[:-2])

    # ------------------------------------------------------------------------------------------------ shared noise

    def denoise(self, call: DenoiseCall, denoise: Denoise) -> Prediction:
        return SharedNoise(self.prompts).denoise(call, denoise) if self.share_noise else denoise(call)

    def step(self, call: StepCall, step: StepFunction) -> Tensor:
        return SharedNoise(self.prompts).step(call, step) if self.share_noise else step(call)

    # --------------------------------------------------------------------------------------- what depends on run and step

    def begin_run(self, run: Any) -> None:
        self._run = run
        self._tables.clear()
        self._plans.clear()
        ours = [prompt.prompt if isinstance(prompt, Encoded) else prompt for prompt in self._flat]
        if run.prompts is not None and list(run.prompts) != ours:
            raise ValueError(f"the pipeline was called with the prompts {list(run.prompts)}, PromptToPrompt was made for {ours}")
        self_scales = [site.scale for site in run.sites_of(self) if site.kind == "self"]
        self._coarse = min(4, max(self_scales, default=4))

    def begin(self, call: DenoiseCall) -> None:
        family = self._run.family(call.denoiser)
        self._form = self.joint or family.joint
        count = max(call.rows.prompt) + 1
        if count != len(self._flat):
            raise ValueError(f"PromptToPrompt was made for {len(self._flat)} prompts, the pipeline runs {count}")
        text = self._run.geometry(call.denoiser).text
        self._now_rows = call.rows
        self._now = self._plan(call.rows, call.step, text, call.latents.device, call.latents.dtype)

    def _plan_of_call(self, call: AttentionCall) -> _Plan | None:
        """The plan where `begin` did not make it: part of the rows, folded rows, or a call made by hand."""
        length: int | None = None
        if call.kind == "cross":
            length = call.key.shape[2]
        elif "text" in call.key_tokens:
            length = call.key_tokens["text"].length
        elif self._run is not None:
            length = self._run.geometry(call.site.denoiser).text
        return self._plan(call.table, call.step, length, call.query.device, call.value.dtype)

    def _plan(self, rows: Rows, step: Step, length: int | None, device: torch.device, dtype: torch.dtype) -> _Plan | None:
        pairs = self._pairs(rows)
        if not pairs:
            return None
        steps = self._steps(step)
        cross, self_ = self._windows(joint=self._is_joint())
        start, stop = self_window(self_, steps)
        own_maps = not start <= step.index < stop
        tables = self._tables_for(length, steps, cross)
        moment = tables.moment[min(step.index, len(tables.moment) - 1)]
        key = (rows, length, steps, moment, own_maps, device, dtype)
        if key not in self._plans:
            t = [tables.targets[rows.prompt[row]] for row, _ in pairs for _ in range(rows.fold)]
            edit = mixing(tables.source[moment][t], tables.beta[moment][t])
            target_rows, source_rows = tuple(row for row, _ in pairs), tuple(source for _, source in pairs)
            targets, sources = _entries(target_rows, rows), _entries(source_rows, rows)
            index = torch.arange(len(rows) * rows.fold).index_copy(0, targets, sources)
            self._plans[key] = _Plan(
                index=index.to(device),
                rows=target_rows,
                targets=targets.to(device),
                sources=sources.to(device),
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
                raise MissingRows(f"target row {row} needs its source {source} in the same call of the denoiser, which has {rows.table()}")
            pairs.append((row, at[source]))
        return pairs

    def _steps(self, step: Step) -> int:
        """The n that windows are counted with: the steps asked for where the loop makes n or n + 1 iterations (PNDM), else the iterations."""
        asked = getattr(getattr(getattr(self._run, "pipeline", None), "scheduler", None), "num_inference_steps", None)
        return asked if asked is not None and step.total == asked + 1 else step.total

    def _is_joint(self) -> bool:
        return self._run is not None and any(site.kind == "joint" for site in self._run.sites_of(self))

    def _windows(self, joint: bool) -> tuple[Windows, Window]:
        cross: Windows = (0.4 if joint else 0.8) if self.cross is None else self.cross
        if self.self_ is not None:
            return cross, self.self_
        if not joint:
            return cross, 0.4
        if isinstance(cross, Mapping):
            return cross, cross.get("default", cross.get("default_", 1.0))
        return cross, cross

    def _tables_for(self, length: int | None, steps: int, cross: Windows) -> _Tables:
        key = (length, steps)
        if key not in self._tables:
            self._tables[key] = self._make_tables(length, steps, cross)
        return self._tables[key]

    def _make_tables(self, length: int | None, steps: int, cross: Windows) -> _Tables:
        encoded = [self._encode(prompt, length) for prompt in self._flat]
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
        return _Tables({p: t for t, p in enumerate(targets)}, moment.tolist(), torch.stack(sources, 1), torch.stack(betas, 1))

    def _mapper(self, source: Encoded, target: Encoded) -> Any:
        edit = self.edit
        if edit == "auto":
            edit = "replace" if len(words(source)) == len(words(target)) else "refine"
        return replace_mapper(source, target, self.tail) if edit == "replace" else refine_mapper(source, target)

    def _encode(self, prompt: str | Encoded, length: int | None) -> Encoded:
        if self._run is None or length is None:
            if isinstance(prompt, Encoded):
                return prompt
            raise ValueError(f"without a pipeline, prompts must be encoded: attnctrl.tokens.encode(tokenizer, {prompt!r}, length)")
        pipeline = self._run.pipeline
        family = self._run.family(self._run.sites[0].denoiser)
        return encode_for(pipeline, family, prompt, length)


def _entries(rows: tuple[int, ...], table: Rows) -> Tensor:
    index = torch.tensor(rows)
    return (index[:, None] * table.fold + torch.arange(table.fold)).flatten()
