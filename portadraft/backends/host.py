"""Computations on rows that lie in the host's memory, where the shape of a result may depend on the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mass_threshold(rows: Array, share: float) -> Array:
    """`Ops.mass_threshold` for (B, V) float32 in host memory: (B,) float32."""
    out = np.empty(len(rows), dtype=np.float32)
    for i, row in enumerate(rows):
        total = float(row.sum(dtype=np.float32))
        # All entries of at most this hold no more than what may be left out: only the others are sorted.
        candidates = row[row > (1 - share) * total / len(row)]
        if not candidates.size:
            candidates = row.copy()
        candidates.sort()
        falling = candidates[::-1]
        before = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), share * total))
        out[i] = falling[min(before, len(falling) - 1)]
    return out
