"""The target's choice at a position: argmax, or the inverse CDF at a uniform of that position.

Plain and speculative steps, prefill included, make every choice through the same `Chooser`,
from the same inputs: the logits, the history of the path, the uniform of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.core.draw import draw
from portadraft.core.filters import weights
from portadraft.core.ops import Ops
from portadraft.core.penalties import History, Processors
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array


@dataclass(frozen=True)
class Situation:
    """What the choices of one step depend on besides logits; axis 1 is the depth of the choice.

    uniforms: (B, L+1) from `draw.numbers`, None for greedy. may_end: (B, L+1) bool, whether the answer
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
        """One token for each row: logits (B, V) at the slots reached, `history` that of their paths. (B,) int32.

        -1 where the logits are none: NaN or +inf, as far as the choice meets them, or nothing above -inf.
        """
        ops, uniform = self._ops, situation.uniform(depth)
        x = self.processed(logits, situation, depth, history)
        if uniform is not None:
            return draw(ops, weights(ops, x, self.sampling), uniform)
        token = ops.argmax(x, axis=1)
        best = ops.gather(x, token[:, None], axis=1)[:, 0]
        return ops.where(best - best == 0, token, -1)

    def processed(self, logits: Array, situation: Situation, depth: int, history: History | None) -> Array:
        """The logits after penalties, bias and bans, (B, V)."""
        return logits if self.processors.idle else self.processors(logits, history, situation.ending(depth))
