"""Scenes of one or two objects, the captions that describe them, and how both are drawn at random.

A `Scene` is a description: every attribute may be `None`, which means "not said". A caption states exactly the
attributes that are set and `parse` inverts it. `sample_scene` gives complete ones, with positions and radii in pixels
of a 64x64 picture, so that they can be rendered.

    one object    a large striped red circle at the left on a white background, outlined
    two objects   a red circle left of a dotted blue square on a pink background"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

SIDE = 64  # pixels of a picture, both ways

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (225, 40, 40),
    "yellow": (250, 215, 40),
    "green": (40, 170, 70),
    "cyan": (50, 205, 220),
    "blue": (40, 70, 220),
    "purple": (160, 50, 200),
}
BACKGROUNDS = {"white": (250, 250, 250), "gray": (165, 165, 165), "sand": (225, 195, 150), "pink": (250, 190, 205)}
TEXTURES = ("plain", "striped", "dotted")
STYLES = ("flat", "outlined", "shaded")
SIZES = ("small", "large")
PLACES = {
    "left": "at the left",
    "right": "at the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "centre": "in the centre",
}
RELATIONS = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
MIRRORED = {"left": "right", "right": "left", "above": "below", "below": "above"}

HELD_OUT_OF = 8  # one caption content in eight is kept out of the training set


@dataclass(frozen=True)
class Object:
    """One coloured shape. `x`, `y` (centre) and `radius` are in pixels; they are never part of a caption."""

    shape: str
    colour: str
    texture: str | None = None
    size: str | None = None
    place: str | None = None
    x: float | None = None
    y: float | None = None
    radius: float | None = None

    def circle(self) -> tuple[float, float, float]:
        """(x, y, radius) of an object that has a place in the picture."""
        if self.x is None or self.y is None or self.radius is None:
            raise ValueError(f"{self} has no position; sample_scene() gives complete scenes, a caption alone does not")
        return self.x, self.y, self.radius

    def phrase(self) -> str:
        """The noun phrase of the caption, without the article."""
        return " ".join(word for word in (self.size, self.texture, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Scene:
    """One or two objects on a background. `relation` says where the first object lies as seen from the second."""

    objects: tuple[Object, ...]
    relation: str | None = None
    background: str | None = None
    style: str | None = None

    def caption(self) -> str:
        """The sentence that states every attribute that is not None."""
        text = f"a {self.objects[0].phrase()}"
        if self.objects[0].place:
            text += f" {PLACES[self.objects[0].place]}"
        if len(self.objects) == 2:
            if self.relation is None:
                raise ValueError("a scene of two objects needs a relation: " + ", ".join(RELATIONS))
            text += f" {RELATIONS[self.relation]} a {self.objects[1].phrase()}"
        if self.background:
            text += f" on a {self.background} background"
        if self.style:
            text += f", {self.style}"
        return text


def parse(caption: str) -> Scene:
    """The scene a caption states, None where it says nothing. ValueError on a word outside the grammar."""
    text = " ".join(caption.lower().replace(",", " , ").split())
    style = background = relation = None
    if " , " in text:
        text, style = text.rsplit(" , ", 1)
        _known(style, STYLES, caption)
    if " on a " in text:
        text, ending = text.rsplit(" on a ", 1)
        background = ending.removesuffix(" background")
        _known(background, BACKGROUNDS, caption)
    parts: list[str] = [text]
    for name, words in RELATIONS.items():
        if f" {words} a " in text:
            parts = text.split(f" {words} a ", 1)
            relation = name
            break
    return Scene(tuple(_parse_object(part, caption) for part in parts), relation, background, style)


def _parse_object(text: str, caption: str) -> Object:
    place = None
    for name, ending in PLACES.items():
        if text.endswith(f" {ending}"):
            place, text = name, text.removesuffix(f" {ending}")
    words = text.removeprefix("a ").split()
    found: dict[str, str] = {}
    groups = {"size": SIZES, "texture": TEXTURES, "colour": tuple(COLOURS), "shape": SHAPES}
    for word in words:
        group = next((g for g, members in groups.items() if word in members and g not in found), None)
        if group is None:
            _known(word, [m for members in groups.values() for m in members], caption)
            raise ValueError(f"the caption {caption!r} says {word!r} twice in one object")
        found[group] = word
    if "shape" not in found or "colour" not in found:
        raise ValueError(f"an object needs a colour and a shape; {text!r} in {caption!r} has {found}")
    return Object(found["shape"], found["colour"], found.get("texture"), found.get("size"), place)


def _known(word: str, members, caption: str) -> None:
    if word not in members:
        raise ValueError(f"unknown word {word!r} in the caption {caption!r}; known here: {', '.join(members)}")


def content_key(scene: Scene) -> str:
    """What decides the split.

    Two objects: colours, shapes and relation, the same for "A left of B" and "B right of A". One object: everything the
    caption states."""
    if len(scene.objects) == 2:
        first, second = scene.objects
        relation = scene.relation or ""
        if relation in ("right", "below"):
            first, second, relation = second, first, MIRRORED[relation]
        return f"{first.colour} {first.shape} {relation} {second.colour} {second.shape}"
    return scene.caption()


def is_held_out(scene: Scene) -> bool:
    """True when captions with this content are never trained on (a stable hash, the same on every machine)."""
    return int.from_bytes(hashlib.sha256(content_key(scene).encode()).digest()[:4], "big") % HELD_OUT_OF == 0


def sample_scene(rng: random.Random, kind: str = "any") -> Scene:
    """A complete scene: `kind` is "single", "pair" or "any"."""
    if kind not in ("single", "pair", "any"):
        raise ValueError(f"unknown kind {kind!r}; use 'single', 'pair' or 'any'")
    if kind == "any":
        kind = "pair" if rng.random() < 0.55 else "single"
    background, style = rng.choice(tuple(BACKGROUNDS)), rng.choice(STYLES)
    if kind == "single":
        return Scene((_sample_single(rng),), None, background, style)
    shapes, colours = rng.sample(SHAPES, 2), rng.sample(tuple(COLOURS), 2)
    relation = rng.choice(tuple(RELATIONS))
    places = _sample_pair_layout(rng, relation)
    objects = tuple(
        Object(shape, colour, _sample_texture(rng), None, None, x, y, radius)
        for shape, colour, (x, y, radius) in zip(shapes, colours, places, strict=True)
    )
    return Scene(objects, relation, background, style)


def _sample_texture(rng: random.Random) -> str:
    return rng.choices(TEXTURES, (0.5, 0.25, 0.25))[0]


def _sample_single(rng: random.Random) -> Object:
    size, place = rng.choice(SIZES), rng.choice(tuple(PLACES))
    radius = rng.uniform(9.0, 10.5) if size == "small" else rng.uniform(14.5, 16.0)
    reach = 1.15 * radius + 2.5  # the farthest any shape of this radius extends, outline included
    middle = SIDE / 2
    if place == "centre":
        x, y = middle + rng.uniform(-3, 3), middle + rng.uniform(-3, 3)
    else:
        along = reach + rng.uniform(0, 4 if size == "small" else 2)
        across = middle + rng.uniform(-6, 6) * (1 if size == "small" else 0.7)
        far = SIDE - along
        x, y = {"left": (along, across), "right": (far, across), "top": (across, along), "bottom": (across, far)}[place]
    shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    return Object(shape, colour, _sample_texture(rng), size, place, x, y, radius)


def _sample_pair_layout(rng: random.Random, relation: str) -> list[tuple[float, float, float]]:
    """(x, y, radius) of two medium objects: a clear gap along the relation's axis, up to 8 pixels off it."""
    radii = [rng.uniform(9.8, 10.9) for _ in range(2)]
    reaches = [1.15 * radius + 2.5 for radius in radii]
    while True:
        near = reaches[0] + rng.uniform(0, 7)
        far = SIDE - reaches[1] - rng.uniform(0, 7)
        if far - near >= sum(reaches):
            break
    across = [SIDE / 2 + rng.uniform(-8, 8) for _ in range(2)]
    along = [near, far] if relation in ("left", "above") else [SIDE - near, SIDE - far]
    horizontal = relation in ("left", "right")
    return [(a, c, r) if horizontal else (c, a, r) for a, c, r in zip(along, across, radii, strict=True)]


def sample_caption(rng: random.Random, scene: Scene, state_background: bool = False) -> Scene:
    """The caption scene of a complete scene: some attributes are left unsaid.

    "plain" is the only texture that may be omitted, so an unsaid texture means a plain object."""

    def said(value: str | None, chance: float) -> str | None:
        return value if rng.random() < chance else None

    objects = tuple(
        replace(
            item,
            texture=said(item.texture, 0.35) if item.texture == "plain" else item.texture,
            size=said(item.size, 0.75),
            place=said(item.place, 0.75),
            x=None,
            y=None,
            radius=None,
        )
        for item in scene.objects
    )
    background = scene.background if state_background else said(scene.background, 0.8)
    return replace(scene, objects=objects, background=background, style=said(scene.style, 0.75))


def sample_pair(rng: random.Random, kind: str = "any", held_out: bool = False) -> tuple[Scene, Scene]:
    """(complete scene, caption scene) from the training set, or from the held-out one."""
    while True:
        scene = sample_scene(rng, kind)
        caption = sample_caption(rng, scene, state_background=held_out)
        if is_held_out(caption) == held_out:
            return scene, caption


def prompts(n: int, seed: int = 0, kind: str = "any", held_out: bool = True) -> list[str]:
    """`n` different captions; `kind` is "single", "pair" or "any".

    Held-out ones were never trained on and always name the background."""
    rng = random.Random(f"{seed}-{kind}-{held_out}")
    found: dict[str, None] = {}
    while len(found) < n:
        found[sample_pair(rng, kind, held_out)[1].caption()] = None
    return list(found)
