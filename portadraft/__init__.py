"""Faster text generation from causal language models, with unchanged output.

    import portadraft
    print(portadraft.generate("smollm2-135m", "Why is the sky blue?").text)

A small recurrent drafter guesses the next tokens, the model checks all guesses in one pass,
and only what the model would have chosen itself is kept. This module loads no array
library: what it names is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from portadraft.errors import (
    BrokenLogits,
    CorruptFile,
    IncompatibleDrafter,
    InvalidArgument,
    MissingDependency,
    ModelNotFound,
    OutOfMemory,
    PortadraftError,
    UnknownOption,
    UnsupportedModel,
    WeightsMismatch,
)

if TYPE_CHECKING:
    from portadraft.api import Model, generate, load, stream
    from portadraft.conversation import Chat
    from portadraft.core.types import BeamShape
    from portadraft.generation import Delta, Generation
    from portadraft.prefix import PrefixCache

__version__ = "0.1.0"

__all__ = [
    "BeamShape",
    "BrokenLogits",
    "Chat",
    "CorruptFile",
    "Delta",
    "Generation",
    "IncompatibleDrafter",
    "InvalidArgument",
    "MissingDependency",
    "Model",
    "ModelNotFound",
    "OutOfMemory",
    "PortadraftError",
    "PrefixCache",
    "UnknownOption",
    "UnsupportedModel",
    "WeightsMismatch",
    "__version__",
    "generate",
    "load",
    "stream",
]

_LAZY = {
    "BeamShape": "portadraft.core.types",
    "Chat": "portadraft.conversation",
    "Delta": "portadraft.generation",
    "Generation": "portadraft.generation",
    "PrefixCache": "portadraft.prefix",
    "Model": "portadraft.api",
    "generate": "portadraft.api",
    "load": "portadraft.api",
    "stream": "portadraft.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
