"""The torch backend: `Ops` on cpu, cuda and mps, and Hugging Face causal LMs as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portadraft.backends.torch.ops import TorchOps

if TYPE_CHECKING:
    from portadraft.backends.sources import LoadedTarget
    from portadraft.backends.torch.target import TorchTarget
    from portadraft.models import ModelSource

__all__ = ["load_target", "make_ops", "make_target"]


def make_ops(device: str = "cpu") -> TorchOps:
    """The tensor operations on a torch device ("cpu", "cuda", "cuda:1", "mps")."""
    return TorchOps(device)


def make_target(model: Any, *, check: bool = True) -> TorchTarget:
    """A loaded `AutoModelForCausalLM` as a target; the model is not modified.

    check: run the self-check (a fraction of a second the first time for a configuration,
    then read from the user's cache folder). Without it a model of an architecture that
    cannot verify trees may be decoded wrongly.

    Raises: UnsupportedModel, with the reason, where a packed pass would be wrong.
    """
    # Imported here: transformers takes a second, and `make_ops` does not need it.
    from portadraft.backends.torch.identity import architecture_id, weights_id
    from portadraft.backends.torch.selfcheck import obvious_reason, require_supported
    from portadraft.backends.torch.target import TorchTarget, unsupported

    if check:
        require_supported(model)
    else:
        reason = obvious_reason(model)
        if reason is not None:
            raise unsupported(model, reason)
    return TorchTarget(model, identity=(architecture_id(model), weights_id(model)))


def load_target(source: ModelSource, **options: Any) -> LoadedTarget:
    """Load a model from its source: see `portadraft.backends.torch.entry.load_target`."""
    from portadraft.backends.torch.entry import load_target

    return load_target(source, **options)
