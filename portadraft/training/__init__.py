"""Training a drafter by distillation. Importing this loads neither torch nor transformers."""

from __future__ import annotations

from typing import Any


def train(*args: Any, **kwargs: Any) -> Any:
    """Train a drafter for a model: see `portadraft.training.run.train`."""
    from portadraft.training.run import train as run

    return run(*args, **kwargs)


__all__ = ["train"]
