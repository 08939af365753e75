"""Several drafters in one tree: packing does not care where a candidate came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from portadraft.core.drafter import Drafter
from portadraft.core.ops import Ops
from portadraft.core.types import Array, Beam, BeamShape, Verdict, Verified
from portadraft.errors import InvalidArgument


class Together:
    """The candidates of all its drafters side by side; a shared node counts with its best score."""

    def __init__(self, ops: Ops, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidArgument("drafters=[]: expected at least one")
        self._ops = ops
        self._drafters = tuple(drafters)
        self.name = "+".join(d.name for d in drafters)
        ids = [getattr(d, "id", "") for d in drafters]
        self.id = "+".join(ids) if all(ids) else ""
        needs = {d.wants for d in drafters}
        self.wants: Literal["none", "last", "all"] = "all" if "all" in needs else "last" if "last" in needs else "none"

    def candidates(self, shape: BeamShape) -> int:
        return sum(d.candidates(shape) for d in self._drafters)

    def depth(self, shape: BeamShape) -> int:
        return max(d.depth(shape) for d in self._drafters)

    def admit(self, row: int, ids: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.admit(row, ids)

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam | None:
        return self._join([drafter.draft(roots, features, shape) for drafter in self._drafters])

    def draft_lengths(self, roots: Array, features: Array, width: int, length: int) -> list[Beam | None]:
        """What `draft` returns for 1 … `length` tokens, where one search of a drafter serves them all."""
        parts = [draft_lengths(drafter, roots, features, width, length) for drafter in self._drafters]
        return [self._join(beams) for beams in zip(*parts, strict=True)]

    def _join(self, drafts: Sequence[Beam | None]) -> Beam | None:
        beams = [beam for beam in drafts if beam is not None]
        if len(beams) < 2:
            return beams[0] if beams else None
        ops = self._ops
        length = max(beam.tokens.shape[2] for beam in beams)
        return Beam(
            tokens=ops.concat([_lengthen(ops, b.tokens, length) for b in beams], axis=1),
            lengths=ops.concat([b.lengths for b in beams], axis=1),
            scores=ops.concat([_lengthen(ops, b.scores, length) for b in beams], axis=1),
            nodes=sum(b.tokens.shape[1] * b.tokens.shape[2] if b.nodes is None else b.nodes for b in beams),
        )

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None:
        for drafter in self._drafters:
            drafter.observe(tokens, verified, verdict)

    def truncate(self, row: int, length: int) -> None:
        for drafter in self._drafters:
            drafter.truncate(row, length)

    def release(self, row: int) -> None:
        for drafter in self._drafters:
            drafter.release(row)

    def memory(self, batch: int, context: int) -> int:
        return sum(d.memory(batch, context) for d in self._drafters)


def draft_lengths(drafter: Drafter, roots: Array, features: Array, width: int, length: int) -> list[Beam | None]:
    """What `drafter.draft` returns for widths of `width` and 1 … `length` tokens; one search where it offers that."""
    at_once = getattr(drafter, "draft_lengths", None)
    if at_once is not None:
        beams: list[Beam | None] = at_once(roots, features, width, length)
        return beams
    return [drafter.draft(roots, features, BeamShape(width, steps)) for steps in range(1, length + 1)]


def _lengthen(ops: Ops, x: Array, length: int) -> Array:
    """x (B, W, l) padded to (B, W, length); the lengths say what counts."""
    batch, width, have = x.shape
    if have == length:
        return x
    return ops.concat([x, ops.full((batch, width, length - have), 0, ops.dtype(x))], axis=2)
