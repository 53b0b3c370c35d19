"""Units of the engine, without a model: rows, tokens, windows, calls, site selectors, head sets and `attend`."""

import math

import pytest
import torch

from attnctrl import AttentionCall, Bias, HeadSet, MissingRows, Rows, Segment, Site, Step, Tokens
from attnctrl.attend import attend
from attnctrl.call import in_window
from attnctrl.rows import fold, rows_of
from attnctrl.sites import select


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- rows


def test_grid_is_branch_by_branch_prompt_by_prompt_image_by_image():
    rows = Rows.grid(("uncond", "cond"), 2, 2)
    assert rows.table() == [(b, p, i, "") for b in ("uncond", "cond") for p in (0, 1) for i in (0, 1)]
    assert rows.origin == tuple(range(8)) and len(rows) == 8 and rows.fold == 1
    assert Rows.plain(2).table() == [("cond", 0, 0, ""), ("cond", 1, 0, "")]


def test_where_finds_rows_by_any_columns():
    rows = Rows.grid(("uncond", "cond"), 2, 2)
    assert rows.where(branch="cond").tolist() == [4, 5, 6, 7]
    assert rows.where(branch="uncond", image=1).tolist() == [1, 3]
    assert rows.where(branch="other").tolist() == []


def test_partner_changes_only_the_columns_given():
    rows = Rows.grid(("uncond", "cond"), 2, 2)
    assert rows.partner(prompt=0).tolist() == [0, 1, 0, 1, 4, 5, 4, 5]
    assert rows.partner(branch="cond", image=0).tolist() == [4, 4, 6, 6, 4, 4, 6, 6]


def test_a_missing_partner_is_named_with_the_rows_there_are():
    rows = Rows.plain(2).take([1])
    with pytest.raises(MissingRows, match=r"needs the row .*'prompt': 0.*which has \[\('cond', 1, 0, ''\)\]"):
        rows.partner(prompt=0)


def test_a_column_that_rows_do_not_have_is_an_error_that_lists_the_others():
    rows = Rows.plain(2)
    with pytest.raises(ValueError, match="no column 'branches'; they have branch, prompt, image, variant, origin"):
        rows.where(branches="cond")
    with pytest.raises(ValueError, match=r"no column 'origin'; they have branch, prompt, image, variant$"):
        rows.partner(origin=0)


def test_indices_made_in_inference_mode_serve_gradients_later():
    rows = Rows.grid(("cond",), 2, 3).take([0, 2, 3, 5])
    call = AttentionCall(*normal(3, 4, 1, 2, 2), rows=rows)
    with torch.inference_mode(), torch.device("meta"):
        made = rows.where(prompt=1), rows.partner(prompt=0), call.take([1, 3]).query
    assert made[0].device.type == made[1].device.type == "cpu"
    x = normal(4, 2).requires_grad_()
    (x[rows.where(prompt=1)] * x[rows.partner(prompt=0)][:2]).sum().backward()
    y = normal(4, 1, 2, 2).requires_grad_()
    call.replace(query=y).take([1, 3]).query.sum().backward()
    assert x.grad is not None and y.grad[:, 0, 0, 0].tolist() == [0, 1, 0, 1]


def test_take_keeps_columns_origin_and_fold():
    rows = fold(Rows.grid(("uncond", "cond"), 2, 1), 12).take([3, 1])
    assert rows.table() == [("cond", 1, 0, ""), ("uncond", 1, 0, "")]
    assert rows.origin == (3, 1) and rows.fold == 3


def test_folded_rows_index_their_batch_entries_row_major():
    rows = fold(Rows.grid(("uncond", "cond"), 2, 1), 12)
    assert rows.fold == 3 and len(rows) == 4
    assert rows.where(prompt=1).tolist() == [3, 4, 5, 9, 10, 11]
    assert rows.partner(prompt=0).tolist() == [0, 1, 2, 0, 1, 2, 6, 7, 8, 6, 7, 8]
    with pytest.raises(ValueError, match="10 batch entries for the denoiser's 4 rows"):
        fold(Rows.grid(("uncond", "cond"), 2, 1), 10)


@pytest.mark.parametrize(
    "count, own, prompts, images, guided, expected",
    [
        (2, None, 2, 1, True, Rows.plain(2)),
        (4, None, 2, 1, True, Rows.grid(("uncond", "cond"), 2, 1)),
        (4, "uncond", 2, 2, True, Rows.grid(("uncond",), 2, 2)),
        (4, None, None, 1, True, Rows.grid(("uncond", "cond"), 2, 1)),
        (4, None, None, 1, False, Rows.plain(4)),
        (3, None, None, 1, True, Rows.plain(3)),
        (2, "uncond", None, 1, True, Rows.grid(("uncond",), 2, 1)),
    ],
)
def test_rows_follow_from_what_encode_prompt_was_asked(count, own, prompts, images, guided, expected):
    found = rows_of(count, branches=("uncond", "cond"), own=own, prompts=prompts, images=images, guided=guided)
    assert found == expected


def test_rows_that_fit_no_prompts_are_refused():
    with pytest.raises(ValueError, match="got 5 rows, but 2 prompts with 1 images each make 2 rows, or 4"):
        rows_of(5, branches=("uncond", "cond"), own=None, prompts=2, images=1, guided=True)


# -- tokens


TOKENS = Tokens((Segment("text", 0, 3), Segment("image", 3, 4, (2, 2))))


def test_tokens_get_is_a_view_and_put_a_copy():
    x = normal(2, 1, 7, 5)
    assert TOKENS.length == 7 and "text" in TOKENS and "register" not in TOKENS
    image = TOKENS.get(x, "image")
    assert torch.equal(image, x[:, :, 3:]) and image.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    before = x.clone()
    out = TOKENS.put(x, "image", image + 1)
    assert torch.equal(out[:, :, 3:], before[:, :, 3:] + 1) and torch.equal(out[:, :, :3], before[:, :, :3])
    assert torch.equal(TOKENS.put(x, "text", x[:, :, :3] * 2)[:, :, 3:], before[:, :, 3:]) and torch.equal(x, before)


def test_an_unknown_segment_is_an_error_that_lists_the_others():
    for use in (lambda: TOKENS["register"], lambda: TOKENS.get(normal(1, 1, 7, 2), "register")):
        with pytest.raises(KeyError, match=r"no segment 'register' here; there are \['text', 'image'\]"):
            use()


# -- windows


@pytest.mark.parametrize("total", [1, 4, 7, 50])
def test_windows_are_half_open_and_adjacent_ones_share_no_step(total):
    steps = [Step(index=i, total=total) for i in range(total)]
    assert all(in_window(step, (0.0, 1.0)) for step in steps)
    assert not any(in_window(step, (0.5, 0.5)) for step in steps)
    for step in steps:
        assert in_window(step, (0.0, 0.4)) + in_window(step, (0.4, 1.0)) == 1
        assert in_window(step, (0, 2)) == (step.index < 2)
        assert in_window(step, (2, total)) == (step.index >= 2)


def test_a_float_bound_is_a_fraction_and_two_ints_are_indices():
    assert not in_window(Step(1, 10), (0, 1)) and in_window(Step(1, 10), (0, 1.0)) and in_window(Step(9, 10), (0.0, 1))


# -- the attention call


def call_of(b=4, h=2, n=7, m=7, d=3, **more):
    return AttentionCall(normal(b, h, n, d), normal(b, h, m, d, seed=1), normal(b, h, m, d, seed=2), **more)


def test_a_call_from_three_tensors_has_plain_rows_and_no_grid():
    call = call_of()
    assert call.table == Rows.plain(4) and call.grid is None
    assert call.replace(query_tokens=TOKENS).grid == (2, 2)


def test_take_is_the_operation_of_these_rows_alone():
    bias = (Bias(normal(4, 1, 7, 1), normal(1, 2, 7, 1)),)
    call = call_of(rows=Rows.grid(("uncond", "cond"), 2, 1), mask=normal(4, 1, 7, 7) > -1, bias=bias)
    part = call.take([3, 0])
    assert part.rows.table() == [("cond", 1, 0, ""), ("uncond", 0, 0, "")]
    assert torch.allclose(attend(part), attend(call)[[3, 0]], rtol=0, atol=1e-14)


def test_take_of_folded_rows_takes_all_their_entries():
    call = call_of(b=6, rows=fold(Rows.grid(("uncond", "cond"), 1, 1), 6))
    assert torch.equal(call.take([1]).value, call.value[3:])


def test_borrow_puts_other_rows_maps_on_own_values():
    call = call_of(mask=normal(1, 1, 7, 7) > -1)
    index = call.table.partner(prompt=0)
    expected = explicit(call)[0][index] @ call.value
    assert torch.allclose(attend(call.borrow(index)), expected, rtol=0, atol=1e-13)


def test_queries_is_the_operation_of_one_segment():
    mask, bias = normal(1, 1, 7, 7) > -1, (Bias(normal(4, 1, 7, 2), normal(1, 2, 7, 2)), Bias(None, normal(1, 1, 7, 1)))
    call = call_of(query_tokens=TOKENS, key_tokens=TOKENS, mask=mask, bias=bias)
    part = call.queries("image")
    assert part.query_tokens == Tokens((Segment("image", 0, 4, (2, 2)),)) and part.key_tokens == TOKENS
    assert torch.allclose(attend(part), attend(call)[:, :, 3:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("had", ["none", "bool", "float"])
def test_forbid_closes_pairs_on_top_of_the_mask(had):
    masks = {"none": None, "bool": normal(1, 1, 7, 7, seed=5) > -1, "float": normal(1, 1, 7, 7, seed=6)}
    call, closed = call_of(mask=masks[had]), torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    closed[..., 2:4] = True
    maps = explicit(call.forbid(closed))[0]
    assert not maps[..., 2:4].any() and torch.allclose(maps.sum(-1), torch.ones((), dtype=torch.float64))
    rest = explicit(call)[0].masked_fill(closed, 0)
    assert torch.allclose(maps, rest / rest.sum(-1, keepdim=True), rtol=0, atol=1e-13)


# -- attend


def explicit(call):
    """(maps, output) by a written-out softmax."""
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    logits = scale * call.query @ call.key.transpose(-1, -2)
    for bias in call.bias:
        left = torch.ones_like(bias.right[:, :, :1]) if bias.left is None else bias.left
        logits = logits + left @ bias.right.transpose(-1, -2)
    if call.causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask, -math.inf) if call.mask.dtype == torch.bool else logits + call.mask
    maps = logits.softmax(-1)
    return maps, maps @ call.value


BIASES = {
    "plain": (),
    "rank_3": (Bias(normal(2, 3, 5, 3), normal(2, 3, 6, 3, seed=8)),),
    "keys": (Bias(None, normal(1, 1, 6, 1)),),
    "two": (Bias(normal(1, 3, 5, 2), normal(2, 1, 6, 2, seed=8)), Bias(None, normal(2, 1, 6, 1, seed=9))),
}
OPEN = torch.ones(2, 1, 5, 6, dtype=torch.bool)
OPEN[0, 0, :, 4:] = False
OPEN[1, 0, 2, :5] = False
MASKS = {"open": None, "bool": OPEN, "float": normal(1, 3, 5, 6, seed=10), "keys": OPEN[:, :, :1]}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("channels", [2, 4, 9])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_attend_equals_an_explicit_softmax(bias, mask, channels, scale):
    call = AttentionCall(
        normal(2, 3, 5, 4), normal(2, 3, 6, 4, seed=1), normal(2, 3, 6, channels, seed=2),
        mask=MASKS[mask], bias=BIASES[bias], scale=scale,
    )  # fmt: skip
    out = attend(call)
    assert out.shape == (2, 3, 5, channels) and (out - explicit(call)[1]).abs().max() <= 1e-12


def test_attend_is_causal_where_the_call_is():
    call = call_of(causal=True)
    assert (attend(call) - explicit(call)[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("channels", [2, 3, 6])
def test_attend_has_the_gradients_of_its_inputs_and_biases(channels):
    def function(q, k, v, left, right, keys):
        return attend(AttentionCall(q, k, v, bias=(Bias(left, right), Bias(None, keys))))

    shapes = ((1, 2, 3, 3), (1, 2, 4, 3), (1, 2, 4, channels), (1, 2, 3, 2), (1, 2, 4, 2), (1, 1, 4, 1))
    assert torch.autograd.gradcheck(function, [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)])


# -- sites and heads

PLACES = (("down", 0, 1), ("down", 1, 2), ("mid", 0, 4), ("up", 0, 4), ("up", 1, 2), ("up", 2, 1))
SITES = [
    Site(f"{place}.{block}.attn{i}", kind, place, block, index, heads=4, scale=scale)
    for index, (place, block, i, kind, scale) in enumerate(
        (place, block, i, kind, scale) for place, block, scale in PLACES for i, kind in ((1, "self"), (2, "cross"))
    )
]


@pytest.mark.parametrize(
    "selector, test",
    [
        ("*", lambda s: True),
        ("up & self", lambda s: s.place == "up" and s.kind == "self"),
        ("up|mid&cross", lambda s: s.place == "up" or (s.place == "mid" and s.kind == "cross")),
        ("(up | mid) & cross", lambda s: s.place in ("up", "mid") and s.kind == "cross"),
        ("!(up | down)", lambda s: s.place == "mid"),
        ("!!up & !self", lambda s: s.place == "up" and s.kind == "cross"),
        ("block 0, 2", lambda s: s.block in (0, 2)),
        ("blocks 1-2 & up", lambda s: s.block in (1, 2) and s.place == "up"),
        ("index 0-3, 9", lambda s: s.index in (0, 1, 2, 3, 9)),
        ("scale >= 2", lambda s: s.scale >= 2),
        ("scale<2 | scale == 4", lambda s: s.scale in (1, 4)),
        ("scale != 2", lambda s: s.scale != 2),
        ('"mid.0.attn2" | index 0', lambda s: s.name == "mid.0.attn2" or s.index == 0),
    ],
)
def test_a_selector_chooses_the_sites_it_says_in_their_order(selector, test):
    assert select(SITES, selector) == [site for site in SITES if test(site)]


BAD = ["", "up &", "& up", "(up", "up)", "up down", "index", "scale 4", "sideways", "up, mid", "%"]


@pytest.mark.parametrize("selector", BAD)
def test_a_bad_selector_is_an_error_that_quotes_it(selector):
    with pytest.raises(ValueError, match="site selector") as error:
        select(SITES, selector)
    assert repr(selector) in str(error.value)


def test_an_unknown_word_is_an_error_that_lists_the_words_there_are():
    with pytest.raises(ValueError, match=r"cannot read 'sideways'.*use kinds self, cross.*places down, mid, up"):
        select(SITES, "up & sideways")


def test_a_selector_that_matches_nothing_lists_the_sites_there_are():
    with pytest.raises(ValueError, match=r"no site matches 'joint'; .* down 0-1 self \(2 sites, scale 1-2"):
        select(SITES, "joint")
    assert select(SITES, "joint", missing_ok=True) == []


def test_head_sets_name_heads_per_site():
    heads = HeadSet("up & block 1: 3, 0; mid: *; up & block 1 & self: 1-2")
    by_name = {site.name: heads.heads(site) for site in SITES}
    assert by_name["up.1.attn1"] == [0, 1, 2, 3] and by_name["up.1.attn2"] == [0, 3]
    assert by_name["mid.0.attn1"] == [0, 1, 2, 3] and by_name["down.0.attn1"] == []
    assert HeadSet('"up.1.attn1": 2').heads(SITES[8]) == [2]


def test_head_masks_have_the_chosen_heads_and_the_dtype_of_like():
    site = SITES[0]
    assert HeadSet("down: 1,3").mask(site).flatten().tolist() == [0, 1, 0, 1]
    mask = HeadSet("down: 1").mask(site, normal(2, 4, 5, 3))
    assert mask.shape == (4, 1, 1) and mask.dtype == torch.float64


def test_the_union_of_head_sets_has_the_heads_of_both():
    union = HeadSet("down: 1") | HeadSet("down & self: 0; up: *")
    assert union.heads(SITES[0]) == [0, 1] and union.heads(SITES[1]) == [1] and union.heads(SITES[10]) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", " ; ", "up", "up: x", "up: 1,", "up: -1", "sideways: 1", "up &: 1"])
def test_a_bad_head_set_is_an_error_when_it_is_made(text):
    with pytest.raises(ValueError, match=r"head set|site selector"):
        HeadSet(text)


def test_heads_a_model_lacks_are_errors_that_say_what_it_has():
    with pytest.raises(ValueError, match=r"head 4 of 'up: 4': up.0.attn1 has heads 0-3"):
        HeadSet("up: 4").heads(SITES[6])
    with pytest.raises(ValueError, match=r"'joint: 1' chooses no head; this model has down 0-1 self"):
        HeadSet("joint: 1").check(SITES)
    HeadSet("up: 1").check(SITES)
