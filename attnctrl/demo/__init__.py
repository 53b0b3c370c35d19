"""Two small trained text-to-image models that ship with the package, and the world of pictures they were trained on.

from attnctrl import demo
pipe = demo.load("unet")                                   # a StableDiffusionPipeline; "mmdit" is a FluxPipeline
image = pipe("a red circle left of a blue square", **demo.defaults("unet")).images[0]
demo.read(image)                                           # Scene((Object("circle", "red", ...), ...), "left", ...)
"""

from .autoencoder import PatchAutoencoder
from .models import NAMES, defaults, load, load_folder
from .reader import Reading, matches, read, read_details
from .render import object_mask, render
from .scene import (
    BACKGROUNDS,
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    STYLES,
    TEXTURES,
    Object,
    Scene,
    is_held_out,
    parse,
    prompts,
    sample_pair,
    sample_scene,
)
from .tokenizers import ShortT5Tokenizer

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "NAMES",
    "PLACES",
    "RELATIONS",
    "SHAPES",
    "SIZES",
    "STYLES",
    "TEXTURES",
    "Object",
    "PatchAutoencoder",
    "Reading",
    "Scene",
    "ShortT5Tokenizer",
    "defaults",
    "is_held_out",
    "load",
    "load_folder",
    "matches",
    "object_mask",
    "parse",
    "prompts",
    "read",
    "read_details",
    "render",
    "sample_pair",
    "sample_scene",
]
