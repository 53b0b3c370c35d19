"""A reference's subjects, seen by a target at its own places and sizes."""

import pytest
import torch
import torch.nn.functional as F
from controls.edits import EDITABLE, pipe_of, sample

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import SubjectReposition
from attnctrl.rope import Rope, frequencies

LEFT, RIGHT, WIDE = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 0.5)
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)
ROWS, COLUMNS = 4, 4


def call(count=2, rope=False):
    places = [(0.0, float(i), float(j)) for i in range(ROWS) for j in range(COLUMNS)]
    turn = Rope(torch.tensor(places, dtype=torch.float64), tuple(map(frequencies, (2, 2, 4)))) if rope else None
    tokens = Tokens((Segment("image", 0, ROWS * COLUMNS, (ROWS, COLUMNS)),), turn)
    q, k, v = torch.randn(3, count, 2, ROWS * COLUMNS, 8, dtype=torch.float64)
    return AttentionCall(q, k, v, rows=Rows.plain(count), query_tokens=tokens, key_tokens=tokens)


def attention(query, *pairs):
    keys, values = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    return torch.softmax(query @ keys.transpose(1, 2) / 8**0.5, -1) @ values


def grid_of(x):
    return x.unflatten(1, (ROWS, COLUMNS))


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no_rope"])
def test_the_same_box_shares_the_subjects_tokens_as_they_are(rope):
    c = call(rope=rope)
    ours = SubjectReposition([LEFT], {1: [LEFT]}).attention(c, attend)
    subject = [grid_of(x[0])[:, :, :2].flatten(1, 2) for x in (c.key, c.value)]
    torch.testing.assert_close(ours[1], attention(c.query[1], (c.key[1], c.value[1]), subject), rtol=0, atol=1e-12)
    assert torch.equal(ours[:1], attend(c.take([0])))


def test_without_rope_keys_and_values_are_resampled_to_the_targets_size():
    c = call()
    ours = SubjectReposition([LEFT], {1: [WIDE]}).attention(c, attend)
    subject = []
    for x in (c.key, c.value):
        box = grid_of(x[0])[:, :, :2].permute(0, 3, 1, 2)  # (h, d, 4, 2)
        subject.append(F.interpolate(box, size=(2, 4), mode="bilinear").permute(0, 2, 3, 1).flatten(1, 2))
    torch.testing.assert_close(ours[1], attention(c.query[1], (c.key[1], c.value[1]), subject), rtol=0, atol=1e-12)


def test_with_rope_keys_turn_to_the_targets_places():
    c = call(rope=True)
    rope = c.key_tokens.rope
    ours = SubjectReposition([LEFT], {1: [(0.5, 0.0, 1.0, 0.5)]}).attention(c, attend)
    at = torch.arange(16).reshape(4, 4)[:, :2].flatten()
    there = torch.tensor([(0.0, 0.5 * i, 2.0 + j) for i in range(4) for j in range(2)], dtype=torch.float64)
    raw = rope.unrotate(c.key)[:1, :, at]
    key = Rope(there, rope.omega).rotate(raw, there)[0]
    expected = attention(c.query[1], (c.key[1], c.value[1]), (key, c.value[0][:, at]))
    torch.testing.assert_close(ours[1], expected, rtol=0, atol=1e-12)


def test_a_subject_sees_no_other_subject_of_the_reference():
    c = call(3)
    ours = SubjectReposition([LEFT, RIGHT], {1: [LEFT, RIGHT], 2: [None, RIGHT]}).attention(c, attend)
    left, right = (
        [grid_of(x[0])[:, :, part].flatten(1, 2) for x in (c.key, c.value)] for part in (slice(0, 2), slice(2, 4))
    )
    for half, subject in ((slice(0, 2), left), (slice(2, 4), right)):
        query = grid_of(c.query[1])[:, :, half].flatten(1, 2)
        expected = attention(query, (c.key[1], c.value[1]), subject)
        torch.testing.assert_close(grid_of(ours[1])[:, :, half].flatten(1, 2), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[2], attention(c.query[2], (c.key[2], c.value[2]), right), rtol=0, atol=1e-12)
    ones = c.replace(value=torch.ones_like(c.value[..., :1]), probe=True)
    seen = SubjectReposition([LEFT, RIGHT], {1: [WIDE, None]}).attention(ones, attend)
    torch.testing.assert_close(seen, torch.ones_like(seen), rtol=0, atol=1e-12)


def test_no_targets_no_steps_and_what_does_not_fit():
    c = call()
    for plain in (SubjectReposition([LEFT], {1: [None]}), SubjectReposition([LEFT], {1: [LEFT]}, steps=(0, 0))):
        assert torch.equal(plain.attention(c, attend), attend(c))
    with pytest.raises(ValueError, match="one for each of the 1 subjects"):
        SubjectReposition([LEFT], {1: [LEFT, RIGHT]})
    with pytest.raises(ValueError, match="fractions of the image"):
        SubjectReposition([LEFT], {1: [(0.0, 0.0, 64.0, 64.0)]}).attention(c, attend)
    with pytest.raises(ValueError, match="needs the image's grid"):
        SubjectReposition([LEFT], {1: [LEFT]}).attention(c.replace(query_tokens=Tokens()), attend)
    with pytest.raises(MissingRows):
        SubjectReposition([LEFT], {1: [LEFT]}).attention(c.take([1]), attend)
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), SubjectReposition([LEFT], {1: [LEFT]}))


@every
def test_the_reference_stays_and_the_target_changes(family):
    prompts = ("a red cat", "a blue dog")
    plain = sample(family, prompts)
    moved = sample(family, prompts, SubjectReposition([LEFT, RIGHT], {1: [WIDE, None]}))
    torch.testing.assert_close(moved[0], plain[0], rtol=0, atol=1e-4)
    assert (moved[1] - plain[1]).abs().max() > 1e-3
