"""Methods that act on attention, one per file."""

from .cross_image import CrossImageAttention
from .feature_injection import FeatureInjection
from .interpolation import AttentionInterpolation
from .isolation import SubjectIsolation
from .lora_choice import LoraChoice
from .mutual_self_attention import MutualSelfAttention, WordMasks
from .plug_and_play import FeatureSharing, PlugAndPlay
from .prompt_to_prompt import PromptToPrompt
from .random_sharing import RandomSharing
from .reposition import SubjectReposition
from .rope_keys import RopeKeyModulation
from .sketch import QueryBlend, ReferenceOverlay, SketchMixture, illustration
from .stored_features import StoredFeatures
from .style_aligned import SharedGroupNorm, StyleAligned
from .style_injection import StyleInjection
from .style_swap import StyleSwap
from .subject_sharing import SubjectSharing
from .text_interpolation import TextInterpolation
from .value_sharing import ValueSharing

__all__ = [
    "AttentionInterpolation",
    "CrossImageAttention",
    "FeatureInjection",
    "FeatureSharing",
    "LoraChoice",
    "MutualSelfAttention",
    "PlugAndPlay",
    "PromptToPrompt",
    "QueryBlend",
    "RandomSharing",
    "ReferenceOverlay",
    "RopeKeyModulation",
    "SharedGroupNorm",
    "SketchMixture",
    "StoredFeatures",
    "StyleAligned",
    "StyleInjection",
    "StyleSwap",
    "SubjectIsolation",
    "SubjectReposition",
    "SubjectSharing",
    "TextInterpolation",
    "ValueSharing",
    "WordMasks",
    "illustration",
]
