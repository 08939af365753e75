"""A profile as a shape policy: what each live batch size drafts with, worked out before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.core.types import MOST_NODES, BeamShape
from portadraft.errors import InvalidArgument
from portadraft.profiles.schema import BatchChoice, Profile, Shape

MOST_PASS = MOST_NODES + 1
"""Slots of one pass over all rows, above which a profile is not followed: the widest tree of a single row."""


@dataclass(frozen=True)
class ProfileShapes:
    """The shape by number of live rows; shapes[0] is that of one row. As rows finish, the shape follows."""

    shapes: tuple[BeamShape | None, ...]

    def choose(self, live: int) -> BeamShape | None:
        return self.shapes[min(live, len(self.shapes)) - 1]

    def observe(self, live: int, shape: BeamShape | None, tokens: int, seconds: float) -> None: ...

    def widest(self) -> BeamShape | None:
        drafting = [shape for shape in self.shapes if shape is not None]
        return max(drafting, key=BeamShape.slots, default=None)

    def said(self) -> str | None:
        return None

    def describe(self) -> str:
        """For stats."""
        return describe(self.shapes)


def describe(shapes: Sequence[BeamShape | None]) -> str:
    """The shapes by number of live rows, for stats: "4x4, 8 slots", or "1-2 rows: 4x4, 8 slots; 3-8 rows: plain"."""
    runs: list[tuple[int, int, BeamShape | None]] = []
    for live, shape in enumerate(shapes, start=1):
        if runs and runs[-1][2] == shape:
            runs[-1] = (runs[-1][0], live, shape)
        else:
            runs.append((live, live, shape))
    if len(runs) == 1:
        return str(Shape.of(runs[0][2]) or "plain decoding")
    rows = (str(first) if first == last else f"{first}-{last}" for first, last, _ in runs)
    return "; ".join(
        f"{which} row{'' if which == '1' else 's'}: {Shape.of(shape) or 'plain'}"
        for which, (_, _, shape) in zip(rows, runs, strict=True)
    )


def profile_policy(profile: Profile, rows: int) -> ProfileShapes:
    """The policy that follows a profile for up to `rows` rows decoded together.

    A pass that would be larger than MOST_PASS is made thinner. Raises: InvalidArgument for rows below 1.
    """
    if rows < 1:
        raise InvalidArgument(f"rows={rows!r}: expected at least 1")
    return ProfileShapes(tuple(_bounded(shape_at(profile.batches, live), live) for live in range(1, rows + 1)))


def _bounded(shape: BeamShape | None, live: int) -> BeamShape | None:
    """Thinner where one pass would hold more than MOST_PASS slots: whatever a profile says, memory stays bounded."""
    if shape is None or live * shape.slots() <= MOST_PASS:
        return shape
    return _thinner(shape, live * shape.slots() / MOST_PASS)


def shape_at(batches: Sequence[BatchChoice], live: int) -> BeamShape | None:
    """The shape for `live` rows, measured or between measured batch sizes; None decodes plainly.

    Between two sizes that draft, width, length and slots lie between theirs, by the logarithm of the size. Between
    one that drafts and one that does not, the nearer one decides (the plain one in a draw). Below the smallest size
    its own shape is taken. Above the largest the slots of all rows together stay what they were there, since it is
    they that make a pass slow.
    """
    ordered = sorted(batches, key=lambda choice: choice.batch_size)
    below = [choice for choice in ordered if choice.batch_size <= live]
    above = [choice for choice in ordered if choice.batch_size >= live]
    if not below:
        return _beam(above[0])
    if not above:
        return _thinner(_beam(below[-1]), live / below[-1].batch_size)
    low, high = below[-1], above[0]
    if low.batch_size == high.batch_size:
        return _beam(low)
    share = math.log(live / low.batch_size) / math.log(high.batch_size / low.batch_size)
    a, b = _beam(low), _beam(high)
    if a is None or b is None:
        return a if share < 0.5 else b
    width, length = _between(a.width, b.width, share), _between(a.length, b.length, share)
    # A budget above 1 + W x L is no mistake: a second drafter's candidates count, too.
    nodes = None if a.nodes is b.nodes is None else _between(a.nodes or a.slots(), b.nodes or b.slots(), share)
    return _fitting(width, length, nodes)


def _beam(choice: BatchChoice) -> BeamShape | None:
    return None if choice.shape is None else choice.shape.beam()


def _between(a: int, b: int, share: float) -> int:
    return round(math.exp((1 - share) * math.log(a) + share * math.log(b)))


def _thinner(shape: BeamShape | None, factor: float) -> BeamShape | None:
    """With the slots of one row divided by factor; plain where no drafted slot is left."""
    if shape is None:
        return None
    slots = int(shape.slots() / factor)
    if slots < 2:
        return None
    return _fitting(max(1, min(shape.width, round(shape.width / factor))), min(shape.length, slots - 1), slots)


def _fitting(width: int, length: int, nodes: int | None) -> BeamShape:
    return BeamShape(max(1, min(width, MOST_NODES // length)), length, None if nodes is None else max(2, nodes))
