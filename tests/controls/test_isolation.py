"""Subjects of one image that do not see each other."""

import pytest
import torch
from controls.compiled import assert_one_graph
from controls.edits import EDITABLE, pipe_of, sample

from attnctrl import AttentionCall, Rows, Segment, Step, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import SubjectIsolation
from attnctrl.controls.isolation import cover

LEFT, RIGHT, MIDDLE = (0.0, 0.0, 0.4, 1.0), (0.6, 0.0, 1.0, 1.0), (0.3, 0.0, 0.7, 1.0)
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)


def call(rows, dtype=torch.float64, text=2, height=3, width=5):
    tokens = Tokens((Segment("text", 0, text), Segment("image", text, height * width, (height, width))))
    q, k, v = torch.randn(3, len(rows), 2, text + height * width, 8, dtype=torch.float64).to(dtype)
    return AttentionCall(q, k, v, kind="joint", rows=rows, query_tokens=tokens, key_tokens=tokens, step=Step(1, 4))


def test_a_box_covers_the_tokens_whose_middle_it_holds():
    assert cover(LEFT, (2, 5)).tolist() == [True, True, False, False, False] * 2
    assert cover((0.0, 0.5, 1.0, 1.0), (2, 2, 2)).tolist() == [False, False, True, True] * 2
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:2, 2:] = True
    assert cover(mask, (2, 2)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_isolation_is_a_mask_of_minus_infinity_between_subjects(dtype):
    c = call(Rows.grid(("uncond", "cond"), 2, 1), dtype)
    ours = SubjectIsolation([[LEFT, RIGHT], []]).attention(c, attend)
    of = torch.zeros(17, dtype=torch.long)
    of[2:][cover(LEFT, (3, 5))], of[2:][cover(RIGHT, (3, 5))] = 1, 2
    closed = (of[:, None] != of) & (of[:, None] > 0) & (of > 0)
    expected = attend(c.forbid(closed.expand(4, 1, -1, -1) & torch.tensor([1, 0, 1, 0]).bool()[:, None, None, None]))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    probe = c.replace(value=torch.ones_like(c.value[..., :1]), probe=True)
    seen = SubjectIsolation([[LEFT, RIGHT], []]).attention(probe, attend)
    torch.testing.assert_close(seen, torch.ones_like(seen), rtol=0, atol=tolerance)


def test_one_subject_isolates_nothing():
    c = call(Rows.plain(2))
    assert torch.equal(SubjectIsolation([[LEFT], [RIGHT]]).attention(c, attend), attend(c))
    outside = SubjectIsolation([[LEFT, RIGHT]] * 2, steps=(0.5, 1.0))
    assert torch.equal(outside.attention(c, attend), attend(c))


def test_regions_that_do_not_fit_are_refused():
    c = call(Rows.plain(1))
    with pytest.raises(ValueError, match="overlap"):
        SubjectIsolation([[LEFT, MIDDLE]]).attention(c, attend)
    with pytest.raises(ValueError, match="no token"):
        SubjectIsolation([[LEFT, (0.95, 0.0, 1.0, 0.1)]]).attention(c, attend)
    with pytest.raises(ValueError, match="fractions of the image"):
        SubjectIsolation([[LEFT, (0.0, 0.0, 64.0, 64.0)]]).attention(c, attend)
    with pytest.raises(ValueError, match="1 prompts, the pipeline runs 2"):
        SubjectIsolation([[LEFT, RIGHT]]).attention(call(Rows.plain(2)), attend)
    with pytest.raises(ValueError, match="needs the image's grid"):
        SubjectIsolation([[LEFT, RIGHT]]).attention(c.replace(query_tokens=Tokens()), attend)
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), SubjectIsolation([[LEFT, RIGHT]]))


@every
def test_only_images_with_two_subjects_change(family):
    prompts = ("a red cat", "a blue dog")
    plain = sample(family, prompts, cfg=False)
    isolated = sample(family, prompts, SubjectIsolation([[LEFT, RIGHT], [LEFT]]), cfg=False)
    torch.testing.assert_close(isolated[1], plain[1], rtol=0, atol=1e-4)
    assert (isolated[0] - plain[0]).abs().max() > 1e-3


def test_one_graph_serves_all_steps():
    assert_one_graph(SubjectIsolation([[(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)]] * 2), steps=3)
