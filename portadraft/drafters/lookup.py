"""Prompt lookup: draft what followed the last tokens when they stood in the text before.

Needs no training, so any model gains on text that repeats itself (quotes, code, extraction).
It runs on the host, on ids that the host has read anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from portadraft.core.drafter import StatelessDrafter
from portadraft.core.ops import Ops
from portadraft.core.types import Array, Beam, BeamShape, Verdict, Verified
from portadraft.errors import InvalidArgument

CONFIDENCE = (0.4, 0.53, 0.61, 0.70, 0.73, 0.90)
"""How often one more token was right after a match of 1, 2, … tokens (of 2 and more: measured on 89,504
tokens of SmolLM2-135M-Instruct's answers)."""


class PromptLookup(StatelessDrafter):
    """The continuation of the latest earlier place with the same last n tokens, longest n first.

    longest, shortest: the n-grams that are tried. length: of a draft; None takes the shape's.
    confidence: probability that one more token is right, by n, the last for all longer ones; it
    only ranks nodes under a budget, beside another drafter's.
    """

    name = "lookup"
    wants: Literal["none", "last", "all"] = "none"

    def __init__(
        self,
        ops: Ops,
        longest: int = 6,
        shortest: int = 2,
        length: int | None = None,
        confidence: Sequence[float] = CONFIDENCE,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidArgument(f"shortest={shortest}, longest={longest}: expected 1 <= shortest <= longest")
        if length is not None and length < 1:
            raise InvalidArgument(f"length={length}: expected at least 1, or None for the shape's")
        self._ops = ops
        self.longest, self.shortest = longest, shortest
        self._length = length
        self.id = f"lookup-{shortest}-{longest}-{length or 'shape'}"
        self._step_score = {n: math.log(confidence[min(n, len(confidence)) - 1]) for n in range(shortest, longest + 1)}
        self._rows: list[_History] = []

    def candidates(self, shape: BeamShape) -> int:
        return 1

    def depth(self, shape: BeamShape) -> int:
        return shape.length if self._length is None else self._length

    def admit(self, row: int, ids: Sequence[int]) -> None:
        history = _History(self.shortest, self.longest)
        history.extend(ids)
        self._rows.insert(row, history)

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam | None:
        """One candidate a row; None where no row has any, so that the step is a plain one."""
        length = self.depth(shape)
        found = [history.continuation(length) for history in self._rows]
        if not any(tokens for tokens, _ in found):
            return None
        rows = len(found)
        tokens = np.zeros((rows, 1, length), dtype=np.int32)
        lengths = np.zeros((rows, 1), dtype=np.int32)
        scores = np.full((rows, 1, length), -np.inf, dtype=np.float32)
        for i, (ids, n) in enumerate(found):
            if ids:
                tokens[i, 0, : len(ids)] = ids
                lengths[i, 0] = len(ids)
                scores[i, 0, : len(ids)] = self._step_score[n] * np.arange(1, len(ids) + 1)
        ops = self._ops
        return Beam(ops.asarray(tokens), ops.asarray(lengths), ops.asarray(scores, "float32"))

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None:
        for history, new in zip(self._rows, tokens, strict=True):
            history.extend(new)

    def truncate(self, row: int, length: int) -> None:
        ids = self._rows[row].ids[:length]
        self._rows[row] = _History(self.shortest, self.longest)
        self._rows[row].extend(ids)

    def release(self, row: int) -> None:
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def memory(self, batch: int, context: int) -> int:
        # A list slot, and a dictionary entry with its key tuple for every n.
        return batch * context * (8 + (self.longest - self.shortest + 1) * 200)


class _History:
    """A row's ids, and for every n-gram in them the place after its latest occurrence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.ids: list[int] = []
        self._places: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(shortest, longest + 1)}

    def extend(self, tokens: Sequence[int]) -> None:
        # An n-gram is entered once something follows it: the newest one would only find itself.
        for token in tokens:
            end = len(self.ids)
            for n, places in self._places.items():
                if end >= n:
                    places[tuple(self.ids[end - n : end])] = end
            self.ids.append(token)

    def continuation(self, length: int) -> tuple[list[int], int]:
        """`length` ids and the n that found them; ([], 0) where nothing matches."""
        for n in sorted(self._places, reverse=True):
            if len(self.ids) >= n:
                place = self._places[n].get(tuple(self.ids[-n:]))
                if place is not None:
                    # Past the newest token the draft goes on as if it were the text: a short loop repeats.
                    period = len(self.ids) - place
                    return [self.ids[place + step % period] for step in range(length)], n
        return [], 0
