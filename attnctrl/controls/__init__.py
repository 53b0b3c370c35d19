"""Methods that act on attention, one per file."""

from .prompt_to_prompt import PromptToPrompt

__all__ = ["PromptToPrompt"]
