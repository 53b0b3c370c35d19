import unicodedata

import pytest

from attnctrl.tokens import Encoded, Part, as_words, concat, encode, find, from_pieces, words

SEARCHED = [
    ("a photo of a cat on grass", "cat", "cat"),
    ("a photo of a hippopotamus on grass", "hippopotamus", "hippopotamus"),
    ("a red circle left of a blue square", "left of", "left of"),
    ("a cat, asleep", "cat", "cat"),
    ("a cat, asleep", "cat,", "cat,"),
    ("a (tiger) and a dog", "tiger", "tiger"),
    ("a   photo  of a cat", "cat", "cat"),
    ("left  of a square", "left of", "left of"),
    ("a photo of 3 dogs", "3", "3"),
    ("A Red Circle", "red", "red"),
    ("a café in the snow", "café", "café"),
    ("the cat's tail", "cat", "cat"),
    ("a blue-green square", "green", "green"),
]


def text(tokenizer, encoded, positions):
    ids = dict(zip(encoded.positions, encoded.ids, strict=True))
    written = tokenizer.decode([ids[p] for p in positions]).replace(" ", "").lower()
    return unicodedata.normalize("NFC", written)


@pytest.mark.parametrize(("prompt", "word", "expected"), SEARCHED)
def test_the_tokens_found_decode_to_the_word(clip, t5, qwen, prompt, word, expected, chat):
    for tokenizer, encoded in (
        (clip, encode(clip, prompt, 77)),
        (t5, encode(t5, prompt, 128)),
        (qwen, encode(qwen, prompt, 128, **chat)),
    ):
        assert text(tokenizer, encoded, find(encoded, word)) == expected.replace(" ", "")


def test_positions_are_those_of_the_padded_sequence(clip, t5):
    prompt = "a photo of a cat"
    for tokenizer, length in ((clip, 77), (t5, 256)):
        encoded = encode(tokenizer, prompt, length)
        padded = tokenizer(prompt, padding="max_length", max_length=length, truncation=True)["input_ids"]
        assert encoded.length == length == len(padded)
        assert [padded[p] for p in encoded.positions] == list(encoded.ids)
        assert set(padded[encoded.count :]) <= {tokenizer.pad_token_id}
    assert encode(clip, prompt, 77).positions[0] == 0  # BOS has no span; T5 has none
    assert encode(clip, prompt, 77).spans[0] is None and encode(t5, prompt, 77).spans[0] == (0, 1)
    assert find(encode(clip, prompt, 77), "a") == (1, 4)


def test_template_tokens_are_dropped_from_the_front_and_kept_behind(qwen, chat):
    prompt = "a photo of a cat"
    ids = qwen(chat["template"].format(prompt))["input_ids"]
    drop = 5
    encoded = encode(qwen, prompt, None, template=chat["template"], drop=drop)
    assert list(encoded.ids) == ids[drop:] and encoded.length == len(ids) - drop
    assert qwen.decode([encoded.ids[p] for p in find(encoded, "cat")]).strip() == "cat"
    assert encoded.spans[-1] is None  # "assistant\n"
    assert encoded.padded(200).length == 200 and find(encoded.padded(200), "cat") == find(encoded, "cat")


def test_a_space_with_a_token_of_its_own_counts_to_the_word_after_it(qwen):
    encoded = encode(qwen, "a photo of 3 dogs", None)
    assert [qwen.decode([encoded.ids[p]]) for p in find(encoded, "3")] == [" ", "3"]
    doubled = encode(qwen, "a photo  of a cat", None)
    assert [qwen.decode([doubled.ids[p]]) for p in find(doubled, "of")] == [" of"]


def test_a_word_dropped_with_the_template_is_an_error(qwen, chat):
    whole = encode(qwen, "a photo of a cat", None, template=chat["template"])
    drop = find(whole, "photo")[-1] + 1
    encoded = encode(qwen, "a photo of a cat", 128, template=chat["template"], drop=drop)
    assert find(encoded, "of")[0] == 0
    with pytest.raises(ValueError, match="'photo' is cut off"):
        find(encoded, "photo")


def test_braces_in_the_prompt_are_not_the_templates(qwen, chat):
    encoded = encode(qwen, "a {} cat", None, template=chat["template"])
    assert text(qwen, encoded, find(encoded, "{}")) == "{}"
    with pytest.raises(ValueError, match="exactly one"):
        encode(qwen, "a cat", None, template="no place for it")


@pytest.mark.parametrize("composed", [True, False])
def test_offsets_refer_to_the_prompt_as_given(clip, composed):
    prompt = unicodedata.normalize("NFC" if composed else "NFD", "A Café, crème")
    encoded = encode(clip, prompt, 77)
    for asked in ("café", unicodedata.normalize("NFD", "café"), "CAFÉ"):
        assert text(clip, encoded, find(encoded, asked)) == "café"
    assert text(clip, encoded, find(encoded, "crème")) == "crème"


def test_scripts_without_spaces_are_searched_anywhere(t5, qwen, chat):
    prompt = "一只猫在草地上"
    assert text(t5, encode(t5, prompt, 64), find(encode(t5, prompt, 64), "猫")) == "猫"
    encoded = encode(qwen, prompt, None, template=chat["template"])
    assert find(encoded, "猫")  # a byte-level token may hold part of the neighbours


def test_every_occurrence_or_one_of_them(clip):
    encoded = encode(clip, "a cat, a dog and a cat", 77)
    assert len(find(encoded, "cat")) == 2
    assert find(encoded, "cat", occurrence=0) == find(encoded, ("cat", 0)) == find(encoded, "cat")[:1]
    assert find(encoded, ("cat", 1)) == find(encoded, ("cat", -1)) == find(encoded, "cat")[1:]
    assert len(find(encoded, "a")) == 3
    with pytest.raises(ValueError, match=r"occurrence 2 .* 'cat', which is there 2 time"):
        find(encoded, ("cat", 2))


def test_own_case_goes_before_any_case(clip):
    encoded = encode(clip, "Cat and cat", 77)
    assert find(encoded, "cat") == (3,) and find(encoded, "Cat") == (1,) and find(encoded, "CAT") == (1, 3)


def test_a_part_of_a_word_is_not_the_word(clip):
    with pytest.raises(ValueError):
        find(encode(clip, "a category of cars", 77), "cat")


def test_position_of_a_word_takes_its_punctuation(clip):
    encoded = encode(clip, "a cat, asleep", 77)
    assert find(encoded, 1) == find(encoded, "cat,") == (2, 3)
    assert find(encoded, "cat") == (2,)
    assert [found.text for found in words(encoded)] == ["a", "cat,", "asleep"]
    assert [encoded.prompt[slice(*found.span)] for found in words(encoded)] == ["a", "cat,", "asleep"]
    with pytest.raises(ValueError, match="word number 3"):
        find(encoded, 3)


def test_unknown_word_names_the_prompt_and_lists_its_words(clip):
    with pytest.raises(ValueError) as error:
        find(encode(clip, "a photo of a cat", 77), "dog")
    assert "'dog'" in str(error.value) and "'a photo of a cat'" in str(error.value)
    assert "a, photo, of, a, cat" in str(error.value)


@pytest.mark.parametrize("word", ["", "  "])
def test_empty_word_is_an_error(clip, word):
    with pytest.raises(ValueError, match="empty"):
        find(encode(clip, "a cat", 77), word)


def test_truncated_words_are_named_and_the_rest_is_found(clip, t5):
    prompt = "a photo of a cat on grass with a hippopotamus"
    for tokenizer in (clip, t5):
        full = encode(tokenizer, prompt, 128)
        cut = find(full, "hippopotamus")[2] + 1  # in the middle of the word, EOS comes after
        encoded = encode(tokenizer, prompt, cut + 1)
        assert encoded.count == encoded.length == cut + 1
        assert list(encoded.ids) == tokenizer(prompt, truncation=True, max_length=cut + 1)["input_ids"]
        assert find(encoded, "grass") == find(full, "grass")
        with pytest.raises(ValueError, match=r"'hippopotamus' is cut off.*a photo of a cat"):
            find(encoded, "hippopotamus")
        with pytest.raises(ValueError, match="'with' is cut off"):
            find(encode(tokenizer, prompt, find(full, "with")[0] + 1), "with")


def test_concatenated_encoders_hold_a_word_in_each(clip, t5):
    prompt = "a photo of a cat"
    a, b = encode(clip, prompt, 77), encode(t5, prompt, 256)
    both = concat(a, b)
    assert both.length == 333 and both.count == a.count + b.count
    assert find(both, "cat") == find(a, "cat") + tuple(77 + p for p in find(b, "cat"))
    assert both.positions == a.positions + tuple(77 + p for p in b.positions)
    with pytest.raises(ValueError, match="one prompt"):
        concat(a, encode(t5, "a dog", 256))


def test_a_word_beyond_one_encoder_is_found_in_the_other(clip, t5):
    prompt = "a photo of a cat on grass"
    short, long = encode(clip, prompt, 6), encode(t5, prompt, 64)
    assert find(concat(short, long), "grass") == tuple(6 + p for p in find(long, "grass"))


def test_a_tokenizer_without_offsets_is_refused():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match=r"SlowTokenizer.*use_fast=True"):
        encode(SlowTokenizer(), "a cat", 77)


def test_tokens_by_hand():
    encoded = from_pieces("a Squirrel, eating", ["a", "squi", "rrel", ",", "eating"], 77)
    assert encoded.ids[0] == "<bos>" and encoded.ids[-1] == "<eos>" and encoded.length == 77 and encoded.count == 7
    assert find(encoded, "squirrel") == (2, 3) and find(encoded, 1) == (2, 3, 4)
    assert find(from_pieces("a cat", ["a", "cat"], bos=None, eos=None), "cat") == (1,)
    with pytest.raises(ValueError, match="does not continue"):
        from_pieces("a cat", ["a", "dog"])
    with pytest.raises(ValueError, match="end before"):
        from_pieces("a cat", ["a"])
    with pytest.raises(ValueError, match="do not fit"):
        from_pieces("a cat", ["a", "cat"], 3)
    with pytest.raises(ValueError):
        Encoded("a", (Part((1, 2), (None,), 3),))


def test_one_word_or_several():
    assert as_words("cat") == ["cat"] and as_words(2) == [2] and as_words(("cat", 1)) == [("cat", 1)]
    assert as_words(("cat", "dog")) == ["cat", "dog"] and as_words([("cat", 1), "dog"]) == [("cat", 1), "dog"]


def test_encoding_leaves_the_tokenizer_as_it_was(clip):
    before = clip("a photo of a cat")["input_ids"]
    encode(clip, "a photo of a cat on grass", 4)
    assert clip("a photo of a cat")["input_ids"] == before
