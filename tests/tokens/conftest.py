"""Small tokenizers of the three kinds, trained here: transformers' own classes with tiny vocabularies."""

import json
import string

import pytest
from tokenizers import pre_tokenizers, trainers
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

CORPUS = [
    "a photo of a cat on grass",
    "a red circle left of a blue square, with a white frame",
    "two dogs and a tiger eating lasagna in the snow",
    "a squirrel with croutons. user system assistant describe the image",
    "café crème, naïve, 一只猫在草地上",
] * 4
SCRATCH = " ".join(string.ascii_letters + string.digits + string.punctuation)
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def bpe(tokenizer_class, suffix="", vocab_size=900, **kwargs):
    empty = tokenizer_class(**kwargs).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(empty.get_vocab()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        **({"end_of_word_suffix": suffix} if suffix else {}),
        show_progress=False,
    )
    empty.train_from_iterator([*CORPUS, SCRATCH.lower()], trainer)
    model = json.loads(empty.to_str())["model"]
    return tokenizer_class(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], **kwargs)


@pytest.fixture(scope="session")
def clip():
    return bpe(CLIPTokenizer, "</w>")


@pytest.fixture(scope="session")
def qwen():
    tokenizer = bpe(Qwen2Tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture(scope="session")
def t5():
    empty = T5Tokenizer(extra_ids=0).backend_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    empty.train_from_iterator([*CORPUS, SCRATCH], trainer)
    vocab = [tuple(entry) for entry in json.loads(empty.to_str())["model"]["vocab"]]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


@pytest.fixture(scope="session")
def chat():
    """Options of `encode` for a chat template as QwenImagePipeline uses it."""
    return {"template": QWEN_TEMPLATE, "drop": 5}
