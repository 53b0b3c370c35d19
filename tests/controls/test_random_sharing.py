"""Images of a story that see random tokens of each other."""

import pytest
import torch
from controls.compiled import assert_one_graph
from controls.edits import EDITABLE, pipe_of, sample

from attnctrl import AttentionCall, MissingRows, Rows, Segment, Site, Step, Tokens, attach
from attnctrl.attend import attend
from attnctrl.controls import RandomSharing

PROMPTS = ("a red cat", "a blue dog", "a green tree")
ALWAYS = ((0.0, 1.0),)
every = pytest.mark.parametrize("family", EDITABLE, ids=lambda family: family.name)


def call(rows, n=6, **extra):
    q, k, v = torch.randn(3, len(rows), 2, n, 8, dtype=torch.float64)
    return AttentionCall(q, k, v, rows=rows, site=Site("up.attn1", "self", "up"), step=Step(3, 5), **extra)


def attention(query, key, value):
    return torch.softmax(query @ key.transpose(1, 2) / 8**0.5, -1) @ value


def test_all_tokens_kept_is_full_sharing_among_the_rows_of_a_branch():
    c = call(Rows.grid(("uncond", "cond"), 3, 1))
    ours = RandomSharing(keep=1.0, chance=ALWAYS).attention(c, attend)
    for half in ([0, 1, 2], [3, 4, 5]):
        for row in half:
            everyone = [torch.cat([x[r] for r in half], dim=1) for x in (c.key, c.value)]
            torch.testing.assert_close(ours[row], attention(c.query[row], *everyone), rtol=0, atol=1e-12)


def test_gathered_keys_are_a_mask_of_minus_infinity_with_the_same_tokens_for_all_readers():
    c = call(Rows.plain(3), n=10)
    c = c.replace(value=torch.eye(10, dtype=torch.float64).expand(3, 2, 10, 10))
    ours = RandomSharing(keep=0.3, chance=ALWAYS).attention(c, attend)
    again = RandomSharing(keep=0.3, chance=ALWAYS).attention(c, attend)
    other = RandomSharing(keep=0.3, chance=ALWAYS, seed=1).attention(c, attend)
    assert torch.equal(ours, again) and not torch.equal(ours, other)
    # the tokens that were kept, read off probes of one row at a time
    kept = []
    for row in range(3):
        value = torch.zeros(3, 2, 10, 10, dtype=torch.float64)
        value[row] = torch.eye(10, dtype=torch.float64)
        probe = RandomSharing(keep=0.3, chance=ALWAYS).attention(c.replace(value=value, probe=True), attend)
        seen = [set((probe[r, 0].sum(0) > 0).nonzero()[:, 0].tolist()) for r in range(3)]
        assert seen[row] == set(range(10))
        readers = [seen[r] for r in range(3) if r != row]
        assert readers[0] == readers[1] and len(readers[0]) == 3
        kept.append(sorted(readers[0]))
    for row in range(3):
        allowed = torch.zeros(3, 10, dtype=torch.bool)
        for r in range(3):
            allowed[r, kept[r]] = True
        allowed[row] = True
        logits = c.query[row] @ c.key.transpose(0, 1).flatten(1, 2).transpose(1, 2) / 8**0.5
        weights = logits.masked_fill(~allowed.flatten(), float("-inf")).softmax(-1)
        expected = weights @ c.value.transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(ours[row], expected, rtol=0, atol=1e-12)


def test_later_images_read_the_identities_and_are_not_read():
    c = call(Rows.plain(3))
    ours = RandomSharing(identities=2, keep=1.0, chance=ALWAYS).attention(c, attend)
    for row, read in ((0, [0, 1]), (1, [0, 1]), (2, [0, 1, 2])):
        everyone = [torch.cat([x[r] for r in read], dim=1) for x in (c.key, c.value)]
        torch.testing.assert_close(ours[row], attention(c.query[row], *everyone), rtol=0, atol=1e-12)
    alone = RandomSharing(identities=1, keep=1.0, chance=ALWAYS).attention(c, attend)
    assert torch.equal(alone[0], attend(c)[0])


def test_text_stays_each_rows_own_in_joint_attention():
    tokens = Tokens((Segment("text", 0, 2), Segment("image", 2, 4, (2, 2))))
    c = call(Rows.plain(2)).replace(kind="joint", query_tokens=tokens, key_tokens=tokens)
    ours = RandomSharing(keep=1.0, chance=ALWAYS).attention(c, attend)
    own = [torch.cat((x[0], x[1][:, 2:]), dim=1) for x in (c.key, c.value)]
    torch.testing.assert_close(ours[0], attention(c.query[0], *own), rtol=0, atol=1e-12)


def test_nothing_kept_no_chance_and_the_first_steps_are_plain():
    c = call(Rows.plain(3))
    for control in (RandomSharing(keep=0.0, chance=ALWAYS), RandomSharing(chance=((0.0, 0.0),))):
        assert torch.equal(control.attention(c, attend), attend(c))
    early = c.replace(step=Step(4, 50))
    assert torch.equal(RandomSharing().attention(early, attend), attend(c))
    shares = [
        not torch.equal(RandomSharing(seed=s).attention(c.replace(step=Step(i, 50)), attend), attend(c))
        for i in (5, 20) for s in range(50)
    ]  # fmt: skip
    assert 25 <= sum(shares[:50]) <= 42 and 37 <= sum(shares[50:]) < 50  # chances 0.7 and 0.9


def test_missing_images_and_wrong_arguments_are_refused():
    control = RandomSharing(identities=2, chance=ALWAYS)
    with pytest.raises(MissingRows):
        control.attention(call(Rows.plain(3).take([1, 2])), attend)
    for wrong in ({"identities": 0}, {"keep": 1.5}, {"chance": ((0.0, 2.0),)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RandomSharing(**wrong)
    with pytest.raises(ValueError, match="cannot be controlled"):
        attach(pipe_of("mochi"), control)


@every
def test_runs_repeat_and_differ_from_plain_ones(family):
    plain = sample(family, PROMPTS[:2])
    shared = sample(family, PROMPTS[:2], RandomSharing(chance=ALWAYS))
    assert torch.equal(shared, sample(family, PROMPTS[:2], RandomSharing(chance=ALWAYS)))
    assert ((shared - plain).flatten(1).abs().amax(1) > 1e-4).all()
    assert torch.equal(sample(family, PROMPTS[:2], RandomSharing(keep=0.0, chance=ALWAYS)), plain)


def test_one_graph_serves_all_steps_on_and_off():
    assert_one_graph(RandomSharing(chance=((0.0, 0.5),)), steps=4)
