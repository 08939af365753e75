"""Temperature, top-k, top-p and min-p: from logits to the probabilities that are sampled from.

In this order, each on what the one before has left. Equal logits are kept or dropped
together, so a filter does not depend on how a library orders equals. No full sort: the
threshold of top-p is found by counting probability in bins of the numbers' own bits.
"""

from __future__ import annotations

import math

from portadraft.core.ops import Ops
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array

_UNIT = float(2**30)
"""Probability 1 in the whole numbers of `_top_p_threshold`: their sums are exact, in any order."""
_OCTAVES = 30
"""Powers of two below 1 that have bins of their own; what is less likely weighs nothing in whole numbers."""
_SHIFT = 14
"""A bin of the first pass holds 2**14 neighbouring float32 numbers, 512 bins an octave."""
_LOWEST = (127 - _OCTAVES) << 23
"""The bits of 2**-30 as float32."""


def probabilities(ops: Ops, logits: Array, sampling: Sampling) -> Array:
    """What a token is drawn from, not normalised after top-p and min-p: (B, V) float32, 0 for dropped tokens.

    logits: (B, V); sampling.temperature above 0.
    """
    x = ops.cast(logits, "float32")
    vocabulary = x.shape[1]
    if 0 < sampling.top_k < vocabulary:
        best, _ = ops.top_k(x, sampling.top_k)
        x = ops.where(x >= best[:, -1:], x, float("-inf"))
    # The maximum goes first: at a low temperature the quotients would overflow.
    x = x - ops.max(x, axis=1)[:, None]
    if sampling.temperature != 1:
        x = x / sampling.temperature
    p = ops.softmax(x, axis=1)
    if sampling.top_p >= 1 and sampling.min_p <= 0:
        return p
    bits = ops.bits(p)
    least = None
    if sampling.top_p < 1:
        least = _top_p_threshold(ops, p, bits, sampling.top_p)
    if sampling.min_p > 0:
        floor = ops.bits(ops.max(p, axis=1) * sampling.min_p)
        least = floor if least is None else ops.where(floor > least, floor, least)
    assert least is not None
    return ops.where(bits >= least[:, None], p, 0.0)


def _top_p_threshold(ops: Ops, p: Array, bits: Array, top_p: float) -> Array:
    """The bits of the least probability that top-p keeps: (B,) int32.

    A token is kept where those likelier than it hold less than top_p. Positive floats are in the
    order of their bits, so two passes over bins of bits find the last kept number exactly: the
    first among ranges of 2**14 numbers, the second among the numbers of one range.
    """
    mass = ops.cast(p * _UNIT, "int32")
    low = ops.full((p.shape[0],), _LOWEST, "int32")
    below = _running_mass(ops, bits, mass, low, _SHIFT, (_OCTAVES << 23 >> _SHIFT) + 1)
    # A number is kept where it and all smaller ones hold more than this.
    rest = ops.cast(ops.cast(below[:, -1], "float32") * (1 - top_p), "int32")[:, None]
    low = low + ((ops.argmax(below > rest, axis=1) - 1) << _SHIFT)
    below = _running_mass(ops, bits, mass, low, 0, 1 << _SHIFT)
    return low + (ops.argmax(below > rest, axis=1) - 1)


def _running_mass(ops: Ops, bits: Array, mass: Array, low: Array, shift: int, bins: int) -> Array:
    """The mass up to and including each of `bins` ranges of 2**shift numbers from `low` (B,) on: (B, bins + 2) int32.

    Column 0 holds what is below them, the last column everything.
    """
    place = ops.clip(((bits - low[:, None]) >> shift) + 1, 0, bins + 1)
    return ops.cumsum(ops.scatter_add(ops.full((bits.shape[0], bins + 2), 0, "int32"), place, mass, axis=1), axis=1)


def divisor(size: int) -> int:
    """A number near the root of `size` that divides it, or the root rounded down where none is near."""
    root = max(1, math.isqrt(size))
    for near in range(root, root // 2, -1):
        if size % near == 0:
            return near
    return root
