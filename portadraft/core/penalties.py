"""What changes the target's logits before temperature and filters: penalties, bias, bans.

In this order, which is that of transformers' processors: repetition penalty (of prompt and
answer), presence and frequency penalties (of the answer), bias and bans, end tokens below
`min_tokens`. Penalties look at the history of the very path that a choice continues, kept on
the device and updated functionally, so that a walk through a tree sees at each of its
choices what plain decoding would see. Nothing here costs anything when it is not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portadraft.core.ops import Ops
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array


@dataclass(frozen=True)
class History:
    """Which tokens stand before a choice, by id.

    seen: (B, V) int32, 1 for tokens of prompt or answer; None where no repetition penalty asks.
    counts: (B, V) int32, how often a token stands in the answer; None where nothing asks.
    """

    seen: Array | None
    counts: Array | None

    @classmethod
    def of(
        cls, ops: Ops, sampling: Sampling, texts: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: int
    ) -> History | None:
        """The history of rows, from (prompt, answer so far) of each; None where no penalty asks for one."""
        if not sampling.needs_history:
            return None
        seen = counts = None
        shape = (len(texts), vocabulary)
        if sampling.repetition_penalty != 1:
            marks = np.zeros(shape, dtype=np.int32)
            for row, (prompt, answer) in enumerate(texts):
                marks[row, [*prompt, *answer]] = 1
            seen = ops.asarray(marks)
        if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            numbers = np.zeros(shape, dtype=np.int32)
            for row, (_, answer) in enumerate(texts):
                np.add.at(numbers[row], np.asarray(answer, dtype=np.int64), 1)
            counts = ops.asarray(numbers)
        return cls(seen, counts)

    def after(self, ops: Ops, tokens: Array, live: Array) -> History:
        """With one more token of the answer for each row: tokens (B,); a row whose `live` (B,) is False stays."""
        seen = self.seen
        # A choice that could not be made is -1: the step ends with an error once the host has read it.
        at, one = ops.where(tokens < 0, 0, tokens)[:, None], ops.cast(live, "int32")[:, None]
        if seen is not None:
            seen = ops.scatter(seen, at, ops.where(live[:, None], 1, ops.gather(seen, at, axis=1)), axis=1)
        counts = self.counts
        if counts is not None:
            counts = ops.scatter(counts, at, ops.gather(counts, at, axis=1) + one, axis=1)
        return History(seen, counts)

    def joined(self, ops: Ops, other: History) -> History:
        """These rows and then the other's."""
        return History(_join(ops, self.seen, other.seen), _join(ops, self.counts, other.counts))

    def rows(self, ops: Ops, index: Array) -> History:
        """Some rows, in the order of `index` (R,)."""
        return History(
            None if self.seen is None else ops.take(self.seen, index),
            None if self.counts is None else ops.take(self.counts, index),
        )


def _join(ops: Ops, a: Array | None, b: Array | None) -> Array | None:
    return None if a is None or b is None else ops.concat([a, b], axis=0)


class Processors:
    """The changes that one `Sampling` asks for, with their constants on the device.

    Raises: InvalidArgument for ids outside the vocabulary.
    """

    def __init__(self, ops: Ops, sampling: Sampling, vocabulary: int, end_tokens: Sequence[int]) -> None:
        sampling.check_vocabulary(vocabulary, end_tokens)
        self._ops = ops
        self._sampling = sampling
        self.idle = not sampling.changes_logits
        bias = np.zeros(vocabulary, dtype=np.float64)
        for token, value in dict(sampling.logit_bias).items():
            bias[token] = value
        bias[list(sampling.banned)] = -math.inf
        self._bias = ops.asarray(bias, ops.wide)[None] if bias.any() else None
        self._ends = None
        inside = [token for token in end_tokens if 0 <= token < vocabulary]
        if sampling.min_tokens and inside:
            ends = np.zeros(vocabulary, dtype=np.bool_)
            ends[inside] = True
            self._ends = ops.asarray(ends, "bool")[None]

    @property
    def bans_ends(self) -> bool:
        """Whether end tokens are banned for a while, so that `may_end` is read."""
        return self._ends is not None

    def __call__(self, logits: Array, history: History | None, may_end: Array | None) -> Array:
        """The changed logits, (B, V) of type `ops.wide`.

        may_end: (B,) bool, whether the answer is long enough to end here; None where all are.
        """
        ops, sampling = self._ops, self._sampling
        x = ops.cast(logits, ops.wide)
        if history is not None and history.seen is not None:
            penalty = sampling.repetition_penalty
            x = ops.where(history.seen > 0, ops.where(x > 0, x / penalty, x * penalty), x)
        if history is not None and history.counts is not None:
            counts = ops.cast(history.counts, ops.wide)
            if sampling.presence_penalty != 0:
                x = x - ops.cast(history.counts > 0, ops.wide) * sampling.presence_penalty
            if sampling.frequency_penalty != 0:
                x = x - counts * sampling.frequency_penalty
        if self._bias is not None:
            x = x + self._bias
        if self._ends is not None and may_end is not None:
            x = ops.where(self._ends & ~may_end[:, None], float("-inf"), x)
        return x
