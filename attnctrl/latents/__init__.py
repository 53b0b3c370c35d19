"""Methods that act on the latents: between denoiser calls and scheduler steps."""

from .edit_friendly import EditFriendly, NoiseMaps
from .flow_edit import FlowEdit
from .images import encode
from .local_blend import LocalBlend
from .null_text import NullText, NullTexts
from .prompt_guidance import PromptGuidance
from .rf_inversion import RFInversion
from .shared_noise import SharedNoise
from .trajectory import PinSource, Trajectory

__all__ = [
    "EditFriendly",
    "FlowEdit",
    "LocalBlend",
    "NoiseMaps",
    "NullText",
    "NullTexts",
    "PinSource",
    "PromptGuidance",
    "RFInversion",
    "SharedNoise",
    "Trajectory",
    "encode",
]
