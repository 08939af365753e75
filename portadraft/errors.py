"""What portadraft raises.

    PortadraftError
    ├── InvalidArgument (also ValueError)   an argument is outside what is allowed
    ├── ModelNotFound   (also LookupError)  a model or drafter name leads nowhere
    ├── UnsupportedModel                    the model cannot verify trees; the reason is named
    ├── IncompatibleDrafter                 the drafter was made for another tokenizer or size
    ├── BrokenLogits    (also ArithmeticError) the model computed NaN or infinity
    ├── CorruptFile                         a file is not what its name says
    ├── OutOfMemory (also MemoryError)      a model does not fit into the device's memory
    ├── StoreUnreachable (also OSError)     a store of profiles cannot be read or written
    └── MissingDependency (also ImportError) an optional package is needed; the install line is named

    WeightsMismatch (a warning)             the drafter was trained on other weights of the same shape

Every message names the argument, its value, what was expected and what to do.
"""

from __future__ import annotations


class PortadraftError(Exception):
    """Base of every error that portadraft raises on purpose."""


class InvalidArgument(PortadraftError, ValueError):
    """An argument is outside what is allowed."""


class UnknownOption(InvalidArgument, TypeError):
    """There is no option of that name; Python's own error for it is a TypeError, and so is this."""


class ModelNotFound(PortadraftError, LookupError):
    """A model or drafter name leads nowhere."""


class UnsupportedModel(PortadraftError):
    """The model cannot verify a tree of drafted tokens exactly. `reason`: why, without the model's name around it."""

    reason: str = ""


class IncompatibleDrafter(PortadraftError):
    """The drafter was made for a target of another vocabulary or hidden size."""


class BrokenLogits(PortadraftError, ArithmeticError):
    """No token can be chosen: the model's logits are NaN or infinite."""


class CorruptFile(PortadraftError):
    """A file is damaged, cut short, or of another format than expected."""


class OutOfMemory(PortadraftError, MemoryError):
    """The model does not fit into the device's memory."""


class StoreUnreachable(PortadraftError, OSError):
    """A store of profiles cannot be reached, or does not allow what was asked."""


class MissingDependency(PortadraftError, ImportError):
    """An optional package is not installed."""


class WeightsMismatch(UserWarning):
    """The drafter was trained on other weights than the target's; the output stays exact, drafting may be poor."""
