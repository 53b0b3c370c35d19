"""The shipped pipelines and their training."""

import random

import diffusers
import numpy as np
import pytest
import torch

from attnctrl import demo
from attnctrl.demo.dataset import make_data
from attnctrl.demo.models import WEIGHTS, new_parts
from attnctrl.demo.muon import orthogonal
from attnctrl.demo.objectives import explicit_attention
from attnctrl.demo.reading import NO_OBJECT, QUESTIONS, answers, learn_to_read
from attnctrl.demo.train import Settings, Trainer


@pytest.fixture(scope="module", params=demo.NAMES)
def loaded(request):
    return request.param, demo.load(request.param)


def draw(name, pipe, prompts, seed=0, **changed):
    arguments = demo.defaults(name, len(prompts)) | changed
    return pipe(prompts, generator=torch.Generator().manual_seed(seed), **arguments).images


def test_pipelines_are_ordinary_ones(loaded):
    name, pipe = loaded
    assert type(pipe) is {"unet": diffusers.StableDiffusionPipeline, "mmdit": diffusers.FluxPipeline}[name]
    assert pipe("a red circle", num_inference_steps=1).images[0].size == (64, 64)


def test_same_seed_gives_the_same_picture(loaded):
    name, pipe = loaded
    first, again, other = (
        np.asarray(draw(name, pipe, ["a red circle"], seed, num_inference_steps=2)[0]) for seed in (0, 0, 1)
    )
    assert (first == again).all() and (first != other).any()


def test_save_and_load_round_trip(loaded, tmp_path):
    name, pipe = loaded
    pipe.save_pretrained(tmp_path)
    again = demo.load_folder(name, tmp_path)
    plain = type(pipe).from_pretrained(tmp_path)
    pictures = [np.asarray(draw(name, p, ["a blue star"], num_inference_steps=2)[0]) for p in (pipe, again, plain)]
    assert (pictures[0] == pictures[1]).all() and (pictures[0] == pictures[2]).all()


def test_half_precision_loads(loaded):
    pipe = demo.load(loaded[0], dtype=torch.bfloat16)
    assert pipe.text_encoder.dtype == torch.bfloat16 and pipe.vae.dtype == torch.bfloat16


def test_unknown_name_lists_the_models():
    with pytest.raises(ValueError, match="'unet', 'mmdit'"):
        demo.load("sdxl")


def test_autoencoder_reconstructs_scenes(loaded):
    _, pipe = loaded
    generator = random.Random(0)
    pictures = [np.asarray(demo.render(demo.sample_scene(generator))) for _ in range(20)]
    images = torch.from_numpy(np.stack(pictures)).movedim(-1, 1).float() / 127.5 - 1
    with torch.no_grad():
        again = pipe.vae.decode(pipe.vae.encode(images).latent_dist.mode()).sample
    error = ((again - images) / 2).square().mean()
    assert -10 * error.log10() > 30  # decibels


def test_pictures_show_what_the_prompt_says(loaded):
    name, pipe = loaded
    prompts = demo.prompts(3, 5, "single") + (demo.prompts(2, 5, "pair") if name == "unet" else [])
    right = [
        demo.matches(demo.parse(p), demo.read(image))
        for p, image in zip(prompts, draw(name, pipe, prompts), strict=True)
    ]
    verdicts = [verdict for result in right for verdict in result.values()]
    assert np.mean(verdicts) > 0.8, right


@pytest.mark.parametrize("name", demo.NAMES)
def test_resumed_training_equals_an_uninterrupted_one(name):
    settings = Settings(name, steps=4, scenes=12, batch=4, warmup=1, distil_from=0.5, reading=2)
    data = make_data(settings.scenes, settings.seed)
    whole, first, second = (Trainer(settings, data) for _ in range(3))
    losses = [whole.train_step() for _ in range(4)]
    for _ in range(2):
        first.train_step()
    second.load_state(first.state())
    for _ in range(2):
        second.train_step()
    assert second.losses == losses and np.isfinite(losses).all()
    for p, q in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", demo.NAMES)
def test_training_can_start_from_a_pipeline_folder(name):
    settings = Settings(name, steps=1, scenes=4, batch=2, reading=0, start=WEIGHTS / name)
    shipped, parts = demo.load(name), Trainer(settings, make_data(4, 0)).parts
    for part in parts:
        ours, theirs = parts[part].state_dict(), getattr(shipped, part).state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), part


def test_answers_say_what_the_caption_says():
    caption = demo.parse("a large striped red circle left of a blue star on a pink background")
    names, (first, second) = list(QUESTIONS), answers(caption)
    read = [
        {name: QUESTIONS[name][a - 1] for name, a in zip(names, given, strict=True) if a} for given in (first, second)
    ]
    both = {"background": "pink"}
    assert read[0] == {
        "shape": "circle",
        "colour": "red",
        "texture": "striped",
        "size": "large",
        "relation": "left",
        **both,
    }
    assert read[1] == {"shape": "star", "colour": "blue", "relation": "right", **both}
    assert answers(demo.parse("a red circle at the left"))[1] == [NO_OBJECT] * len(QUESTIONS)


def test_text_encoders_learn_to_read():
    """Twelve captions by heart, whatever way a new encoder starts: answers by chance are a quarter right."""
    parts, data = new_parts("mmdit"), make_data(4, 0)
    assert learn_to_read(parts, data, steps=60, seed=0, batch=12) > 0.9


def test_training_parts_have_no_effect_of_guidance_before_distillation():
    parts = new_parts("mmdit").eval()
    embed = parts["transformer"].time_text_embed
    inputs = torch.tensor([500.0]), torch.randn(1, 128)
    assert torch.equal(
        embed(inputs[0], torch.tensor([1000.0]), inputs[1]), embed(inputs[0], torch.tensor([4000.0]), inputs[1])
    )


def test_explicit_attention_equals_the_fused_kernel():
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    fused = torch.nn.functional.scaled_dot_product_attention
    with explicit_attention():
        assert torch.allclose(
            torch.nn.functional.scaled_dot_product_attention(query, key, value), fused(query, key, value)
        )
        causal = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert torch.allclose(causal, fused(query, query, query, is_causal=True))
    assert torch.nn.functional.scaled_dot_product_attention is fused


def test_orthogonal_keeps_singular_vectors():
    matrix = torch.randn(1, 20, 12)
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    values = u.T @ orthogonal(matrix)[0].float() @ v.T
    assert (values - torch.diag(values.diagonal())).abs().max() < 0.1
    assert (values.diagonal() - 1).abs().max() < 0.4
