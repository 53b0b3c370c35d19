"""Text encoders learn to read before the denoiser learns to draw.

Trained on pictures alone, an encoder is slow to learn which attribute belongs to which of two objects. Here it first
answers questions about its captions, as CLIP and T5 come to a denoiser already knowing language: at the word that
names an object, T5's output must tell that object's attributes and where the other one lies; CLIP's pooled output
must tell those of both. It takes a minute or two on one core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .scene import BACKGROUNDS, COLOURS, MIRRORED, PLACES, RELATIONS, SHAPES, SIZES, STYLES, TEXTURES, Scene

QUESTIONS: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": tuple(COLOURS),
    "texture": TEXTURES,
    "size": SIZES,
    "place": tuple(PLACES),
    "relation": tuple(RELATIONS),
    "background": tuple(BACKGROUNDS),
    "style": STYLES,
}
CHOICES = [len(options) + 1 for options in QUESTIONS.values()]  # answer 0: the caption does not say
NO_OBJECT = -100  # what cross_entropy ignores


def answers(caption: Scene) -> list[list[int]]:
    """Answers (2 objects, questions) of a caption: 0 for "not said", NO_OBJECT for an object that is not there."""
    found = []
    for item, relation in zip(caption.objects, (caption.relation, MIRRORED.get(caption.relation or "")), strict=False):
        said = {**vars(item), "relation": relation, "background": caption.background, "style": caption.style}
        found.append([1 + options.index(said[name]) if said[name] else 0 for name, options in QUESTIONS.items()])
    return found + [[NO_OBJECT] * len(QUESTIONS)] * (2 - len(found))


def learn_to_read(parts: nn.ModuleDict, data: dict[str, Tensor], steps: int, seed: int, batch: int = 128) -> float:
    """Train the text encoders of `parts` in place on the captions of `make_data`.

    Returns the share of the last tenth's questions that were answered right, the average over the encoders."""
    torch.manual_seed(seed)
    ids = {key: data[key].flatten(0, 1) for key in ("clip", "t5")}
    truth = data["answers"].flatten(0, 1)  # (captions, 2, questions)
    encoder: Any = parts["text_encoder"]
    width = encoder.config.hidden_size
    readers: dict[str, Any] = {"clip": nn.Linear(width, 2 * sum(CHOICES))}
    if "text_encoder_2" in parts:
        readers["t5"] = nn.Linear(width, sum(CHOICES))
    trained = [p for name in parts if name.startswith("text_encoder") for p in parts[name].parameters()]
    trained += [p for reader in readers.values() for p in reader.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=0.002, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=max(steps, 1))
    right: list[float] = []
    for _ in range(steps):
        picked = torch.randint(len(truth), (batch,))
        loss, share = torch.zeros(()), 0.0
        for key, reader in readers.items():
            with torch.autocast("cpu", torch.bfloat16):
                features = _features(parts, key, ids[key][picked], data["nouns"])
            logits = reader(features.float()).reshape(batch, 2, sum(CHOICES)).split(CHOICES, -1)
            known = truth[picked] != NO_OBJECT
            for i, choice in enumerate(logits):
                loss = loss + nn.functional.cross_entropy(choice.flatten(0, 1), truth[picked][..., i].flatten())
            best = torch.stack([choice.argmax(-1) for choice in logits], -1)
            share += (best == truth[picked])[known].float().mean().item() / len(readers)
        right.append(share)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    last = right[-max(len(right) // 10, 1) :]
    return sum(last) / max(len(last), 1)


def _features(parts: nn.ModuleDict, key: str, ids: Tensor, nouns: Tensor) -> Tensor:
    """What the questions are asked of: CLIP's pooled output (b, width); T5's two nouns (b, 2, width), where a caption
    has one object its noun twice."""
    if key == "clip":
        return parts["text_encoder"](ids).pooler_output
    is_noun = torch.isin(ids, nouns).float()
    first, last = is_noun.argmax(1), ids.shape[1] - 1 - is_noun.flip(1).argmax(1)
    states = parts["text_encoder_2"](ids)[0]
    return states[torch.arange(len(ids))[:, None], torch.stack([first, last], 1)]
