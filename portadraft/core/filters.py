"""Temperature, top-k, top-p and min-p: from logits to the weights that a token is drawn by.

In this order, each on what the one before has left. Equal probabilities are kept or dropped
together, so that a filter does not depend on how a library orders equals.
"""

from __future__ import annotations

from portadraft.core.ops import Ops
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array


def weights(ops: Ops, logits: Array, sampling: Sampling) -> Array:
    """Probabilities but for a common factor, 0 for dropped tokens: (B, V) of type `ops.wide`.

    logits: (B, V); sampling.temperature above 0. The likeliest token weighs exactly 1. NaN where a
    row's logits hold NaN or +inf, or nothing above -inf.
    """
    x = logits if ops.dtype(logits) == ops.wide else ops.cast(logits, "float32")
    # The greatest comes off first: a difference of logits is small where it matters, and survives any temperature.
    shifted = ops.cast(x, ops.wide) - ops.cast(ops.max(x, axis=1), ops.wide)[:, None]
    if sampling.temperature != 1:
        shifted = shifted / sampling.temperature
    w = ops.exp(shifted)
    if 0 < sampling.top_k < x.shape[1]:
        best, _ = ops.top_k(x, sampling.top_k)
        w = ops.where(x >= best[:, -1:], w, 0.0)
    if sampling.top_p < 1:
        least = ops.clip(ops.mass_threshold(w, sampling.top_p), sampling.min_p, 1.0)
        return ops.at_least(w, least)
    return w if sampling.min_p == 0 else ops.at_least(w, ops.full((w.shape[0],), sampling.min_p, ops.wide))
