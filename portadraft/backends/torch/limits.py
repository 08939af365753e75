"""Where a rotary scheme changes with the length of the sequence.

LongRoPE uses one set of frequencies up to a length and another beyond it, for ALL positions
of a pass; dynamic NTK scales them with every token beyond its original length. Both look at
the greatest position of a pass, so a tree must not reach over the switch, and rows on
different sides of it must not share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portadraft.errors import UnsupportedModel

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class RotaryLimit:
    """kind: "longrope" or "dynamic"; at: sequences of up to this many tokens use the original frequencies."""

    kind: str
    at: int
    modules: tuple[torch.nn.Module, ...]

    def beyond(self, length: int) -> bool:
        """Whether the step that follows `length` committed tokens is past the switch."""
        return length + 1 > self.at

    def depth(self, length: int) -> int:
        """How deep a tree may go after `length` committed tokens."""
        if not self.beyond(length):
            return self.at - 1 - length
        return UNLIMITED if self.kind == "longrope" else 0

    def apart(self, lengths: Sequence[int]) -> bool:
        """Whether these rows need passes of their own."""
        if len(lengths) < 2:
            return False
        sides = {self.beyond(length) for length in lengths}
        return len(sides) > 1 or (True in sides and self.kind == "dynamic")

    def before_pass(self) -> None:
        """Make dynamic NTK a function of this pass alone: transformers keeps the longest length ever seen."""
        if self.kind == "dynamic":
            for module in self.modules:
                if module.max_seq_len_cached > self.at:
                    module.max_seq_len_cached = self.at


def rotary_limit(model: torch.nn.Module) -> RotaryLimit | None:
    """The limit of a model's rotary scheme, None where frequencies never change.

    Raises: UnsupportedModel where several modules switch at different lengths.
    """
    found: dict[tuple[str, int], list[torch.nn.Module]] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind == "longrope":
                at = _original_length(module, layer_type)
            elif isinstance(kind, str) and "dynamic" in kind:
                kind, at = "dynamic", int(module.original_max_seq_len)
            else:
                continue
            found.setdefault((kind, at), []).append(module)
    if len(found) > 1:
        raise UnsupportedModel(f"its rotary schemes switch at different lengths ({sorted(found)})")
    for (kind, at), modules in found.items():
        return RotaryLimit(kind, at, tuple(modules))
    return None


def _original_length(module: Any, layer_type: str | None) -> int:
    config = module.config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type is not None:
        parameters = parameters[layer_type]
    at = parameters.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(at or config.max_position_embeddings)
