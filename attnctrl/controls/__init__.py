"""Methods that act on attention, one per file."""

from .feature_injection import FeatureInjection
from .prompt_to_prompt import PromptToPrompt
from .stored_features import StoredFeatures
from .value_sharing import ValueSharing

__all__ = ["FeatureInjection", "PromptToPrompt", "StoredFeatures", "ValueSharing"]
