"""The draw: the first token, in order of id, at which the running sum of weights exceeds uniform x total.

In float64 where the device has it; elsewhere (Apple's GPUs) in float32 and whole numbers, and `EDGE` says how
far the edges between tokens may then lie from float64's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portadraft.core.ops import BITS, Ops
from portadraft.core.types import Array

EDGE = 2.0**-19
"""Without float64: the most, as a share of all weight, by which an edge between two tokens may be off.

A weight exp(-a) is off by the roundings of a, twice, and of exp: (2a + 2) 2**-24 of itself. Of all weight that is
(2E + 2) 2**-24 with E the mean of a, which is at most ln V: 27 x 2**-24 for 2**18 tokens. Sums of whole numbers add
2**-21 at the most, and the uniform's 30 bits next to nothing."""


def numbers(ops: Ops, uniforms: np.ndarray[Any, Any]) -> Array:
    """Host uniforms in [0, 1], float64, as `draw` takes them: all 53 bits where the device has float64, else the
    upper 30 as int32.
    """
    if ops.wide == "float64":
        return ops.asarray(uniforms, "float64")
    return ops.asarray(np.minimum(uniforms * 2.0**BITS, 2**BITS - 1).astype(np.int32))


def draw(ops: Ops, weights: Array, uniforms: Array) -> Array:
    """One token for each row: (B,) int32, or -1 where the weights are none (NaN, or nothing above 0).

    weights: (B, V) of type `ops.wide`, at least 0; uniforms: (B,) from `numbers`. A token of weight 0 is never
    drawn; a uniform that times the total rounds to the total draws the last token that adds to it.
    """
    return ops.pick(weights, uniforms)
