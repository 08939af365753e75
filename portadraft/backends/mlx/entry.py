"""From a model's source to a target, with what was chosen on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

from portadraft.backends.mlx.loading import Chosen, choose_device, load_model
from portadraft.backends.mlx.target import MlxTarget
from portadraft.models import ModelSource


class LoadedTarget(NamedTuple):
    """A target, its text side, and where and in which type it runs, with reasons."""

    target: MlxTarget
    tokenizer: Any
    generation_config: Any
    device: Chosen
    dtype: Chosen


def load_target(source: ModelSource, *, dtype: str = "auto", device: str = "auto", check: bool = True) -> LoadedTarget:
    """Load an mlx-lm model as a target.

    Raises: what `load_model` raises; UnsupportedModel where the self-check fails.
    """
    from portadraft.backends.mlx import make_target

    where = choose_device(device)
    loaded = load_model(source, dtype=dtype, device=device)
    target = make_target(loaded.model, check=check, limit=loaded.limit)
    kind = loaded.dtype
    if kind.value == "auto":
        kind = Chosen(target.facts.dtype, kind.reason)
    return LoadedTarget(target, loaded.tokenizer, loaded.generation_config, where, kind)
