"""Draw a complete scene: four times too large with Pillow, then averaged down to 64x64 (so edges are smooth)."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from .scene import BACKGROUNDS, COLOURS, SIDE, Object, Scene

SCALE = 4  # drawing pixels per picture pixel
OUTLINE = (1.0, 2.5)  # pixels inside and outside the edge
OUTLINE_COLOUR = (25, 25, 30)
SHADE_BOTTOM = 0.55  # brightness of the lowest row in the "shaded" style; the highest has 1
TEXTURE_SHADE = 0.5  # brightness of stripes and dots
PERIOD = 8.0  # pixels between stripes or dots, counted from the object's centre
DOT_RADIUS = 2.5


def outline_points(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """The polygon of a shape. Radii are scaled so that shapes of one radius look equally large."""
    if shape == "circle":
        return _ring([radius] * 48, x, y)
    if shape == "square":
        half = 0.88 * radius
        return [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
    if shape == "triangle":
        return _ring([1.15 * radius] * 3, x, y + 0.2 * radius)
    if shape == "star":
        return _ring([1.15 * radius, 0.52 * radius] * 5, x, y)
    if shape == "cross":
        long, short = 1.05 * radius, 0.36 * radius
        corners = [(-short, -long), (short, -long), (short, -short), (long, -short), (long, short), (short, short)]
        corners += [(short, long), (-short, long), (-short, short), (-long, short), (-long, -short), (-short, -short)]
        return [(x + dx, y + dy) for dx, dy in corners]
    raise ValueError(f"unknown shape {shape!r}")


def _ring(radii: list[float], x: float, y: float) -> list[tuple[float, float]]:
    angles = [2 * math.pi * i / len(radii) for i in range(len(radii))]
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]


def _fine_mask(item: Object) -> np.ndarray:
    """Boolean (256, 256) mask of the shape on the fine grid."""
    canvas = Image.new("1", (SIDE * SCALE, SIDE * SCALE))
    points = [(px * SCALE, py * SCALE) for px, py in outline_points(item.shape, *item.circle())]
    ImageDraw.Draw(canvas).polygon(points, fill=1)
    return np.asarray(canvas)


def _texture_mask(item: Object) -> np.ndarray:
    """Boolean (256, 256): where stripes or dots would be, over the whole picture."""
    x, y, _ = item.circle()
    coordinates = (np.arange(SIDE * SCALE) + 0.5) / SCALE
    u = (coordinates - x + PERIOD / 2) % PERIOD - PERIOD / 2
    v = (coordinates - y + PERIOD / 2) % PERIOD - PERIOD / 2
    if item.texture == "striped":
        return np.broadcast_to(np.abs(u) < PERIOD / 4, (SIDE * SCALE, SIDE * SCALE))
    if item.texture == "dotted":
        return u[None, :] ** 2 + v[:, None] ** 2 < DOT_RADIUS**2
    return np.zeros((SIDE * SCALE, SIDE * SCALE), bool)


def object_mask(item: Object, style: str | None = None) -> np.ndarray:
    """Boolean (64, 64): pixels at least half covered by the object, its outline included."""
    return _coverage(_fine_mask(item) | (_edge(item) if style == "outlined" else False)) > 0.5


def _edge(item: Object) -> np.ndarray:
    canvas = Image.new("1", (SIDE * SCALE, SIDE * SCALE))
    draw = ImageDraw.Draw(canvas)
    points = [(px * SCALE, py * SCALE) for px, py in outline_points(item.shape, *item.circle())]
    inside, outside = (round(2 * side * SCALE) for side in OUTLINE)
    draw.line([*points, *points[:2]], fill=1, width=outside, joint="curve")
    draw.polygon(points, fill=0)
    draw.line([*points, *points[:2]], fill=1, width=inside, joint="curve")
    return np.asarray(canvas)


def _coverage(fine: np.ndarray) -> np.ndarray:
    return fine.reshape(SIDE, SCALE, SIDE, SCALE, *fine.shape[2:]).mean((1, 3))


def render_array(scene: Scene) -> np.ndarray:
    """float32 (64, 64, 3) in 0..255. Every attribute that is drawn must be set (see `sample_scene`)."""
    if scene.background is None or scene.style is None:
        raise ValueError("only a complete scene can be rendered; sample_scene() gives one, a caption alone does not")
    fine = np.empty((SIDE * SCALE, SIDE * SCALE, 3), np.float32)
    fine[:] = BACKGROUNDS[scene.background]
    for item in scene.objects:
        mask = _fine_mask(item)
        colour = np.array(COLOURS[item.colour], np.float32)
        fine[mask] = colour
        fine[mask & _texture_mask(item)] = TEXTURE_SHADE * colour
        if scene.style == "outlined":
            fine[_edge(item)] = OUTLINE_COLOUR
    picture = _coverage(fine)
    if scene.style == "shaded":
        picture *= np.linspace(1.0, SHADE_BOTTOM, SIDE, dtype=np.float32)[:, None, None]
    return picture


def render(scene: Scene) -> Image.Image:
    """The 64x64 RGB picture of a complete scene."""
    return Image.fromarray(render_array(scene).round().clip(0, 255).astype(np.uint8))
