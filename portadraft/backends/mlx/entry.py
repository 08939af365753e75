"""From a model's source to a target, with what was chosen on the way."""

from __future__ import annotations

from portadraft.backends.mlx.loading import choose_device, load_model
from portadraft.backends.sources import Chosen, LoadedTarget
from portadraft.models import ModelSource


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
