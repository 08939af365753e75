"""Computations on rows that lie in the host's memory, where the shape of a result may depend on the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from portadraft.core.picking import BELOW, BLOCK

Array = np.ndarray[Any, Any]

_SAMPLE = 1024
"""So few numbers are sorted as they are."""


def mass_threshold(rows: Array, share: float) -> Array:
    """`Ops.mass_threshold` for (B, V) in host memory: (B,) of the same type."""
    out = np.empty(len(rows), dtype=rows.dtype)
    for i, row in enumerate(rows):
        out[i] = _threshold(row, share)
    return out


def pick(weights: Array, uniforms: Array) -> Array:
    """`Ops.pick` for (B, n) float64 in host memory."""
    batch, size = weights.shape
    rows, starts = np.arange(batch), np.arange(0, size, BLOCK)
    blocks = np.add.reduceat(weights, starts, axis=1)
    sums = np.cumsum(blocks, axis=1)
    total = sums[:, -1]
    aim = uniforms * total
    block = _first_above(sums, aim)
    aim = aim - (sums[rows, block] - blocks[rows, block])
    at = starts[block][:, None] + np.arange(min(BLOCK, size))
    inside = weights[rows[:, None], np.minimum(at, size - 1)]
    if size % BLOCK:
        inside[at >= size] = 0
    token = starts[block] + _first_above(np.cumsum(inside, axis=1), aim)
    return np.asarray(np.where(total > 0, token, -1), dtype=np.int32)


def _first_above(sums: Array, aim: Array) -> Array:
    """The first place of each row whose running sum exceeds the aim, or by which the total is reached.

    Added one after another, running sums never fall, and rise at weights above 0 alone.
    """
    aim = np.maximum(np.minimum(aim, sums[:, -1] * BELOW), 0)
    return np.asarray(np.minimum((sums <= aim[:, None]).sum(axis=1), sums.shape[1] - 1))


def _threshold(row: Array, share: float) -> Any:
    total = float(row.sum(dtype=np.float64))
    if not total > 0:
        return row.max()
    rest = row
    if len(row) > _SAMPLE:
        # What may be left out holds `spare` at the most. A sample says below which entry most of that lies; the bound
        # that serves where the sample misleads is sure: entries of at most spare / V hold no more than `spare`.
        spare, stride = (1 - share) * total, len(row) // _SAMPLE
        rising = np.sort(row[::stride])
        place = int(np.searchsorted(np.cumsum(rising, dtype=np.float64) * stride, 0.7 * spare))
        rest = row[row > rising[min(place, len(rising) - 1)]]
        if rest.sum(dtype=np.float64) < share * total:
            rest = row[row > spare / len(row)]
    falling = np.sort(rest if len(rest) else row)[::-1]
    before = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), share * total))
    return falling[min(before, len(falling) - 1)]
