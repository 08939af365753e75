"""Log-probabilities of chosen tokens under the model's own distribution: before penalties, temperature and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from portadraft.core.ops import Ops
from portadraft.core.types import Array


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability, and the likeliest tokens in its place, best first.

    logprob: natural logarithm, at most 0. top: pairs of id and log-probability; empty where
    none were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def gather_logprobs(ops: Ops, logits: Array, tokens: Array, top: int) -> Array:
    """Log-probabilities at R places, as one array of whole numbers for the step's one host read.

    logits: (R, V); tokens: (R,) int32, chosen there. Returns (R, 1 + 2·top) int32: the bits of the
    chosen token's log-probability, the ids of the `top` best, and the bits of theirs.
    """
    x = ops.log_softmax(ops.cast(logits, "float32"), axis=1)
    # A choice that could not be made is -1, and what is said of it is never read.
    parts = [ops.bits(ops.gather(x, ops.clip(tokens, 0, x.shape[1] - 1)[:, None], axis=1))]
    if top:
        values, ids = ops.top_k(x, top)
        parts += [ids, ops.bits(values)]
    return ops.concat(parts, axis=1)


def read_logprobs(packed: np.ndarray[Any, Any], tokens: list[int]) -> tuple[TokenLogprob, ...]:
    """What `gather_logprobs` packed, on the host: packed (R, 1 + 2·top) int32, and the chosen ids."""
    top = packed.shape[1] // 2
    chosen = np.ascontiguousarray(packed[:, 0]).view(np.float32).tolist()
    ids = packed[:, 1 : 1 + top].tolist()
    values = np.ascontiguousarray(packed[:, 1 + top :]).view(np.float32).tolist()
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(best, theirs, strict=True)))
        for token, logprob, best, theirs in zip(tokens, chosen, ids, values, strict=False)
    )
