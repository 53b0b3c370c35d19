"""The fused form against maps formed, edited and multiplied, in float64: random prompts, words, windows and factors."""

import itertools
import random

import pytest
import torch
from controls.authors import Controller, encoded, softmax, word_tokens

from attnctrl import AttentionCall, Rows, Segment, Site, Step, Tokens
from attnctrl.attend import attend
from attnctrl.call import Bias
from attnctrl.controls import PromptToPrompt

WORDS = ["a", "cat", "squirrel", "hippopotamus", "lasagna", "on", "grass", "croutons", "watercolor", "red"]
STEPS = 7
LENGTH = 24


def prompts_of(rng: random.Random, targets: int, equal: bool) -> list[str]:
    source = rng.choices(WORDS, k=rng.randint(2, 5))
    out = [source]
    for _ in range(targets):
        words = [rng.choice(WORDS) if rng.random() < 0.4 else word for word in source]
        if not equal:
            for _ in range(rng.randint(0, 2)):
                words.insert(rng.randint(0, len(words)), rng.choice(WORDS))
            if len(words) > 2 and rng.random() < 0.4:
                words.pop(rng.randrange(len(words)))
        out.append(words)
    return [" ".join(words) for words in out]


def random_window(rng: random.Random):
    a, b = sorted((round(rng.random(), 2), round(rng.random(), 2)))
    return rng.choice([a, b, (a, b), 0.0, 1.0])


def random_case(seed: int):
    rng = random.Random(seed)
    edit = rng.choice(["replace", "refine", None])
    targets = rng.randint(1, 3)
    prompts = prompts_of(rng, targets, equal=edit != "refine")
    if edit is None:
        prompts = [prompts[0]] * (targets + 1)
    there = sorted({word for prompt in prompts[1:] for word in prompt.split()})
    cross = random_window(rng)
    if rng.random() < 0.6:
        cross = {word: random_window(rng) for word in rng.sample(there, min(2, len(there)))}
        if rng.random() < 0.7:
            cross["default_"] = random_window(rng)
    scales = None
    if edit is None or rng.random() < 0.5:
        scales = {word: rng.choice([-1.5, 0.0, 0.5, 1.0, 3.0]) for word in rng.sample(there, min(2, len(there)))}
    tail = rng.choice(["corrected", "official"])
    ours = PromptToPrompt(
        [encoded(p, LENGTH) for p in prompts], cross=cross, self_=(self_ := random_window(rng)), edit=edit or "replace",
        reweight=scales, tail=tail, limit=256,
    )  # fmt: skip
    theirs = Controller(prompts, STEPS, cross, self_, edit, scales, tail == "corrected", length=LENGTH)
    return ours, theirs


def tensors(seed: int, rows: int, queries: int, keys: int, heads: int = 2, dim: int = 4):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, n, dim, generator=g, dtype=torch.float64) for n in (queries, keys, keys)]


def cfg_rows(prompts: int, images: int = 1) -> Rows:
    return Rows.grid(("uncond", "cond"), prompts, images)


@pytest.mark.parametrize("seed", range(60))
def test_cross_edits(seed):
    ours, theirs = random_case(seed)
    count = len(theirs.prompts)
    q, k, v = tensors(seed, 2 * count, 9, LENGTH)
    for step in range(STEPS):
        got = ours.attention(AttentionCall(q, k, v, kind="cross", rows=cfg_rows(count), step=Step(step, STEPS)), attend)
        assert (got - theirs.attention(q, k, v, step, cross=True)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(10))
def test_cross_edits_with_the_rows_own_masks(seed):
    ours, theirs = random_case(seed)
    count = len(theirs.prompts)
    q, k, v = tensors(seed, 2 * count, 9, LENGTH)
    lengths = torch.randint(8, LENGTH + 1, (2 * count, 1, 1, 1), generator=torch.Generator().manual_seed(seed))
    closed = torch.arange(LENGTH) >= lengths  # (rows, 1, 1, keys)
    for mask in (
        ~closed,
        torch.zeros(closed.shape, dtype=torch.float64).masked_fill(closed, -1e4),
        (~closed).expand(-1, 2, 9, -1),
    ):
        for step in (0, 3, 6):
            call = AttentionCall(q, k, v, mask=mask, kind="cross", rows=cfg_rows(count), step=Step(step, STEPS))
            assert (ours.attention(call, attend) - theirs.attention(q, k, v, step, True, mask)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(6))
def test_cross_edits_with_a_bias(seed):
    """The source's bias belongs to its map."""
    ours, theirs = random_case(seed)
    rows = 2 * len(theirs.prompts)
    q, k, v = tensors(seed, rows, 9, LENGTH)
    left, _, right = (x[..., :2] for x in tensors(seed + 1, rows, 9, LENGTH))
    call = AttentionCall(
        q, k, v, bias=(Bias(left, right),), kind="cross", rows=cfg_rows(rows // 2), step=Step(2, STEPS)
    )
    assert (ours.attention(call, attend) - theirs.attention(q, k, v, 2, True, left @ right.mT)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_folded_rows_are_edited_frame_by_frame(seed):
    ours, theirs = random_case(seed)
    count, frames = len(theirs.prompts), 3
    rows = cfg_rows(count)
    folded = Rows(rows.branch, rows.prompt, rows.image, rows.variant, rows.origin, fold=frames)
    q, k, v = tensors(seed, 2 * count * frames, 9, LENGTH)
    got = ours.attention(AttentionCall(q, k, v, kind="cross", rows=folded, step=Step(1, STEPS)), attend)
    for frame in range(frames):
        mine = slice(frame, None, frames)
        assert (got[mine] - theirs.attention(q[mine], k[mine], v[mine], 1, True)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("queries", [256, 257])
def test_self_maps_up_to_a_limit(seed, queries):
    ours, theirs = random_case(seed)
    rows = 2 * len(theirs.prompts)
    q, k, v = tensors(seed, rows, queries, queries, heads=1)
    for step in (0, 3, 6):
        call = AttentionCall(q, k, v, kind="self", rows=cfg_rows(rows // 2), step=Step(step, STEPS))
        assert (ours.attention(call, attend) - theirs.attention(q, k, v, step, cross=False)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_images_of_a_prompt_and_edits_of_a_batch_do_not_mix(seed):
    """Two edits, two images each, in one call without guidance = each edit and image by itself."""
    ours, theirs = random_case(seed)
    if theirs.edit is None:
        theirs.prompts, ours.reweight = list(theirs.prompts), {}
    texts, count = theirs.prompts, len(theirs.prompts)
    settings = dict(cross=ours.cross, self_=ours.self_, edit=ours.edit, reweight=ours.reweight, tail=ours.tail)
    both = PromptToPrompt([[encoded(p, LENGTH) for p in texts]] * 2, **settings)
    q, k, v = tensors(seed, 4 * count, 9, LENGTH)
    rows = Rows.grid(("cond",), 2 * count, 2)
    got = both.attention(AttentionCall(q, k, v, kind="cross", rows=rows, step=Step(1, STEPS)), attend)
    for edit, image in itertools.product(range(2), range(2)):
        mine = [i for i, (_, p, n, _) in enumerate(rows.table()) if p // count == edit and n == image]
        call = AttentionCall(q[mine], k[mine], v[mine], kind="cross", rows=Rows.plain(count), step=Step(1, STEPS))
        assert (got[mine] - ours.attention(call, attend)).abs().max() <= 1e-12


# ---------------------------------------------------------------------------- joint attention

IMAGE = 10


def joint_tokens(order):
    lengths = {"text": LENGTH, "image": IMAGE, "reference:0": 3}
    starts = itertools.accumulate((lengths[name] for name in order[:-1]), initial=0)
    return Tokens(tuple(Segment(name, start, lengths[name]) for name, start in zip(order, starts, strict=True)))


def explicit_joint(theirs, q, k, v, tokens, step, self_on, mask=None):
    """Image queries of each target: text columns edited as in cross-attention, other columns the source's or their own.
    Text queries stay plain."""
    maps = softmax(q, k, mask)
    half = len(maps) // 2
    text, image = (slice(tokens[name].start, tokens[name].start + tokens[name].length) for name in ("text", "image"))
    cond = maps[half:].clone()
    own = cond[:, :, image]
    edited = own.clone()
    if self_on:
        edited[:] = own[:1]
    edited[..., text] = theirs.cross_maps(own[..., text], step)
    edited[0] = own[0]
    cond[:, :, image] = edited
    return torch.cat((maps[:half], cond)) @ v


@pytest.mark.parametrize("order", [("text", "image"), ("image", "text"), ("text", "image", "reference:0")])
@pytest.mark.parametrize("seed", range(8))
def test_joint_maps_exact(order, seed):
    ours, theirs = random_case(seed)
    rows, tokens = 2 * len(theirs.prompts), joint_tokens(order)
    n = sum(segment.length for segment in tokens.segments)
    q, k, v = tensors(seed, rows, n, n)
    open_ = torch.rand(rows, 1, 1, n, generator=torch.Generator().manual_seed(seed)) < 0.8
    for step, mask in itertools.product((0, 2, 4, 6), (None, open_)):
        call = AttentionCall(
            q,
            k,
            v,
            mask=mask,
            kind="joint",
            rows=cfg_rows(rows // 2),
            step=Step(step, STEPS),
            query_tokens=tokens,
            key_tokens=tokens,
        )
        start, stop = ours.self_ if isinstance(ours.self_, tuple) else (0, ours.self_)
        self_on = int(start * STEPS) <= step < int(stop * STEPS)
        expected = explicit_joint(theirs, q, k, v, tokens, step, self_on, mask)
        assert (ours.attention(call, attend) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("order", [("text", "image"), ("image", "text")])
@pytest.mark.parametrize("factor", [None, -2.0, 0.0])
def test_joint_image_queries_and_keys(order, factor):
    prompts = ["a red cat on grass", "a squirrel on the grass", "a cat"]
    tokens, n = joint_tokens(order), LENGTH + IMAGE
    ours = PromptToPrompt(
        [encoded(p, LENGTH) for p in prompts],
        cross=1.0,
        self_=(0.2, 0.6),
        joint="image_qk",
        reweight=None if factor is None else {"cat": factor},
    )
    q, k, v = tensors(0, 6, n, n)
    image = slice(tokens["image"].start, tokens["image"].start + IMAGE)
    text = tokens["text"].start
    for step in range(10):
        call = AttentionCall(
            q, k, v, kind="joint", rows=cfg_rows(3), step=Step(step, 10), query_tokens=tokens, key_tokens=tokens
        )
        queries, keys = q.clone(), k.clone()
        if 2 <= step < 6:
            queries[3:, :, image], keys[3:, :, image] = q[3, :, image], k[3, :, image]
        maps = softmax(queries, keys)
        if 2 <= step < 6 and factor is not None:
            columns = [text + position for position in word_tokens(prompts[2], "cat")]
            maps[5, :, image, columns] *= factor
        assert (ours.attention(call, attend) - maps @ v).abs().max() <= 1e-10


# ---------------------------------------------------------------------------- linear in the value


@pytest.mark.parametrize("kind", ["cross", "self", "joint", "image_qk"])
@pytest.mark.parametrize("seed", range(3))
def test_the_edit_is_linear_in_the_value(kind, seed):
    ours, theirs = random_case(seed)
    tokens = joint_tokens(("text", "image"))
    if kind == "image_qk":
        ours = PromptToPrompt(ours.prompts, cross=0.8, self_=0.8, joint="image_qk", reweight=ours.reweight)
    joint = kind in ("joint", "image_qk")
    n, m = {"cross": (9, LENGTH), "self": (9, 9)}.get(kind, (LENGTH + IMAGE,) * 2)
    rows = 2 * len(theirs.prompts)
    q, k, v = tensors(seed, rows, n, m)
    g = torch.Generator().manual_seed(seed)
    columns = torch.randn(2, rows, 1, m, 3, generator=g, dtype=torch.float64).expand(-1, -1, 2, -1, -1)
    call = AttentionCall(
        q,
        k,
        v,
        kind="joint" if joint else kind,
        rows=cfg_rows(rows // 2),
        step=Step(1, STEPS),
        probe=True,
        site=Site(scale=4),
    )
    if joint:
        call = call.replace(query_tokens=tokens, key_tokens=tokens)

    def edited(value):
        return ours.attention(call.replace(value=value), attend)

    a, b = columns
    assert (edited(2 * a - 3 * b) - 2 * edited(a) + 3 * edited(b)).abs().max() <= 1e-12
    # and read column by column it is the edited map itself
    eye = torch.eye(m, dtype=torch.float64).expand(rows, 2, m, m)
    assert (edited(eye) @ v - edited(v)).abs().max() <= 1e-12
