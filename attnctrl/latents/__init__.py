"""Methods that act on the latents: between denoiser calls and scheduler steps."""

from .adain import ColorCalibration, LatentAdaIN, StartAdaIN
from .edit_friendly import EditFriendly, NoiseMaps
from .flow_edit import FlowEdit
from .images import encode
from .invert import Inversion, invert
from .local_blend import LocalBlend
from .negative_prompt import NegativePrompt
from .null_text import NullText, NullTexts
from .prompt_guidance import PromptGuidance
from .rf_inversion import RFInversion
from .schedulers import Solver
from .shared_noise import SharedNoise
from .start import StartFrom
from .trajectory import PinSource, Trajectory

__all__ = [
    "ColorCalibration",
    "EditFriendly",
    "FlowEdit",
    "Inversion",
    "LatentAdaIN",
    "LocalBlend",
    "NegativePrompt",
    "NoiseMaps",
    "NullText",
    "NullTexts",
    "PinSource",
    "PromptGuidance",
    "RFInversion",
    "SharedNoise",
    "Solver",
    "StartAdaIN",
    "StartFrom",
    "Trajectory",
    "encode",
    "invert",
]
