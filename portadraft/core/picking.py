"""`Ops.pick` on devices that add in parallel: in float64, and in whole numbers where there is no float64.

Two small running sums in place of one over all weights: over blocks of `BLOCK` places, then inside the
block that was met.
"""

from __future__ import annotations

from portadraft.core.ops import BITS, Ops
from portadraft.core.types import Array

BLOCK = 256
BELOW = 1 - 2.0**-53
"""Times this a float64 is the greatest number below it."""

_ALL = 2.0**BITS
_HALF = 2 ** (BITS // 2)


def pick_on_device(ops: Ops, weights: Array, uniforms: Array) -> Array:
    """What `Ops.pick` says, by the other methods of `ops`."""
    find = _in_floats if ops.wide == "float64" else _in_whole_numbers
    batch, size = weights.shape
    count = -(-size // BLOCK)
    if count * BLOCK > size > BLOCK:
        missing = ops.full((batch, count * BLOCK - size), 0.0, ops.dtype(weights))
        weights = ops.concat([weights, missing], axis=1)
    blocks = weights.reshape(batch, count, -1)
    sums = blocks.sum(axis=2)
    block, rest = find(ops, sums, uniforms)
    inside = ops.take(blocks.reshape(batch * count, -1), ops.arange(batch) * count + block)
    place, _ = find(ops, inside, rest)
    return ops.where(sums.sum(axis=1) > 0, block * BLOCK + place, -1)


def _in_floats(ops: Ops, weights: Array, uniforms: Array) -> tuple[Array, Array]:
    """The place (B,) at which running sums of weights (B, n) exceed uniform x total, and where in it that is (0…1)."""
    sums = ops.cumsum(weights, axis=1)
    # Added in parallel, a running sum may fall by a rounding: none counts but those of weights above 0.
    running = ops.where(weights > 0, sums, 0.0)
    total = ops.max(running, axis=1)
    aim = uniforms * total
    # Neither what is left by a rounding before the block, nor the total itself.
    aim = ops.where(aim > 0, ops.where(aim < total, aim, total * BELOW), 0.0)
    place = ops.argmax(running > aim[:, None], axis=1)
    own = ops.gather(weights, place[:, None], axis=1)[:, 0]
    before = ops.gather(sums, place[:, None], axis=1)[:, 0] - own
    return place, (aim - before) / own


def _in_whole_numbers(ops: Ops, weights: Array, uniforms: Array) -> tuple[Array, Array]:
    """The same for uniforms x 2**30. Weights are rounded to 2**-30 of all: their sums are exact in whatever order."""
    whole = ops.cast(weights * (_ALL / weights.sum(axis=1))[:, None] + 0.5, "int32")
    sums = ops.cumsum(whole, axis=1)
    aim = _share(sums[:, -1], uniforms)
    place = ops.clip(ops.searchsorted(sums, aim), 0, weights.shape[1] - 1)  # beyond the last only where weights are NaN
    own = ops.gather(whole, place[:, None], axis=1)[:, 0]
    before = ops.gather(sums, place[:, None], axis=1)[:, 0] - own
    rest = ops.cast(ops.cast(aim - before, "float32") * (_ALL / ops.cast(own, "float32")), "int32")
    return place, ops.clip(rest, 0, 2**BITS - 1)


def _share(total: Array, uniforms: Array) -> Array:
    """floor(total x uniform / 2**30) in int32, from the halves of both; total is at most little above 2**30."""
    high, upper = total // _HALF, uniforms // _HALF
    low, lower = total - high * _HALF, uniforms - upper * _HALF
    return high * upper + (high * lower + low * upper + low * lower // _HALF) // _HALF
