"""The target's choice at a position: argmax, or the inverse CDF at a uniform of that position.

The uniform depends on (row seed, absolute position) alone. So a choice does not depend on
how many tokens were drafted or accepted around it, and a speculative run equals the plain
run with the same seed. Plain and speculative steps call the same `choose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portadraft.core.ops import Ops
from portadraft.core.types import Array
from portadraft.errors import InvalidArgument


@dataclass(frozen=True)
class Sampling:
    """How the target chooses.

    temperature: 0 is greedy; above 0 the target's distribution at that temperature.
    seed: of the position-keyed uniforms; rows derive their own from it (`row_seed`).
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (
            isinstance(self.temperature, (int, float)) and math.isfinite(self.temperature) and self.temperature >= 0
        ):
            raise InvalidArgument(
                f"temperature={self.temperature!r}: expected a finite number of at least 0 (0 is greedy)"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed={self.seed!r}: expected an integer from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def choose(ops: Ops, logits: Array, temperature: float, uniforms: Array | None) -> Array:
    """The target's token for each row.

    logits: (B, V). uniforms: (B,) float32 in [0, 1), or None for greedy. Returns (B,) int32.
    Greedy takes the lowest id among equals. Sampling takes the first id, in id order, whose
    cumulative probability exceeds the uniform; the sum runs over blocks, so that its rounding
    error stays that of a short sum.
    """
    if uniforms is None:
        return ops.argmax(logits, axis=1)
    batch, vocabulary = logits.shape
    logits = ops.cast(logits, "float32")
    # The maximum goes first: at a low temperature the quotients would overflow.
    weights = ops.exp((logits - ops.max(logits, axis=1)[:, None]) / temperature)
    block = max(1, math.isqrt(vocabulary))
    blocks = -(-vocabulary // block)
    padding = blocks * block - vocabulary
    if padding:
        weights = ops.concat([weights, ops.full((batch, padding), 0.0, "float32")], axis=1)
    weights = weights.reshape(batch, blocks, block)
    totals = weights.sum(axis=2)
    sums = ops.cumsum(totals, axis=1)
    aim = uniforms * sums[:, -1]
    # The first block whose running sum exceeds the aim, else the last one that has any weight.
    at_block = _first_above(ops, totals, sums, aim)
    before = ops.gather(ops.concat([ops.full((batch, 1), 0.0, "float32"), sums], axis=1), at_block[:, None], axis=1)
    inside = ops.take(weights.reshape(batch * blocks, block), ops.arange(batch) * blocks + at_block)
    at = _first_above(ops, inside, ops.cumsum(inside, axis=1), aim - before[:, 0])
    return at_block * block + at


def _first_above(ops: Ops, weights: Array, sums: Array, aim: Array) -> Array:
    """The first index of each row with any weight and sums > aim; where rounding leaves none, the last with weight.

    The weights are asked for as well, since a parallel device's running sums need not be monotone.
    """
    alive = weights > 0
    above = alive & (sums > aim[:, None])
    count = ops.cumsum(alive, axis=1)
    return ops.where(ops.any(above, axis=1), ops.argmax(above, axis=1), ops.argmax(count == count[:, -1:], axis=1))


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Uniforms in [0, 1) for rows of the given seeds at `count` positions from the given ones on.

    Returns (B, count) float64 of 53 random bits each, from Philox 4x32 with 10 rounds
    (Salmon et al. 2011), key = seed, counter = position. Pinned by test vectors: a change here
    changes every sampled text.
    """
    if not seeds:
        return np.zeros((0, count))
    at = np.asarray(positions, dtype=np.uint64)[:, None] + np.arange(count, dtype=np.uint64)[None, :]
    key = np.broadcast_to(np.asarray(seeds, dtype=np.uint64)[:, None], at.shape)
    words = philox(at, key)
    bits = (words[0].astype(np.uint64) << np.uint64(21)) | (words[1].astype(np.uint64) >> np.uint64(11))
    out: np.ndarray[tuple[int, int], np.dtype[np.float64]] = bits.astype(np.float64) * 2.0**-53
    return out


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row` of a call with one seed; row 0 keeps the call's own."""
    if row == 0:
        return seed
    words = philox(np.asarray([row], dtype=np.uint64), np.asarray([seed], dtype=np.uint64), stream=1)
    return int(words[2][0]) << 32 | int(words[3][0])


def philox(
    counter: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
    key: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
    stream: int = 0,
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint64]], ...]:
    """Philox 4x32-10: four words of 32 bits (as uint64) for each 64-bit counter and key.

    `stream` fills the counter's upper half, to keep uses apart.
    """
    low, wide = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = counter & low, counter >> wide
    c2, c3 = np.full_like(counter, stream & 0xFFFFFFFF), np.full_like(counter, stream >> 32)
    k0, k1 = key & low, key >> wide
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> wide) ^ c1 ^ k0, right & low, (left >> wide) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3
