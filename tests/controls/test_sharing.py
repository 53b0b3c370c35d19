"""The primitives of sharing, against what they mean written out with maps."""

import pytest
import torch

from attnctrl import AttentionCall, Bias, MissingRows, Rows, Segment, Site, Tokens
from attnctrl.attend import attend
from attnctrl.sharing import (
    append_keys,
    contrast,
    from_rows,
    gather_keys,
    image_of,
    join_keys,
    late_sites,
    outer_mix,
    pairs,
    shift_keys,
    token_adain,
)

B, H, N, M, D = 4, 2, 5, 6, 4
ROWS = Rows.grid(("uncond", "cond"), 2, 1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(**extra):
    return AttentionCall(
        draw(B, H, N, D, seed=1), draw(B, H, M, D, seed=2), draw(B, H, M, D, seed=3), rows=ROWS, **extra
    )


def scores(call):
    """Written out: scale q k^T + biases + mask."""
    out = call.query @ call.key.transpose(2, 3) * (D**-0.5 if call.scale is None else call.scale)
    for bias in call.bias:
        left = call.query.new_ones(1, 1, N, bias.right.shape[-1]) if bias.left is None else bias.left
        out = out + left @ bias.right.transpose(2, 3)
    if call.mask is not None:
        out = out.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else out + call.mask
    return out


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.fixture
def crowded():
    """A call with a mask per row and two biases."""
    mask = torch.ones(B, 1, 1, M, dtype=torch.bool)
    mask[0, ..., -1] = mask[2, ..., :2] = False
    return made(mask=mask, bias=(Bias(None, draw(B, 1, M, 1)), Bias(draw(1, H, N, 2), draw(1, H, M, 2, seed=5))))


def test_references_are_the_same_half_s_rows_of_the_prompt():
    plan = pairs(ROWS, torch.device("cpu"), 0)
    assert plan.reference.tolist() == [0, 0, 2, 2]
    assert plan.targets.index.tolist() == [1, 3] and plan.targets.rows.prompt == (1, 1)
    assert plan.others.index.tolist() == [0, 2] and plan.of_targets.tolist() == [0, 2]
    folded = pairs(Rows(*(getattr(ROWS, name) for name in ("branch", "prompt", "image", "variant", "origin")), fold=2),
                   torch.device("cpu"), 0)  # fmt: skip
    assert folded.reference.tolist() == [0, 1, 0, 1, 4, 5, 4, 5]
    assert pairs(Rows.plain(1), torch.device("cpu"), 0) is None
    with pytest.raises(MissingRows, match="prompt 0"):
        pairs(ROWS.take([1, 3]), torch.device("cpu"), 0)


def test_rows_bring_keys_values_mask_and_key_bias(crowded):
    index = torch.tensor([0, 0, 2, 2])
    ours = from_rows(crowded, index)
    expected = scores(crowded.replace(query=crowded.query[torch.tensor([0, 1, 2, 3])], key=crowded.key[index],
                                      mask=crowded.mask[index],
                                      bias=(Bias(None, crowded.bias[0].right[index]), crowded.bias[1])))  # fmt: skip
    close(attend(ours), expected.softmax(-1) @ crowded.value[index])
    close(attend(ours)[::2], attend(crowded)[::2])


def test_a_segment_s_rows_leave_the_others_keys(crowded):
    tokens = Tokens((Segment("text", 0, 2), Segment("image", 2, 4)))
    index = torch.tensor([0, 0, 2, 2])
    ours = from_rows(crowded.replace(kind="joint", key_tokens=tokens), index, "image")
    assert torch.equal(ours.key[:, :, :2], crowded.key[:, :, :2])
    assert torch.equal(ours.key[:, :, 2:], crowded.key[index][:, :, 2:])
    assert torch.equal(ours.mask[..., :2], crowded.mask[..., :2])
    assert torch.equal(ours.mask[..., 2:], crowded.mask[index][..., 2:])
    assert image_of(ours) == "image" and image_of(crowded) is None
    with pytest.raises(ValueError, match="needs to know the image's keys"):
        image_of(crowded.replace(kind="joint"))


@pytest.mark.parametrize("shift", [0.0, -0.7, 2.0])
def test_appended_keys_are_one_softmax(crowded, shift):
    key, value = draw(B, H, 3, D, seed=7), draw(B, H, 3, D, seed=8)
    extra = crowded.query @ key.transpose(2, 3) * D**-0.5 + shift
    expected = torch.cat((scores(crowded), extra), -1).softmax(-1) @ torch.cat((crowded.value, value), 2)
    close(attend(append_keys(crowded, key, value, shift=shift)), expected)


def test_no_keys_are_appended_at_minus_infinity(crowded):
    key = draw(B, H, 3, D)
    assert append_keys(crowded, key, key, shift=float("-inf")) is crowded
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="shift"):
            append_keys(crowded, key, key, shift=bad)


def test_joined_keys_keep_each_side_s_mask_and_bias(crowded):
    other = shift_keys(from_rows(crowded, torch.tensor([3, 2, 1, 0])), draw(1, 1, N, seed=9))
    expected = torch.cat((scores(crowded), scores(other)), -1).softmax(-1) @ torch.cat((crowded.value, other.value), 2)
    joined = join_keys(crowded, other)
    close(attend(joined), expected)
    assert len(joined.bias) == 3
    floats = crowded.replace(mask=torch.zeros(1, 1, 1, M, dtype=torch.float64))
    close(scores(join_keys(floats, crowded)), torch.cat((scores(floats), scores(crowded)), -1))


def test_joined_tokens_have_names_of_their_own():
    tokens = Tokens((Segment("text", 0, 2), Segment("image", 2, 4, (2, 2))))
    call = made(key_tokens=tokens)
    joined = join_keys(call, call).key_tokens
    assert [(s.name, s.start) for s in joined.segments] == [
        ("text", 0), ("image", 2), ("shared:text", 6), ("shared:image", 8)
    ]  # fmt: skip
    assert joined["shared:image"].grid == (2, 2)
    assert join_keys(call, made()).key_tokens == Tokens()


def test_gathered_keys_are_a_mask(crowded):
    keep = torch.rand(B, M, generator=torch.Generator().manual_seed(4)) < 0.5
    keep[:, 3] = True
    assert keep.sum(-1).unique().numel() > 1  # rows that keep fewer are filled up
    close(attend(gather_keys(crowded, keep)), attend(crowded.forbid(~keep[:, None, None])))
    close(
        attend(gather_keys(crowded, torch.tensor([[1, 3, 4]]))),
        attend(crowded.forbid(~torch.tensor([0, 1, 0, 1, 1, 0]).bool())),
    )
    with pytest.raises(ValueError, match="row 1 keeps none"):
        gather_keys(crowded, torch.arange(B)[:, None].expand(B, M) != 1)
    with pytest.raises(ValueError, match="7 keys"):
        gather_keys(crowded, torch.ones(1, 7, dtype=torch.bool))


def test_token_adain_moves_statistics_and_leaves_references():
    x, index = draw(3, H, 50, D), torch.tensor([0, 0, 2])
    ours = token_adain(x, index, eps=0)
    assert torch.equal(ours[::2], x[::2])
    close(ours[1].mean(1), x[0].mean(1))
    close(ours[1].std(1), x[0].std(1))
    tokens = Tokens((Segment("text", 0, 20), Segment("image", 20, 30)))
    some = token_adain(x, index, tokens=tokens, segment="image")
    assert torch.equal(some[:, :, :20], x[:, :, :20])
    close(some[:, :, 20:], token_adain(x[:, :, 20:], index))


def test_outer_mix_is_the_mixed_map(crowded):
    other = from_rows(crowded, torch.tensor([1, 0, 3, 2]))
    weight = torch.tensor([0.0, 0.3, 1.0, 0.5], dtype=torch.float64).reshape(B, 1, 1, 1)
    close(outer_mix(attend, crowded, other, weight), weight * attend(crowded) + (1 - weight) * attend(other))


@pytest.mark.parametrize("entries", [1, 100, 10**6])
def test_contrast_is_the_clipped_map_in_chunks_of_any_size(crowded, entries, monkeypatch):
    monkeypatch.setattr("attnctrl.attend.CHUNK", entries)
    edited = (scores(crowded).softmax(-1) * 1.67 - 0.67 / M).clamp(0, 1)
    assert (edited == 0).any()
    close(contrast(crowded, 1.67), edited @ crowded.value)
    close(contrast(crowded, 1), attend(crowded))
    with pytest.raises(ValueError, match="strength"):
        contrast(crowded, 0.5)


def test_late_sites_are_the_decoder_s_two_finest_resolutions():
    sites = [Site(kind=kind, place=place, scale=scale, name=f"{place}{scale}{kind}")
             for place, scale in (("down", 1), ("down", 2), ("mid", 8), ("up", 4), ("up", 2), ("up", 1))
             for kind in ("self", "cross")]  # fmt: skip
    assert [site.name for site in late_sites(sites)] == ["up2self", "up1self"]
    assert [s.scale for s in late_sites([Site(place="up", scale=4), Site(place="up", scale=8)])] == [4]
    blocks = [Site(kind="joint", place="double", block=i) for i in range(4)]
    assert late_sites(blocks) == blocks[2:]
