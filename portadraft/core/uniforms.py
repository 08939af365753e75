"""Uniform numbers from (seed, position) alone: Philox, a counter-based generator, pinned by test vectors.

No state is kept, so a number does not depend on how many tokens were drafted or accepted
before it. A change here changes every sampled text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

CHOICE, ROW, DRAFT, COIN = 0, 1, 2, 3
"""Streams, which keep uses of one (seed, position) apart: the target's choice, rows' seeds, and for rejection
sampling the drafted tokens and the coins of acceptance."""


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], count: int, stream: int = CHOICE
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Uniforms in [0, 1) for rows of the given seeds at `count` positions from the given ones on.

    Returns (B, count) float64 of 53 random bits each, from Philox 4x32 with 10 rounds
    (Salmon et al. 2011), key = seed, counter = position.
    """
    if not len(seeds):
        return np.zeros((0, count))
    at = np.asarray(positions, dtype=np.uint64)[:, None] + np.arange(count, dtype=np.uint64)[None, :]
    key = np.broadcast_to(np.asarray(seeds, dtype=np.uint64)[:, None], at.shape)
    words = philox(at, key, stream)
    bits = (words[0].astype(np.uint64) << np.uint64(21)) | (words[1].astype(np.uint64) >> np.uint64(11))
    out: np.ndarray[tuple[int, int], np.dtype[np.float64]] = bits.astype(np.float64) * 2.0**-53
    return out


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row` of a call with one seed; row 0 keeps the call's own."""
    if row == 0:
        return seed
    words = philox(np.asarray([row], dtype=np.uint64), np.asarray([seed], dtype=np.uint64), stream=ROW)
    return int(words[2][0]) << 32 | int(words[3][0])


def philox(counter: Words, key: Words, stream: int = 0) -> tuple[Words, ...]:
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
