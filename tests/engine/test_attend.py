"""What a fused kernel does not return: log-sum-exps, masses of keys, and attention joined from parts of the keys."""

from __future__ import annotations

import pytest
import torch

from attnctrl import AttentionCall, Bias, Segment, Tokens
from attnctrl import attend as end
from attnctrl.attend import attend, chunks, lse, mass, merge

B, H, N, M, D = 2, 3, 5, 7, 4


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def call(dtype=torch.float64, n=N, **changes):
    tensors = (
        randn(B, H, n, D, dtype=dtype),
        randn(B, H, M, D, seed=1, dtype=dtype),
        randn(B, H, M, D, seed=2, dtype=dtype),
    )
    return AttentionCall(*tensors, **changes)


MASK = torch.rand(B, 1, N, M, generator=torch.Generator().manual_seed(7)) < 0.7
MASK[..., 0] = True
BIASES = (Bias(randn(1, H, N, 2, seed=3), randn(B, 1, M, 2, seed=4)), Bias(None, randn(1, 1, M, 2, seed=5)))
CASES = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "masked": {"mask": MASK},
    "mask per key": {"mask": MASK[:, :, :1]},
    "additive": {"mask": randn(1, 1, N, M, seed=6)},
    "biased": {"bias": BIASES, "scale": 0.7},
    "causal": {"causal": True, "n": M},
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def some(request):
    return call(**CASES[request.param])


def explicit(some):
    """Logits of all queries, written out."""
    logits = some.query @ some.key.mT * (some.scale or D**-0.5)
    for bias in some.bias:
        left = torch.ones(1, 1, some.query.shape[2], bias.right.shape[-1]).double() if bias.left is None else bias.left
        logits = logits + left @ bias.right.mT
    if some.mask is not None:
        logits = logits.masked_fill(~some.mask, -torch.inf) if some.mask.dtype == torch.bool else logits + some.mask
    if some.causal:
        logits = logits.masked_fill(torch.ones(M, M).triu(1).bool(), -torch.inf)
    return logits


@pytest.mark.parametrize("held", [1, 3 * M * B * H, 2**24])
def test_logits_come_in_chunks_and_are_the_logits(some, held, monkeypatch):
    monkeypatch.setattr(end, "CHUNK", held)
    parts = [logits for _, logits in chunks(some)]
    assert max(part.numel() for part in parts) <= max(held, B * H * M)
    torch.testing.assert_close(torch.cat(parts, 2), explicit(some))
    torch.testing.assert_close(lse(some), explicit(some).logsumexp(-1))


def test_the_mass_of_keys_is_what_the_map_sums_to(some):
    some = some.replace(key_tokens=Tokens((Segment("text", 0, 3), Segment("image", 3, 4))))
    weights = explicit(some).softmax(-1)
    per_row = torch.rand(B, M, generator=torch.Generator().manual_seed(8)) < 0.5
    for keys, columns in (
        ("image", torch.arange(M) >= 3),
        ([1, 4], torch.isin(torch.arange(M), torch.tensor([1, 4]))),
        (torch.arange(M) < 2, torch.arange(M) < 2),
        (per_row, per_row[:, None, None]),
        (per_row[:, None].expand(B, H, M), per_row[:, None, None]),
    ):
        torch.testing.assert_close(mass(some, keys), (weights * columns).sum(-1))


def test_attention_joined_from_parts_of_the_keys_is_that_of_all():
    whole = call()
    parts = [whole.replace(key=whole.key[:, :, part], value=whole.value[:, :, part])
             for part in (slice(0, 2), slice(2, 3), slice(3, M))]  # fmt: skip
    joined = merge([(attend(part), lse(part)) for part in parts])
    torch.testing.assert_close(joined, attend(whole))
    torch.testing.assert_close(torch.stack([lse(part) for part in parts]).logsumexp(0), lse(whole))


def test_parts_that_a_query_does_not_see_count_for_nothing():
    nothing = call(mask=torch.zeros(1, 1, N, M, dtype=torch.bool))
    assert torch.isneginf(lse(nothing)).all()
    hollow = torch.full_like(nothing.value[:, :, :N], torch.nan), lse(nothing)
    assert torch.equal(merge([(attend(call()), lse(call())), hollow]), attend(call()))
    assert torch.equal(merge([hollow]), torch.zeros(B, H, N, D).double())


def test_half_precision_is_looked_at_in_float32():
    some = call(dtype=torch.bfloat16)
    wide = some.replace(query=some.query.float(), key=some.key.float(), value=some.value.float())
    for measure in (lse, lambda x: mass(x, [0, 2])):
        assert measure(some).dtype == torch.float32
        torch.testing.assert_close(measure(some), measure(wide))
    assert merge([(attend(some), lse(some))]).dtype == torch.bfloat16


def test_what_cannot_be_answered_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        merge([])
    with pytest.raises(KeyError, match="no segment 'image'"):
        mass(call(), "image")
    with pytest.raises(ValueError, match=r"shape \(3,\) for 7 keys"):
        mass(call(), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask of the call is a str"):
        lse(call(mask="block"))
