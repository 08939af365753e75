"""What a pass needs besides the weights, so that a shape which cannot fit is not tried."""

from __future__ import annotations

import importlib
from typing import Any

from portadraft import backends
from portadraft.core.ops import Ops
from portadraft.core.target import TargetFacts

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MARGIN = 1.2
_LAYERS_HELD = 12
"""Hidden-sized arrays that a pass is taken to hold at once (projections, the inner layer of the MLP)."""


def need_bytes(facts: TargetFacts, batch: int, slots: int, context: int, *, sampled: bool = False) -> int:
    """Bytes of one pass over `slots` slots of `batch` rows: logits, activations, new cache entries, the tree mask."""
    size = _BYTES.get(facts.dtype, 4)
    rows = batch * slots
    logits = rows * facts.vocabulary_size * size + (batch * facts.vocabulary_size * 4 * 3 if sampled else 0)
    hidden = rows * facts.hidden_size * size * _LAYERS_HELD
    mask = rows * (context + slots) * size
    return int(_MARGIN * (logits + hidden + mask + rows * facts.cache_bytes_per_token))


def free_bytes(ops: Ops) -> int | None:
    """Free memory where arrays live; None where nobody says."""
    found = _from_backend(ops)
    if found is not None or ops.device not in ("cpu",):
        return found
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def _from_backend(ops: Ops) -> int | None:
    try:
        module: Any = importlib.import_module(f"{backends.get(ops.name).module}.machine")
    except (ImportError, ValueError):
        return None
    ask = getattr(module, "free_bytes", None)
    return None if ask is None else ask(ops.device)
