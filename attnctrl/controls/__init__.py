"""Methods that act on attention, one per file."""

from .feature_injection import FeatureInjection
from .prompt_to_prompt import PromptToPrompt
from .stored_features import StoredFeatures
from .style_aligned import StyleAligned
from .style_injection import StyleInjection
from .style_swap import StyleSwap
from .value_sharing import ValueSharing

__all__ = [
    "FeatureInjection",
    "PromptToPrompt",
    "StoredFeatures",
    "StyleAligned",
    "StyleInjection",
    "StyleSwap",
    "ValueSharing",
]
