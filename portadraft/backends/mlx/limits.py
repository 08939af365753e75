"""How long a row may get before something in a model goes by more than a token's own position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "max_seq_len")


def context_limit(model: Any, stated: int | None = None) -> int | None:
    """The most tokens of a row; None where nothing bounds it.

    stated: what config.json says, if it is known. Dynamic NTK scales all frequencies with the
    length beyond its original context, and llama 4's temperature scales a query by its whole
    multiple of one, by offsets that trees do not have: both end there.
    """
    limits = [stated] if stated else []
    for arguments in _arguments(model):
        if not stated:
            limits.extend(int(arguments[n]) for n in _LENGTHS if isinstance(arguments.get(n), int) and arguments[n] > 0)
        for name in ("rope_parameters", "rope_scaling"):
            scheme = arguments.get(name)
            if isinstance(scheme, Mapping) and scheme.get("llama_4_scaling_beta"):
                at = scheme.get("original_max_position_embeddings")
                limits.extend([int(at)] if at else [])
    for _, module in model.named_modules():
        if "DynamicNTK" in type(module).__name__ and hasattr(module, "max_position_embeddings"):
            limits.append(int(module.max_position_embeddings))
    return min(limits, default=None)


def _arguments(model: Any) -> Iterator[Mapping[str, Any]]:
    """The model's arguments and those of its text part."""
    args = getattr(model, "args", None) or getattr(model, "config", None)
    if args is None:
        return
    own = args if isinstance(args, Mapping) else vars(args)
    yield own
    for name in ("text_config", "text_args"):
        inner = own.get(name)
        if inner is not None:
            yield inner if isinstance(inner, Mapping) else vars(inner)
