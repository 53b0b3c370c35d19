import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnctrl.alignment import (
    equalizer,
    equalizers,
    indicator,
    refine_mapper,
    replace_mapper,
    schedule,
    self_window,
    window,
)
from attnctrl.tokens import concat, encode, find, from_pieces

GOLDEN = Path(__file__).parent / "golden"
PIECES = {"squirrel": ["squi", "rrel"], "hippopotamus": ["hip", "popo", "tamus"], "lasagna": ["la", "sagna"]}
WORDS = ["a", "cat", "dog", "on", "the", *PIECES]


def stub(prompt, length=77):
    return from_pieces(prompt, [piece for word in prompt.split() for piece in PIECES.get(word, [word])], length)


def golden(case):
    data = json.loads((GOLDEN / f"{case}.json").read_text())
    encoded = [from_pieces(p, t, 77) for p, t in zip(data["prompts"], data["tokens"], strict=True)]
    return data, encoded[0], encoded[1:], load_file(GOLDEN / f"{case}.safetensors")


def some_pairs(count=40, same_length=True):
    for seed in range(count):
        rng = random.Random(seed)
        source = rng.choices(WORDS, k=rng.randint(1, 8))
        if same_length:
            target = [rng.choice(WORDS) if rng.random() < 0.4 else word for word in source]
        else:
            target = [word for word in source if rng.random() < 0.8] + rng.choices(WORDS, k=rng.randint(0, 3))
        yield " ".join(source), " ".join(target)


# -------------------------------------------------------------------------------------------------------- golden cases


@pytest.mark.parametrize("case", ["replace_basic", "refine_words", "reweight_only"])
def test_golden_tables(case):
    data, source, targets, expected = golden(case)
    params = data["params"]
    alpha = schedule(params["cross_replace_steps"], targets, data["num_steps"])
    assert torch.equal(alpha, expected["alpha_time_words"])
    if case == "replace_basic":
        for tail in ("corrected", "official"):
            assert torch.equal(torch.stack([replace_mapper(source, t, tail) for t in targets]), expected["mapper"])
    if case == "refine_words":
        maps, matched = zip(*(refine_mapper(source, target) for target in targets), strict=True)
        assert torch.equal(torch.stack(maps), expected["mapper"])
        assert torch.equal(torch.stack(matched), expected["refine_alphas"])
    if case == "reweight_only":
        assert torch.equal(equalizers(targets, params["equalizer"]), expected["equalizer"])


# ------------------------------------------------------------------------------------------------------------- replace


def official_replace(source, target, length, tail):
    """The authors' walk, restated on the stub's words; `tail` decides what stands after the last changed word."""
    pairs = list(zip(source.split(), target.split(), strict=True))
    size = [(len(PIECES.get(x, [x])), len(PIECES.get(y, [y]))) for x, y in pairs]
    starts = [(1 + sum(s for s, _ in size[:k]), 1 + sum(t for _, t in size[:k])) for k in range(len(size))]
    changed = [k for k, (x, y) in enumerate(pairs) if x != y]
    matrix = torch.zeros(length, length, dtype=torch.float64)
    i = j = 0
    while i < length and j < length:
        if changed and starts[changed[0]][0] == i:
            s, t = size[changed[0]]
            matrix[i : i + s, j : j + t] = torch.eye(s, dtype=torch.float64) if s == t else 1 / t
            i, j = i + s, j + t
            changed.pop(0)
        else:
            matrix[i if changed or tail == "corrected" else j, j] = 1
            i, j = i + 1, j + 1
    return matrix


@pytest.mark.parametrize("tail", ["corrected", "official"])
def test_replace_follows_the_walk(tail):
    for source, target in some_pairs():
        ours = replace_mapper(stub(source, 32), stub(target, 32), tail)
        assert torch.equal(ours, official_replace(source, target, 32, tail)), (source, target)


def test_corrected_replace_conserves_attention():
    for source, target in some_pairs():
        x, y = stub(source, 40), stub(target, 40)
        mapper = replace_mapper(x, y)
        longer = max(y.count - x.count, 0)
        assert torch.allclose(mapper.sum(1)[: 40 - longer], torch.ones(40 - longer, dtype=torch.float64))
        for k, (a, b) in enumerate(zip(source.split(), target.split(), strict=True)):
            expected = len(find(x, k)) / len(find(y, k)) if a != b else 1.0
            assert torch.allclose(mapper[:, list(find(y, k))].sum(0), torch.tensor(expected, dtype=torch.float64))
        if all(len(find(x, k)) == len(find(y, k)) for k in range(len(source.split()))):
            assert torch.equal(mapper @ mapper.mT, torch.eye(40, dtype=torch.float64))  # a permutation
            assert torch.equal(mapper, replace_mapper(x, y, "official"))


def test_official_tail_reads_another_word_and_the_corrected_one_does_not():
    x, y = stub("a squirrel on grass"), stub("a cat on grass")
    corrected, official = replace_mapper(x, y), replace_mapper(x, y, "official")
    (grass_x,), (grass_y,) = find(x, "grass"), find(y, "grass")
    assert corrected[grass_x, grass_y] == 1 and corrected[:, grass_y].sum() == 1
    assert official[grass_x, grass_y] == 0 and official[grass_y, grass_y] == 1  # that is "on" in the source
    assert torch.equal(corrected[list(find(x, "squirrel")), 2], torch.ones(2, dtype=torch.float64))
    assert corrected[x.count :, y.count :].diagonal().sum() == 77 - x.count  # pads follow pads


def test_one_word_to_two_tokens_is_not_the_identity():
    x, y = stub("a cat on grass"), stub("a squirrel on grass")
    mapper = replace_mapper(x, y)
    assert not torch.equal(mapper, torch.eye(77, dtype=torch.float64))
    assert mapper[2, 2] == mapper[2, 3] == 0.5
    assert torch.equal(replace_mapper(x, x), torch.eye(77, dtype=torch.float64))


def test_replace_needs_as_many_words():
    with pytest.raises(ValueError, match=r"has 2 words.*has 3.*refine"):
        replace_mapper(stub("a cat"), stub("a big cat"))
    with pytest.raises(ValueError, match="tail"):
        replace_mapper(stub("a cat"), stub("a dog"), "fixed")  # type: ignore[arg-type]


def test_replace_names_a_changed_word_that_is_cut_off(clip):
    with pytest.raises(ValueError, match="'tiger' is cut off"):
        replace_mapper(encode(clip, "a photo of a cat", 77), encode(clip, "a photo of a tiger", 6))


def test_replace_on_each_tokenizer(clip, t5, qwen, chat):
    source, target = "a photo of a cat,  on grass", "a photo of a hippopotamus, on 3"
    for tokenizer, options in ((clip, {}), (t5, {}), (qwen, chat)):
        x, y = encode(tokenizer, source, 96, **options), encode(tokenizer, target, 96, **options)
        mapper = replace_mapper(x, y)
        for word in ("photo", "of", "on"):
            for i, j in zip(find(x, word), find(y, word), strict=True):
                assert mapper[i, j] == 1 and mapper[:, j].sum() == 1 and mapper[i].sum() == 1
        for k in (4, 6):
            block = mapper[list(find(x, k))][:, list(find(y, k))]
            assert torch.allclose(block.sum(), torch.tensor(float(len(find(x, k))), dtype=torch.float64))
        assert mapper[x.count - 1, y.count - 1] == 1  # EOS, or the last token of the template
        assert mapper[x.count, y.count] == 1  # first pad


def test_concatenated_encoders_are_block_diagonal(clip, t5):
    source, target = "a photo of a cat", "a photo of a squirrel"
    a, b = [(encode(clip, p, 77), encode(t5, p, 64)) for p in (source, target)]
    mapper = replace_mapper(concat(*a), concat(*b))
    assert torch.equal(mapper, torch.block_diag(replace_mapper(a[0], b[0]), replace_mapper(a[1], b[1])))
    index, matched = refine_mapper(concat(*a), concat(*b))
    first, second = refine_mapper(a[0], b[0])[0], refine_mapper(a[1], b[1])[0]
    assert torch.equal(index, torch.cat([first, torch.where(second < 0, second, second + 77)]))
    assert torch.equal(matched, index.ge(0).to(matched.dtype))
    with pytest.raises(ValueError, match="text encoder"):
        replace_mapper(a[0], concat(*b))


def test_a_changed_word_cut_off_in_one_encoder_is_replaced_in_the_other(clip, t5):
    source, target = "a photo of a cat", "a photo of a hippopotamus"
    a = [encode(clip, source, 77), encode(t5, source, 64)]
    b = [encode(clip, target, find(encode(clip, target, 77), "hippopotamus")[2] + 1).padded(77), encode(t5, target, 64)]
    mapper = replace_mapper(concat(*a), concat(*b))
    assert torch.equal(mapper[:77, :77], torch.eye(77, dtype=torch.float64))  # half a word is not spread over
    assert torch.equal(mapper[77:, 77:], replace_mapper(a[1], b[1]))


# -------------------------------------------------------------------------------------------------------------- refine


def test_refine_of_a_prompt_to_itself_is_the_identity(clip, t5, qwen):
    for prompt in ("a photo of a cat", "a a a", "", "a café, naïve"):
        for tokenizer in (clip, t5, qwen):
            encoded = encode(tokenizer, prompt, 77)
            index, matched = refine_mapper(encoded, encoded)
            assert torch.equal(index, torch.arange(77)) and torch.equal(matched, torch.ones(77, dtype=matched.dtype))


def test_refine_leaves_exactly_the_inserted_tokens_unmatched():
    x, y = stub("a cat on grass"), stub("a squirrel cat on the big grass")
    index, matched = refine_mapper(x, y)
    inserted = [*find(y, "squirrel"), *find(y, "the"), *find(y, "big")]
    assert (matched == 0).nonzero()[:, 0].tolist() == sorted(inserted)
    assert [index[j].item() for j in (*find(y, "cat"), *find(y, "on"), *find(y, "grass"))] == [2, 3, 4]


def test_refine_matches_equal_ids_in_order_and_as_many_as_possible():
    def longest(a, b):
        row = [0] * (len(b) + 1)
        for p in a:
            last = row[:]
            for j, q in enumerate(b):
                row[j + 1] = last[j] + 1 if p == q else max(last[j + 1], row[j])
        return row[-1]

    for source, target in some_pairs(same_length=False):
        x, y = stub(source), stub(target)
        index, matched = refine_mapper(x, y)
        kept = [(i, j) for j, i in enumerate(index[: y.count].tolist()) if i >= 0]
        assert all(x.ids[i] == y.ids[j] for i, j in kept)
        assert [i for i, _ in kept] == sorted({i for i, _ in kept})
        assert len(kept) == longest(x.ids, y.ids)
        assert torch.equal(index[y.count :], torch.arange(y.count, 77))
        assert torch.equal(matched, index.ge(0).to(matched.dtype))


def test_refine_prefers_to_leave_the_later_target_token_unmatched():
    # "cat" of the source fits either "cat"; walking back from the end, an unmatched target token goes first
    index, _ = refine_mapper(stub("a cat"), stub("a cat cat"))
    assert index[:5].tolist() == [0, 1, 2, -1, 3]
    # either "a" or "b" may be kept: skipping the target's last word goes before skipping the source's
    assert refine_mapper(stub("a b"), stub("b a"))[0][:4].tolist() == [0, 2, -1, 3]
    # no id in common but BOS and EOS: a new word keeps its own attention
    assert refine_mapper(stub("cat"), stub("dog"))[0][:3].tolist() == [0, -1, 2]


def test_pads_beyond_a_shorter_source_sequence_keep_their_own():
    index, matched = refine_mapper(stub("a cat", 6), stub("a dog", 8))
    assert index.tolist() == [0, 1, -1, 3, 4, 5, -1, -1] and matched.tolist() == [1, 1, 0, 1, 1, 1, 0, 0]


# ----------------------------------------------------------------------------------------------- equalizer, indicator


def test_equalizer_takes_each_words_own_value_on_all_its_tokens():
    target = stub("a squirrel and a cat")
    column = equalizer(target, {"squirrel": -0.5, "a": 3, ("a", 1): 2.0})
    assert column[:8].tolist() == [1, 3, -0.5, -0.5, 1, 2, 1, 1] and column[8:].eq(1).all()


def test_equalizer_of_a_word_only_some_targets_have():
    rows = equalizers([stub("a cat"), stub("a dog")], {"dog": 2})
    assert rows[0].eq(1).all() and rows[1].tolist()[:4] == [1, 1, 2, 1]
    with pytest.raises(ValueError, match=r"'bird'.*'a cat'.*'a dog'"):
        equalizers([stub("a cat"), stub("a dog")], {"bird": 2})


def test_indicator_marks_all_tokens_of_the_words():
    assert indicator(stub("a squirrel cat"), ["squirrel", "cat"]).nonzero()[:, 0].tolist() == [2, 3, 4]
    assert indicator(stub("a squirrel cat"), "cat").sum() == 1


# ------------------------------------------------------------------------------------------------------------ schedule


def test_windows_count_as_the_authors_do():
    targets = [stub("a cat")]
    for fraction, edited in ((0.8, 40), (0.4, 20), (1.0, 51), (1, 51), (0, 0), (0.0, 0)):
        assert schedule(fraction, targets, 50)[:, 0, 0].sum() == edited
    assert self_window(0.4, 50) == (0, 20) and self_window((0.2, 0.5), 10) == (2, 5)
    assert window((0.2, 0.5), 11) == (2, 5)
    for wrong in (1.5, -0.1, (0.5, 0.2)):
        with pytest.raises(ValueError, match="window"):
            schedule(wrong, targets, 50)


def test_a_words_window_replaces_the_default_on_and_off():
    targets = [stub("a squirrel on grass"), stub("a cat on grass")]
    alpha = schedule({"default": (0.2, 0.6), "squirrel": 0.4, "grass": (0.5, 1)}, targets, 9)  # 10 rows
    assert alpha.shape == (10, 2, 77)
    steps = torch.arange(10)
    assert torch.equal(alpha[:, 0, 1].bool(), (steps >= 2) & (steps < 6))
    for token in (2, 3):
        assert torch.equal(alpha[:, 0, token].bool(), steps < 4)
    for row, token in ((0, 5), (1, 4)):
        assert torch.equal(alpha[:, row, token].bool(), steps >= 5)


def test_both_names_of_the_default_and_none():
    targets = [stub("a cat")]
    assert torch.equal(schedule({"default_": 0.5}, targets, 9), schedule({"default": 0.5}, targets, 9))
    assert torch.equal(schedule({"default": 0.5}, targets, 9), schedule(0.5, targets, 9))
    assert schedule({"cat": 0.0}, targets, 9)[:, 0, 1].eq(1).all()  # the whole run without a default


def test_order_decides_between_words_that_share_a_token():
    target = [stub("a squirrel cat")]
    late = schedule({"default": 0.0, "squirrel cat": 1.0, "cat": 0.0}, target, 9)
    early = schedule({"default": 0.0, "cat": 0.0, "squirrel cat": 1.0}, target, 9)
    assert late[0, 0, :6].tolist() == [0, 0, 1, 1, 0, 0] and early[0, 0, :6].tolist() == [0, 0, 1, 1, 1, 0]


def test_words_left_out_keep_their_own_attention():
    targets = [stub("a cat on grass"), stub("a dog on grass")]
    alpha = schedule({"default": 1.0, "cat": 0.5}, targets, 9, skip=["cat", "grass"])
    assert alpha[:, 0, [2, 4]].eq(0).all() and alpha[:, 1, 4].eq(0).all() and alpha[:, 1, 2].eq(1).all()
    assert torch.equal(alpha[:, :1], schedule({"default": 1.0}, targets[:1], 9, skip=("cat", "grass")))


def test_a_word_in_no_target_is_an_error_that_lists_the_words():
    targets = [stub("a cat on grass"), stub("a dog")]
    for call in (
        lambda: schedule({"default": 1.0, "bird": 0.5}, targets, 9),
        lambda: schedule(1.0, targets, 9, skip="bird"),
    ):
        with pytest.raises(ValueError, match=r"'bird'.*'a cat on grass' has the words a, cat, on, grass; 'a dog'"):
            call()
    with pytest.raises(ValueError, match="one length"):
        schedule(1.0, [stub("a cat", 77), stub("a cat", 64)], 9)


def test_tables_in_single_precision():
    x, y = stub("a cat"), stub("a squirrel")
    assert replace_mapper(x, y, dtype=torch.float32).dtype == refine_mapper(x, y, dtype=torch.float32)[1].dtype
    assert schedule(0.5, [y], 9, dtype=torch.float32).dtype == equalizer(y, {"a": 2}, dtype=torch.float32).dtype
