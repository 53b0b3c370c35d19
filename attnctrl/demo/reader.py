"""Read a picture back into a scene: image analysis that tolerates the noise and crooked shapes of generated pictures.

1. Strongly coloured pixels are grouped by hue into connected regions; each large region is an object.
2. Shape, centre and radius: the rendered shape with the largest intersection over union with the region, over all
   shapes, radii and positions (by Fourier transform). Templates are the regions that step 1 finds in rendered pictures;
   stars and crosses are told from the rest by the part of their convex hull that they fill.
3. Style: a dark rim means outlined, a background that darkens downwards means shaded.
4. Texture: large objects by the variance of the brightness inside; where that is not clear, the object is rendered with
   each texture at its place, and the nearest one counts, if it is clearly nearer than plain.
"""

from __future__ import annotations

import colorsys
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image

from .render import SHADE_BOTTOM, object_mask, render_array
from .scene import BACKGROUNDS, COLOURS, SHAPES, SIDE, TEXTURES, Object, Scene

MIN_AREA = 40  # pixels of the smallest object
CLEARER = 0.8  # a texture must explain an object this much better than no texture does
CONCAVE, CONVEX = 0.815, 0.87  # parts of the convex hull: rendered stars and crosses fill less than 0.81, the rest more
ENOUGH = 80  # pixels well inside an object, to see its texture by their variance
EVEN, UNEVEN = 0.006, (0.02, 0.09)  # variances of plain, of patterned insides; rendered: to 0.001, 0.025 to 0.07
RADII = np.arange(7.0, 18.01, 0.5)
_HUES = {name: colorsys.rgb_to_hsv(*(c / 255 for c in rgb))[0] for name, rgb in COLOURS.items()}


@dataclass(frozen=True)
class Reading:
    """What was seen: the scene, and for each object a mask (64, 64) and how well the shape fits (0..1)."""

    scene: Scene
    masks: tuple[np.ndarray, ...]
    fits: tuple[float, ...]


def read(image: Image.Image | np.ndarray) -> Scene:
    """The scene in a picture, with every attribute that can be seen; without objects if there is none."""
    return read_details(image).scene


def read_details(image: Image.Image | np.ndarray) -> Reading:
    """Like `read`, with the mask of each object, its outline included. Other sizes are resized to 64x64."""
    pixels = _pixels(image)
    regions = _regions(pixels)
    covered = np.any([region for region, _ in regions], axis=0) if regions else np.zeros((SIDE, SIDE), bool)
    near = _grow(covered, 4)
    background, style, level = _background(pixels, near)
    dark = (pixels.max(-1) < 0.55 * level[:, None]) & (np.ptp(pixels, -1) < 35) & ~covered
    if regions and np.mean([_dark_rim(dark, region) for region, _ in regions]) > 0.45:
        style = "outlined"
    found = [_fit(region, colour, style) for region, colour in regions]
    scene = Scene(tuple(item for item, _ in found), None, background, style)
    scene = replace(scene, objects=tuple(_texture(pixels, item, scene) for item in scene.objects))
    masks = tuple(
        (_grow(region, 2 if style == "outlined" else 1) | object_mask(item, style)) & ~_others(regions, i)
        for i, ((region, _), (item, _)) in enumerate(zip(regions, found, strict=True))
    )
    if len(scene.objects) == 1:
        scene = replace(scene, objects=(_place(scene.objects[0]),))
    if len(scene.objects) == 2:
        scene = replace(scene, relation=_relation(*scene.objects))
    return Reading(scene, masks, tuple(fit for _, fit in found))


def matches(caption: Scene, seen: Scene) -> dict[str, bool]:
    """For every attribute the caption states: was it seen?

    Keys are "count", "background", "style", "relation" and, for each object, "shape", "colour", "texture", "size",
    "place" (with " 2" for the second). An unsaid texture counts as plain. Objects are paired so that most agree."""
    result = {"count": len(seen.objects) == len(caption.objects)}
    for name in ("background", "style"):
        if getattr(caption, name) is not None:
            result[name] = getattr(caption, name) == getattr(seen, name)
    nothing = Object("none", "none")
    best: dict[str, bool] = {}
    for order in ((0, 1), (1, 0)):
        picked = [seen.objects[i] if i < len(seen.objects) else nothing for i in order]
        trial: dict[str, bool] = {}
        for i, (said, saw) in enumerate(zip(caption.objects, picked, strict=False)):
            for name in ("shape", "colour", "texture", "size", "place"):
                value = getattr(said, name) or ("plain" if name == "texture" else None)
                if value is not None:
                    trial[name + " 2" * i] = value == getattr(saw, name)
        if caption.relation is not None:
            trial["relation"] = nothing not in picked and caption.relation == _relation(*picked)
        if sum(trial.values()) > sum(best.values()) or not best:
            best = trial
    return result | best


def _pixels(image: Image.Image | np.ndarray) -> np.ndarray:
    if isinstance(image, np.ndarray):
        values = image * 255 if np.issubdtype(image.dtype, np.floating) and image.max() <= 1.5 else image
        image = Image.fromarray(np.clip(np.round(values), 0, 255).astype(np.uint8))
    image = image.convert("RGB")
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(image, np.float32)


def _regions(pixels: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """(mask, colour) of each object, the largest first."""
    high, low = pixels.max(-1), pixels.min(-1)
    chroma = high - low
    coloured = (chroma > 0.5 * high) & (chroma > 28)
    r, g, b = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    safe = np.maximum(chroma, 1e-3)
    hue = np.where(high == r, ((g - b) / safe) % 6, np.where(high == g, (b - r) / safe + 2, (r - g) / safe + 4)) / 6
    distance = np.stack([np.abs((hue - centre + 0.5) % 1 - 0.5) for centre in _HUES.values()])
    nearest = distance.argmin(0)
    found = []
    for i, colour in enumerate(COLOURS):
        for region in _components(coloured & (nearest == i)):
            found.append((region, colour))
    found = [(_close(region), colour) for region, colour in found if region.sum() >= MIN_AREA]
    found.sort(key=lambda pair: -pair[0].sum())
    return [pair for pair in found if pair[0].sum() >= 0.2 * found[0][0].sum()]


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """Connected regions (8 neighbours) of a boolean mask, by spreading the largest label."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        spread = np.where(mask, _neighbours(labels).max(0), 0)
        if (spread == labels).all():
            break
        labels = spread
    return [labels == label for label in np.unique(labels) if label]


def _neighbours(array: np.ndarray) -> np.ndarray:
    """(9, h, w): the array shifted by one pixel each way, edges repeated."""
    padded = np.pad(array, 1, mode="edge")
    h, w = array.shape
    return np.stack([padded[i : i + h, j : j + w] for i in range(3) for j in range(3)])


def _grow(mask: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        mask = np.asarray(_neighbours(mask).any(0))
    return mask


def _close(mask: np.ndarray) -> np.ndarray:
    """Fill holes and one-pixel gaps."""
    closed = ~_grow(~_grow(mask, 1), 1)
    outside = np.zeros(mask.shape, bool)
    for part in _components(~closed):
        if part[0].any() or part[-1].any() or part[:, 0].any() or part[:, -1].any():
            outside = outside | part
    return ~outside


def _others(regions: list[tuple[np.ndarray, str]], i: int) -> np.ndarray:
    rest = [region for j, (region, _) in enumerate(regions) if j != i]
    return np.any(rest, axis=0) if rest else np.zeros((SIDE, SIDE), bool)


def _background(pixels: np.ndarray, near: np.ndarray) -> tuple[str, str, np.ndarray]:
    """(background, "flat" or "shaded", brightness of each row): a line through the rows' colours beside objects."""
    rows = [y for y in range(SIDE) if (~near[y]).sum() >= 6]
    if len(rows) < 8:
        near, rows = np.zeros_like(near), list(range(SIDE))
    colours = np.array([np.median(pixels[y][~near[y]], axis=0) for y in rows])
    slope, start = np.polyfit(rows, colours.mean(1), 1)
    fall = (start + slope * (SIDE - 1)) / max(start, 1)
    shaded = fall < (1 + SHADE_BOTTOM) / 2
    gain = np.linspace(1.0, SHADE_BOTTOM, SIDE)[rows] if shaded else np.ones(len(rows))
    colour = np.median(colours / gain[:, None], axis=0)
    nearest = min(BACKGROUNDS, key=lambda name: np.square(colour - BACKGROUNDS[name]).sum())
    level = colour.max() * (np.linspace(1.0, SHADE_BOTTOM, SIDE) if shaded else np.ones(SIDE))
    return nearest, "shaded" if shaded else "flat", level


def _dark_rim(dark: np.ndarray, region: np.ndarray) -> float:
    """The part of the rim around a region that has a dark pixel close by."""
    rim = _grow(region, 1) & ~region
    return float(_grow(dark, 1)[rim].mean()) if rim.any() else 0.0


@lru_cache(maxsize=2)
def _templates(style: str) -> tuple[list[tuple[str, float]], np.ndarray, np.ndarray]:
    """Keys (shape, radius), conjugate transforms (k, 64, 33) and areas (k) of the regions of shapes at (32, 32)."""
    keys = [(shape, float(radius)) for shape in SHAPES for radius in RADII]
    stack = []
    for shape, radius in keys:
        item = Object(shape, "red", "plain", x=SIDE / 2, y=SIDE / 2, radius=radius)
        stack.append(_regions(render_array(Scene((item,), None, "white", style)))[0][0].astype(np.float32))
    return keys, np.conj(np.fft.rfft2(np.stack(stack))), np.sum(stack, (1, 2))


def _fit(region: np.ndarray, colour: str, style: str) -> tuple[Object, float]:
    """The object whose rendered shape overlaps the region best, and the intersection over union.

    A region that fills its convex hull cannot be a star or a cross, and one that leaves gaps must be."""
    keys, transforms, areas = _templates("outlined" if style == "outlined" else "flat")
    overlap = np.fft.irfft2(np.fft.rfft2(region.astype(np.float32)) * transforms, s=(SIDE, SIDE))
    union = areas[:, None, None] + region.sum() - overlap
    score = overlap / union
    filled = region.sum() / _hull_area(region)
    concave = np.array([shape in ("star", "cross") for shape, _ in keys])
    if filled < CONCAVE:
        score[~concave] = 0
    elif filled > CONVEX:
        score[concave] = 0
    k, dy, dx = np.unravel_index(score.argmax(), score.shape)
    x, y = (dx + SIDE / 2) % SIDE, (dy + SIDE / 2) % SIDE
    shape, radius = keys[k]
    return Object(shape, colour, None, None, None, float(x), float(y), radius), float(score[k, dy, dx])


def _hull_area(mask: np.ndarray) -> float:
    """Area of the convex hull of a mask's pixels (as unit squares)."""
    corners = set()
    for y in np.flatnonzero(mask.any(1)):
        columns = np.flatnonzero(mask[y])
        corners |= {(int(x), int(y) + d) for x in (columns[0], columns[-1] + 1) for d in (0, 1)}
    points = sorted(corners)
    x, y = np.array(_half_hull(points)[:-1] + _half_hull(points[::-1])[:-1], float).T
    return float(abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2)


def _half_hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The corners of one side of the convex hull of sorted points."""
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1:
            (ax, ay), (bx, by) = hull[-2:]
            if (bx - ax) * (y - ay) > (by - ay) * (x - ax):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _texture(pixels: np.ndarray, item: Object, scene: Scene) -> Object:
    """The object with the texture whose rendering is nearest to the picture inside the shape, over small shifts."""
    x, y, radius = item.circle()
    inside = object_mask(replace(item, radius=0.92 * radius))
    seen = pixels[inside].max(-1)
    seen = seen / max(np.percentile(seen, 90), 1)

    def error(texture: str) -> float:
        """Of the best of nine places: all textures may shift, else one that may not would pay for a rim that is off."""
        errors = []
        for dx, dy in itertools.product((-1.0, 0.0, 1.0), repeat=2):
            trial = replace(item, texture=texture, x=x + dx, y=y + dy)
            drawn = render_array(replace(scene, objects=(trial,)))[inside].max(-1)
            errors.append(float(np.square(drawn / np.percentile(drawn, 90) - seen).mean()))
        return min(errors)

    inner = _pattern(pixels, item, scene)
    if inner is not None:
        return replace(item, texture=inner)
    plain, least, best = error("plain"), *min((error(texture), texture) for texture in TEXTURES if texture != "plain")
    return replace(item, texture=best if least < CLEARER * plain else "plain")


def _pattern(pixels: np.ndarray, item: Object, scene: Scene) -> str | None:
    """The texture by the brightness well inside a large object, wherever its stripes or dots lie and however wide they
    are: striped where most of the variance is between columns.  None where too little is seen, or nothing clear."""
    inside = object_mask(item)
    for _ in range(3 if scene.style == "outlined" else 2):
        inside = np.asarray(_neighbours(inside).all(0))
    rows, columns = np.nonzero(inside)
    if len(rows) < ENOUGH:
        return None
    light = pixels[inside].max(-1)
    light = light / max(np.percentile(light, 90), 1)
    slope = np.stack([np.ones(len(rows)), rows], 1)  # shaded pictures darken downwards
    light = light - slope @ np.linalg.lstsq(slope, light, rcond=None)[0]
    variance = light.var()
    if not UNEVEN[0] < variance < UNEVEN[1]:
        return "plain" if variance < EVEN else None
    count = np.bincount(columns, minlength=SIDE)
    means = np.bincount(columns, light, minlength=SIDE) / np.maximum(count, 1)
    between = (count * means**2).sum() / count.sum() / variance
    return "striped" if between > 0.55 else "dotted" if between < 0.45 else None


def _place(item: Object) -> Object:
    """A single object with its size and place."""
    x, y, radius = item.circle()
    dx, dy = x - SIDE / 2, y - SIDE / 2
    if max(abs(dx), abs(dy)) < 6:
        place = "centre"
    elif abs(dx) > abs(dy):
        place = "left" if dx < 0 else "right"
    else:
        place = "top" if dy < 0 else "bottom"
    return replace(item, size="large" if radius > 12.5 else "small", place=place)


def _relation(first: Object, second: Object) -> str:
    """Where the first object lies as seen from the second."""
    (x, y, _), (other_x, other_y, _) = first.circle(), second.circle()
    dx, dy = x - other_x, y - other_y
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"
