"""The target's choice at a position: argmax, or the inverse CDF at a uniform of that position.

Plain and speculative steps, prefill included, make every choice through the same `Chooser`,
from the same inputs: the logits, the history of the path, the uniform of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.core.filters import probabilities
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

    weights: (B, V) float32, at least 0, one of them above; uniforms: (B,) float32 in [0, 1]. The sums
    are of whole numbers, 2**30 for all weight, so that they are exact and rise whatever the order in
    which a device adds, and a token without weight (below 2**-31 of all) is never drawn. A uniform that
    rounds to 1 draws the last token that has any.
    """
    scale = _ALL / weights.sum(axis=1)
    sums = ops.cumsum(ops.cast(weights * scale[:, None] + 0.5, "int32"), axis=1)
    total = sums[:, -1]
    aim = ops.cast(uniforms * ops.cast(total, "float32"), "int32")
    return ops.searchsorted(sums, ops.where(aim < total, aim, total - 1))


_ALL = float(2**30)
