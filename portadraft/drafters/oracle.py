"""An oracle: knows the true continuation and keeps each token of it with a given probability.

For tests and benchmarks: acceptance is controlled without a trained drafter, and commits of
every length 0…L occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from portadraft.core.drafter import StatelessDrafter
from portadraft.core.ops import Ops
from portadraft.core.sampling import uniforms
from portadraft.core.types import Array, Beam, BeamShape, Verdict, Verified
from portadraft.errors import InvalidArgument


class OracleDrafter(StatelessDrafter):
    """Drafts from known answers.

    answers: for each prompt (a tuple of ids) the ids that plain decoding gives after it.
    probability: of keeping each true token, by a coin that depends on (seed, position) alone.
    Candidate 0 follows the truth up to the first lost coin. Each other candidate shares a
    prefix with it and leaves it one step earlier than the one before, over and over, so that
    prefixes are shared as in a real beam.
    """

    name = "oracle"
    wants: Literal["none", "last", "all"] = "none"

    def __init__(
        self,
        ops: Ops,
        answers: dict[tuple[int, ...], Sequence[int]],
        vocabulary_size: int,
        probability: float = 0.8,
        seed: int = 0,
    ) -> None:
        if not 0 <= probability <= 1:
            raise InvalidArgument(f"probability={probability}: expected a number from 0 to 1")
        self._ops = ops
        self._answers = {tuple(k): list(v) for k, v in answers.items()}
        self._vocabulary = vocabulary_size
        self._probability = probability
        self._seed = seed
        self._rows: list[tuple[list[int], int]] = []  # (the true answer, how much of it is out)

    def admit(self, row: int, ids: Sequence[int]) -> None:
        if tuple(ids) not in self._answers:
            raise InvalidArgument("prompt: the oracle has no answer for it; pass it in `answers`")
        self._rows.insert(row, (self._answers[tuple(ids)], 0))

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam:
        rows = [self._candidates(answer, out, shape) for answer, out in self._rows]
        ops = self._ops
        tokens = np.asarray(rows, dtype=np.int32)
        # Candidate 0 ranks first under a budget, then those that leave it late.
        scores = -0.1 * np.arange(1, shape.length + 1, dtype=np.float32)[None, None, :]
        scores = scores - 0.01 * np.arange(shape.width, dtype=np.float32)[None, :, None]
        return Beam(
            tokens=ops.asarray(tokens),
            lengths=ops.full(tokens.shape[:2], shape.length, "int32"),
            scores=ops.asarray(np.broadcast_to(scores, tokens.shape).copy(), "float32"),
        )

    def _candidates(self, answer: list[int], out: int, shape: BeamShape) -> list[list[int]]:
        width, length, vocabulary = shape.width, shape.length, self._vocabulary
        truth = [answer[i] if i < len(answer) else 0 for i in range(out, out + length)]
        coins = uniforms([self._seed], [out], length)[0]
        lost = next((i for i, coin in enumerate(coins) if coin >= self._probability), length)
        best = truth[:lost] + [(t + 1) % vocabulary for t in truth[lost:]]
        rows = [best]
        for i in range(1, width):
            leave = length - 1 - (i - 1) % length
            # Never the truth at the step where it leaves: the coin alone decides acceptance.
            rows.append(best[:leave] + [(t + 1 + i) % vocabulary for t in truth[leave:]])
        return rows

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None:
        self._rows = [(answer, out + len(new)) for (answer, out), new in zip(self._rows, tokens, strict=True)]

    def truncate(self, row: int, length: int) -> None:
        raise InvalidArgument("truncate: the oracle knows one continuation only; make a new one")

    def release(self, row: int) -> None:
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last
