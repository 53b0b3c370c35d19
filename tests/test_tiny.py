"""The tiny models run, repeat, and do what `Family` says about them; other tests rely on these facts."""

import pytest
import torch
from tiny import FAMILIES, NEGATIVE, TEXT_LENGTH, VARIANTS, WORDS, Family, text_length, tokenizer, watch

EVERY = [*FAMILIES.values(), *VARIANTS.values()]
every = pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
with_text = pytest.mark.parametrize("family", [f for f in EVERY if f.text], ids=lambda family: family.name)
joint = pytest.mark.parametrize("family", [f for f in EVERY if f.order], ids=lambda family: family.name)
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32 autocast, CPUs have none


@pytest.fixture(scope="module")
def pipes():
    built = {}
    return lambda family: built.setdefault(family.name, family.build())


def tokens(family: Family, size: tuple[int, int]) -> int:
    """Image tokens at the highest resolution with attention; odd latent sides are rounded up when a UNet halves
    them.
    """
    return family.frames * (-(-size[0] // family.stride)) * (-(-size[1] // family.stride))


def longest(family: Family, texts) -> int:
    """Text tokens at the op; only Qwen-Image pads no further than the longest prompt of the call."""
    return max(map(text_length, texts)) if family.name == "qwen" else TEXT_LENGTH


@every
def test_same_seed_gives_equal_weights_and_another_seed_does_not(family):
    def weights(seed):
        pipe = family.build(seed=seed)
        return torch.cat([p.flatten() for name in family.denoisers for p in getattr(pipe, name).parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


@every
def test_building_leaves_the_global_random_state_alone(family):
    before = torch.get_rng_state()
    family.build()
    assert torch.equal(before, torch.get_rng_state())


@every
def test_runs_repeat_bit_for_bit_on_the_same_and_on_a_new_pipeline(family, pipes):
    first = family.run(pipes(family))
    assert first.shape[0] == 2 and first.isfinite().all() and 0.1 < first.std() < 20
    assert torch.equal(first, family.run(pipes(family)))
    assert torch.equal(first, family.run(family.build()))


@every
def test_rows_depend_on_their_prompt_and_their_seed_only(family, pipes):
    both = family.run(pipes(family), prompts=("a", "b"))
    for row, prompt in enumerate(("a", "b")):
        alone = family.run(pipes(family), prompts=(prompt,), seed=row)
        torch.testing.assert_close(both[row : row + 1], alone, rtol=1e-3, atol=1e-3)
    same_noise = [torch.Generator().manual_seed(0) for _ in range(2)]
    twins = family.run(pipes(family), prompts=("a", "a"), generator=same_noise)
    torch.testing.assert_close(twins[0], twins[1], rtol=1e-5, atol=1e-5)
    same_noise = [torch.Generator().manual_seed(0) for _ in range(2)]
    others = family.run(pipes(family), prompts=("a", "b"), generator=same_noise)
    assert (others[0] - others[1]).abs().max() > 1e-3


@every
def test_guidance_changes_the_result(family, pipes):
    on, off = (family.run(pipes(family), cfg=cfg) for cfg in (True, False))
    assert on.shape == off.shape and (on - off).abs().max() > 1e-3


@every
def test_several_images_per_prompt_stand_prompt_by_prompt(family, pipes):
    four = family.run(pipes(family), prompts=("a", "d"), images=2)  # of one length: see build_qwen
    repeated = family.run(pipes(family), prompts=("a", "a", "d", "d"))
    assert four.shape[0] == 4
    torch.testing.assert_close(four, repeated, rtol=1e-3, atol=1e-3)


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
def test_bfloat16_runs(family, pipes, cfg):
    pipe = family.build(dtype=torch.bfloat16)
    latents = family.run(pipe, cfg=cfg)
    assert family.inputs(pipe)["prompt_embeds"].dtype == torch.bfloat16
    keeps_float32 = family.name in ("wan", "wan22")  # the latents, not the model's input
    assert latents.dtype == (torch.float32 if keeps_float32 else torch.bfloat16)
    assert latents.isfinite().all()


@every
@pytest.mark.parametrize("cfg", [True, False], ids=["cfg", "no_cfg"])
@pytest.mark.parametrize("odd", [False, True], ids=["square", "odd"])
def test_denoiser_calls_are_as_the_family_says(family, pipes, cfg, odd):
    pipe, prompts, size = pipes(family), ("a", "b"), family.odd_size if odd else family.size
    inputs = family.inputs(pipe, prompts, cfg=cfg)
    with watch(pipe, family) as calls:
        family.run(pipe, prompts=prompts, cfg=cfg, height=size[0], width=size[1])
    branches = family.calls if cfg else [("cond",)]
    contexts = family.contexts if cfg else family.contexts[:1]
    steps = round(family.steps * family.strength)
    assert [call.context for call in calls] == list(contexts) * steps
    assert {call.denoiser for call in calls} == set(family.denoisers)
    for call, names in zip(calls, list(branches) * steps, strict=True):
        given = {"cond": inputs["prompt_embeds"], "uncond": inputs.get("negative_prompt_embeds")}
        assert torch.equal(call.inputs["encoder_hidden_states"], torch.cat([given[name] for name in names]))
        assert call.sites == list(family.sites)
        rows = len(names) * len(prompts)
        assert len(call.ops) == family.pooling + len(family.sites) * (rows if family.rowwise else 1)
        texts = [text for name in names for text in (prompts if name == "cond" else [NEGATIVE] * 2)]
        op, image = call.ops[family.pooling], tokens(family, size)
        if family.rowwise:
            for op, text in zip(call.ops[family.pooling :], texts * len(family.sites), strict=True):
                assert op.key.shape[:1] + op.key.shape[2:3] == (1, image + text_length(text)) and op.mask is None
        elif family.order:
            assert op.query.shape == op.key.shape and op.key.shape[0] == rows
            assert op.key.shape[2] == image + longest(family, texts)
            ragged = family.masked and len(set(map(text_length, texts))) > 1
            assert [op.mask is not None for op in call.ops] == [ragged] * len(call.ops)
        else:
            for own, cross in zip(call.ops[::2], call.ops[1::2], strict=True):
                assert own.query.shape == own.key.shape == cross.query.shape and own.key.shape[0] == rows
                assert cross.key.shape[2] == TEXT_LENGTH and own.key.shape[2] <= image
                assert own.mask is None and (cross.mask is not None) == family.masked
            assert op.key.shape[2] == image


@joint
def test_segments_stand_in_the_stated_order_at_the_op(family, pipes):
    """Keys of the first joint site that move with the latents are image tokens; the modulation sees text and time
    only.
    """
    pipe, keys = pipes(family), []
    for seed in (0, 10):
        with watch(pipe, family) as calls:
            family.run(pipe, prompts=("a",), seed=seed, cfg=False)
        keys.append(calls[0].ops[family.pooling].key)
    moved = (keys[0] - keys[1]).abs().amax((0, 1, 3)) > 0  # (tokens,)
    image = tokens(family, family.size)
    text = len(moved) - image
    assert text == (text_length("a") if family.masked else TEXT_LENGTH)
    lengths = {"image": [True] * image, "text": [False] * text}
    assert moved.tolist() == [flag for segment in family.order for flag in lengths[segment]]


@every
def test_softmax_sites_are_all_the_attention_modules(family, pipes):
    for name in family.denoisers:
        found = {path for path, module in getattr(pipes(family), name).named_modules() if hasattr(module, "processor")}
        assert found == set(family.sites)


@every
def test_attention_is_neither_flat_nor_one_hot(family, pipes):
    pipe = pipes(family)
    with watch(pipe, family) as calls:
        family.run(pipe)
    for op in calls[0].ops[family.pooling :]:
        weights = (op.query @ op.key.mT * op.query.shape[-1] ** -0.5).softmax(-1)
        largest = weights.amax(-1).mean() * weights.shape[-1]  # 1 if flat
        assert largest > 1.1 and weights.amax(-1).mean() < 0.95


@with_text
def test_words_go_through_the_text_encoders(family):
    pipe = family.build(with_text=True)
    first = family.run(pipe, prompts=("a red cat", "a blue dog"), text=True)
    assert torch.equal(first, family.run(pipe, prompts=("a red cat", "a blue dog"), text=True))
    for cfg, images in ((False, 1), (True, 2)):
        assert family.run(pipe, prompts=("a red cat",), text=True, cfg=cfg, images=images).shape[0] == images
    other = family.run(pipe, prompts=("a red dog", "a blue dog"), text=True)
    assert (first[0] - other[0]).abs().max() > 1e-5
    torch.testing.assert_close(first[1], other[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(family.run(pipe), family.run(family.build()))  # the denoiser is the same one


@with_text
def test_the_vae_decodes_to_images_with_attention_of_its_own(family, pipes):
    pipe = pipes(family)
    entered = []
    handle = pipe.vae.decoder.mid_block.attentions[0].register_forward_pre_hook(lambda *_: entered.append(1))
    with watch(pipe, family) as calls:
        images = family.run(pipe, output_type="pt")
    handle.remove()
    assert images.shape == (2, 3, 64, 64) and images.std() > 1e-3 and entered
    assert all(call.sites == list(family.sites) for call in calls)


def test_known_words_are_one_token_and_others_are_characters():
    tok = tokenizer("<s>", "</s>", "<pad>", 77)
    assert len(tok(" ".join(WORDS)).input_ids) == len(WORDS) + 2
    encoded = tok("A red zebra", return_offsets_mapping=True)
    assert tok.convert_ids_to_tokens(encoded.input_ids) == ["<s>", "a", "red", "z", "##e", "##b", "##r", "##a", "</s>"]
    assert encoded.offset_mapping[2] == (2, 5) and encoded.offset_mapping[-2] == (10, 11)
