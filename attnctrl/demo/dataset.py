"""The training set of the demo models: rendered scenes, where their objects are, and token ids of their captions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from .autoencoder import PatchAutoencoder
from .reading import answers
from .render import object_mask, render_array
from .scene import SHAPES, SIDE, Scene, is_held_out, parse, sample_caption, sample_scene
from .tokenizers import LENGTH, clip_tokenizer, t5_tokenizer

CAPTIONS = 3  # captions of each training scene, one picked at random each time it is seen
GRID = 16  # latent pixels, both ways, of a patch each


def make_data(scenes: int, seed: int) -> dict[str, Tensor]:
    """Pictures uint8 (n, 3, 64, 64), object masks (n, 1, 16, 16), both tokenizers' ids (n, captions, 24), the answers
    to `reading.QUESTIONS` (n, captions, 2, questions) and T5's ids of the words that name a shape."""
    rng = random.Random(seed)
    images = np.empty((scenes, SIDE, SIDE, 3), np.uint8)
    masks = np.empty((scenes, GRID, GRID), np.float32)
    captions: list[str] = []
    for i in range(scenes):
        scene, stated = _training_scene(rng)
        images[i] = render_array(scene).round()
        mask = np.any([object_mask(item, scene.style) for item in scene.objects], axis=0)
        masks[i] = mask.reshape(GRID, SIDE // GRID, GRID, SIDE // GRID).mean((1, 3))
        captions += stated
    return {
        "images": torch.from_numpy(images).permute(0, 3, 1, 2),
        "masks": torch.from_numpy(masks)[:, None],
        "clip": tokenize(clip_tokenizer(), captions).reshape(scenes, CAPTIONS, LENGTH),
        "t5": tokenize(t5_tokenizer(), captions).reshape(scenes, CAPTIONS, LENGTH),
        "answers": torch.tensor([answers(parse(caption)) for caption in captions]).unflatten(0, (scenes, CAPTIONS)),
        "nouns": torch.tensor(t5_tokenizer().convert_tokens_to_ids(["▁" + shape for shape in SHAPES])),
    }


def _training_scene(rng: random.Random) -> tuple[Scene, list[str]]:
    """A scene and CAPTIONS captions of it, none of them held out."""
    while True:
        scene = sample_scene(rng)
        stated = [s for s in (sample_caption(rng, scene) for _ in range(4 * CAPTIONS)) if not is_held_out(s)]
        if len(stated) >= CAPTIONS:
            return scene, [s.caption() for s in stated[:CAPTIONS]]


def tokenize(tokenizer: Any, captions: list[str]) -> Tensor:
    """Token ids (n, 24), padded as the pipelines pad them."""
    return tokenizer(captions, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt").input_ids


@torch.no_grad()
def as_latents(vae: PatchAutoencoder, images: Tensor) -> Tensor:
    """Latents (n, 16, 16, 16) of uint8 pictures (n, 3, 64, 64), one channel a component whatever the fold."""
    parts = [vae.encode(part.float() / 127.5 - 1).latent_dist.mode() for part in images.split(1000)]
    return pixel_unshuffle(torch.cat(parts), vae.fold)
