"""Images that see the subject's tokens of anchor images."""

import pytest
import torch
from controls.edits import EDITABLE, pipe_of, prompts_for, sample
from tiny import FAMILIES

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Site, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import SubjectSharing
from attnctrl.controls.subject_sharing import _padded, otsu

PROMPTS = ("a red cat", "a blue dog", "a green tree")
WORDS = ("cat", "dog", "tree")
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)


def made(family, prompts=PROMPTS, **settings):
    words = WORDS[: len(prompts)]
    return SubjectSharing(prompts_for(family, *prompts), words, **{"vanilla": (0, 0), **settings})


def by_hand(keep, anchors=2, grid=(2, 3), **settings):
    """A control that knows where the subjects of its rows are: (prompts, n)."""
    control = SubjectSharing(PROMPTS[: len(keep)], WORDS[: len(keep)], anchors, **settings)
    control._kept = {grid: _padded(keep, torch.device("cpu"))}
    return control


def call(count, dtype=torch.float64, branches=("cond",)):
    tokens = Tokens((Segment("image", 0, 6, (2, 3)),))
    rows = Rows.grid(branches, count, 1)
    q, k, v = torch.randn(3, len(rows), 2, 6, 8, dtype=dtype)
    return AttentionCall(
        q, k, v, rows=rows, site=Site("up.attn1", "self", "up"), query_tokens=tokens, key_tokens=tokens
    )


def test_otsu_parts_two_heaps():
    low, high = 0.1 * torch.rand(40), 0.8 + 0.1 * torch.rand(10)
    assert float(low.max()) - 0.004 <= otsu(torch.cat((low, high))) < float(high.min())  # the middle of a bin
    assert otsu(torch.full((5,), 0.3)) == pytest.approx(0.3)


def test_anchors_subject_tokens_are_a_mask_of_minus_infinity():
    keep = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0], [1] * 6]).bool()
    c = call(3, branches=("uncond", "cond"))
    ours = by_hand(keep).attention(c, attend)
    for half in (0, 3):
        for row in range(3):
            allowed = keep.clone()
            allowed[2] = False
            allowed[row] = True
            keys, values = (x[half : half + 3].transpose(0, 1).flatten(1, 2) for x in (c.key, c.value))
            logits = (c.query[half + row] @ keys.transpose(1, 2) / 8**0.5).masked_fill(~allowed.flatten(), -torch.inf)
            torch.testing.assert_close(ours[half + row], logits.softmax(-1) @ values, rtol=0, atol=1e-12)
    a, b = torch.randn(2, 6, 2, 6, 1, dtype=torch.float64)
    probe = lambda value: by_hand(keep).attention(c.replace(value=value, probe=True), attend)  # noqa: E731
    torch.testing.assert_close(probe(a + 2 * b), probe(a) + 2 * probe(b), rtol=0, atol=1e-13)


def test_without_subjects_or_other_anchors_it_is_plain():
    c = call(2)
    assert torch.equal(by_hand(torch.zeros(2, 6, dtype=torch.bool)).attention(c, attend), attend(c))
    one = by_hand(torch.ones(2, 6, dtype=torch.bool), anchors=1).attention(c, attend)
    assert torch.equal(one[0], attend(c)[0]) and not torch.equal(one[1], attend(c)[1])
    with pytest.raises(MissingRows):
        by_hand(torch.ones(3, 6, dtype=torch.bool)).attention(call(3).take([1, 2]), attend)


def test_wrong_arguments_are_refused():
    for wrong in ({"anchors": 4}, {"dropout": 2.0}, {"steps": (1.0, 0.0)}, {"words": "cat"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SubjectSharing(**{"prompts": PROMPTS, "words": WORDS, **wrong})
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), SubjectSharing(PROMPTS, WORDS))


@every
def test_the_first_step_is_plain_and_later_ones_share_where_the_subject_is(family):
    three = {"num_inference_steps": 3}
    control, plain = made(family), sample(family, PROMPTS, **three)
    assert torch.equal(sample(family, PROMPTS, made(family, steps=(0, 1)), **three), plain)
    shared = sample(family, PROMPTS, control, **three)
    assert ((shared - plain).flatten(1).abs().amax(1) > 1e-5).all()
    assert set(control.masks) == {(0, 0), (1, 0), (2, 0)}
    assert all(0 < mask.float().mean() < 1 for mask in control.masks.values())
    assert torch.equal(sample(family, PROMPTS, made(family, dropout=1.0), **three), plain)


def test_queries_of_a_plain_pass_are_mixed_in():
    family, options = FAMILIES["sd"], {"num_inference_steps": 3}
    plain, shared = sample(family, PROMPTS, **options), sample(family, PROMPTS, made(family), **options)
    mixed = sample(family, PROMPTS, made(family, vanilla=(0.0, 1.0)), **options)
    assert not torch.equal(mixed, shared) and not torch.equal(mixed, plain)
    none = sample(family, PROMPTS, made(family, vanilla=(0.0, 1.0), blend=(0.0, 0.0)), **options)
    torch.testing.assert_close(none, shared, rtol=0, atol=1e-4)
