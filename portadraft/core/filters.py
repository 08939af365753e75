"""Temperature, top-k, top-p and min-p: from logits to the probabilities that are sampled from.

In this order, each on what the one before has left. Equal probabilities are kept or dropped
together, so that a filter does not depend on how a library orders equals.
"""

from __future__ import annotations

from portadraft.core.ops import Ops
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array

_COLD = 0.01
"""The temperature below which quotients of logits lose too much of float32."""


def probabilities(ops: Ops, logits: Array, sampling: Sampling) -> Array:
    """What a token is drawn from, 0 for dropped tokens: (B, V) float32, not normalised after a filter.

    logits: (B, V); sampling.temperature above 0.
    """
    x = ops.cast(logits, "float32")
    if sampling.temperature < _COLD:
        x = x - ops.max(x, axis=1)[:, None]  # exact, and small where it matters
    if sampling.temperature != 1:
        x = x / sampling.temperature
    p = ops.softmax(x, axis=1)
    if 0 < sampling.top_k < p.shape[1]:
        best, _ = ops.top_k(p, sampling.top_k)
        p = _keep(ops, p, best[:, -1])
    least = None
    if sampling.top_p < 1:
        least = ops.mass_threshold(p, sampling.top_p)
    if sampling.min_p > 0:
        floor = ops.max(p, axis=1) * sampling.min_p
        least = floor if least is None else ops.where(floor > least, floor, least)
    return p if least is None else _keep(ops, p, least)


def _keep(ops: Ops, p: Array, least: Array) -> Array:
    """p (B, V) where it is at least `least` (B,), else 0.

    Positive floats are in the order of their bits; the difference of those, cut to 0 and 1, is a mask that
    costs half of one of booleans on a CPU.
    """
    above = ops.bits(p) - (ops.bits(least) - 1)[:, None]
    return p * ops.cast(ops.clip(above, 0, 1), "float32")
