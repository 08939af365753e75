"""The target's choice at a position: argmax, or the inverse CDF at a uniform of that position.

Plain and speculative steps, prefill included, make every choice through the same `Chooser`,
from the same inputs: the logits, the history of the path, the uniform of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.core.filters import divisor, probabilities
from portadraft.core.ops import Ops
from portadraft.core.penalties import History, Processors
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array


@dataclass(frozen=True)
class Situation:
    """What the choices of one step depend on besides logits; axis 1 is the depth of the choice.

    uniforms: (B, L+1) float32 in [0, 1), None for greedy. may_end: (B, L+1) bool, whether the answer
    is long enough to end; None where all are. history: of the committed text, None where no penalty asks.
    """

    uniforms: Array | None = None
    may_end: Array | None = None
    history: History | None = None

    def uniform(self, depth: int) -> Array | None:
        return None if self.uniforms is None else self.uniforms[:, depth]

    def ending(self, depth: int) -> Array | None:
        return None if self.may_end is None else self.may_end[:, depth]


class Chooser:
    """How one decoder chooses.

    vocabulary: V of the target. end_tokens: banned below `sampling.min_tokens`.
    Raises: InvalidArgument for ids outside the vocabulary.
    """

    def __init__(self, ops: Ops, sampling: Sampling, vocabulary: int, end_tokens: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.vocabulary = vocabulary
        self.processors = Processors(ops, sampling, vocabulary, end_tokens)
        self._ops = ops

    def choose(self, logits: Array, situation: Situation, depth: int, history: History | None) -> Array:
        """One token for each row: logits (B, V) at the slots reached, `history` that of their paths. (B,) int32."""
        uniform = situation.uniform(depth)
        x = self.processed(logits, situation, depth, history)
        if uniform is None:
            return self._ops.argmax(x, axis=1)
        return draw(self._ops, probabilities(self._ops, x, self.sampling), uniform)

    def processed(self, logits: Array, situation: Situation, depth: int, history: History | None) -> Array:
        """The logits after penalties, bias and bans, (B, V)."""
        return logits if self.processors.idle else self.processors(logits, history, situation.ending(depth))


def draw(ops: Ops, weights: Array, uniforms: Array) -> Array:
    """The first token, in order of id, whose running sum of weights exceeds uniform x total: (B,) int32.

    weights: (B, V) float32, at least 0, one of them above; uniforms: (B,) float32 in [0, 1]. Tokens
    without weight are never drawn: where rounding leaves none above, it is the last one that has any.
    The sum runs over blocks, so that its rounding error stays that of a short sum.
    """
    batch, vocabulary = weights.shape
    block = divisor(vocabulary)
    blocks = -(-vocabulary // block)
    padding = blocks * block - vocabulary
    if padding:
        weights = ops.concat([weights, ops.full((batch, padding), 0.0, "float32")], axis=1)
    weights = weights.reshape(batch, blocks, block)
    totals = weights.sum(axis=2)
    sums = ops.cumsum(totals, axis=1)
    aim = uniforms * sums[:, -1]
    at_block = _first_above(ops, totals, sums, aim)
    before = ops.gather(ops.concat([ops.full((batch, 1), 0.0, "float32"), sums], axis=1), at_block[:, None], axis=1)
    inside = ops.take(weights.reshape(batch * blocks, block), ops.arange(batch) * blocks + at_block)
    at = _first_above(ops, inside, ops.cumsum(inside, axis=1), aim - before[:, 0])
    return at_block * block + at


def _first_above(ops: Ops, weights: Array, sums: Array, aim: Array) -> Array:
    """The first index of each row with any weight and sums > aim; where there is none, the last with weight.

    The weights are asked for as well, since a parallel device's running sums need not be monotone.
    """
    size = weights.shape[1]
    places = ops.arange(size)[None, :]
    alive = weights > 0
    rank = ops.where(alive & (sums > aim[:, None]), 2 * size - places, ops.where(alive, places, -1))
    return ops.argmax(rank, axis=1)
