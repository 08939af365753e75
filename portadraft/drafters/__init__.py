"""Drafters: whatever guesses the next tokens. None of them imports an array library but numpy."""

from typing import Any

from portadraft.drafters.lookup import PromptLookup
from portadraft.drafters.oracle import OracleDrafter
from portadraft.drafters.redrafter import ReDrafter
from portadraft.drafters.together import Together

REGISTRY: dict[str, type[Any]] = {
    "lookup": PromptLookup,
    "oracle": OracleDrafter,
    "redrafter": ReDrafter,
    "together": Together,
}
"""Every drafter by its name; the conformance suite must be run on each."""

__all__ = ["REGISTRY", "OracleDrafter", "PromptLookup", "ReDrafter", "Together"]
