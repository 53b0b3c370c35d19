"""Methods that act on the latents: between denoiser calls and scheduler steps."""

from .local_blend import LocalBlend
from .shared_noise import SharedNoise

__all__ = ["LocalBlend", "SharedNoise"]
