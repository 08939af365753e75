"""Drafters: whatever guesses the next tokens. None of them imports an array library but numpy."""

from portadraft.drafters.lookup import PromptLookup
from portadraft.drafters.oracle import OracleDrafter
from portadraft.drafters.redrafter import ReDrafter
from portadraft.drafters.together import Together

__all__ = ["OracleDrafter", "PromptLookup", "ReDrafter", "Together"]
