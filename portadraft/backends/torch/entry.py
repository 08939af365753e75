"""From a model's source to a target, with what was chosen on the way."""

from __future__ import annotations

from portadraft.backends.sources import LoadedTarget
from portadraft.backends.torch import make_target
from portadraft.backends.torch.devices import choose_device, choose_dtype
from portadraft.backends.torch.loading import load_model
from portadraft.models import ModelSource


def load_target(source: ModelSource, *, dtype: str = "auto", device: str = "auto", check: bool = True) -> LoadedTarget:
    """Load a Hugging Face causal language model as a target.

    Raises: what `load_model` raises; UnsupportedModel where the self-check fails.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where.value)
    loaded = load_model(source, dtype=kind.value, device=where.value)
    return LoadedTarget(make_target(loaded.model, check=check), loaded.tokenizer, loaded.generation_config, where, kind)
