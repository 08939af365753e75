"""The shapes that are considered: an enumerated grid, so that nothing is guessed between its points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portadraft.core.types import MOST_NODES, BeamShape
from portadraft.drafters.select import LOOKUP_LENGTH
from portadraft.errors import InvalidArgument

ALL = 0
"""Stands for "no node budget" where a number is needed."""


@dataclass(frozen=True)
class Grid:
    """widths W × lengths L × node budgets N (`ALL` keeps every node)."""

    widths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    budgets: tuple[int, ...] = (4, 8, 16, 32, ALL)

    def __post_init__(self) -> None:
        for name in ("widths", "lengths", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InvalidArgument(f"{name}={values!r}: expected different numbers, at least one")
        if min(self.widths) < 1 or max(self.widths) * max(self.lengths) > MOST_NODES:
            raise InvalidArgument(
                f"widths={self.widths!r}, lengths={self.lengths!r}: expected widths of at least 1 and at most "
                f"{MOST_NODES} drafted tokens"
            )
        if self.lengths != tuple(range(1, len(self.lengths) + 1)):
            raise InvalidArgument(f"lengths={self.lengths!r}: expected 1, 2, 3, … (one search serves them all)")
        if any(n != ALL and n < 2 for n in self.budgets):
            raise InvalidArgument(f"budgets={self.budgets!r}: expected numbers of at least 2, or {ALL} for no budget")

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.widths), len(self.lengths), len(self.budgets)

    def cells(self) -> Iterator[tuple[tuple[int, int, int], BeamShape]]:
        """Every index (w, l, n) and its shape."""
        for w, width in enumerate(self.widths):
            for k, length in enumerate(self.lengths):
                for n, budget in enumerate(self.budgets):
                    yield (w, k, n), BeamShape(width, length, budget or None)

    def index(self, shape: BeamShape) -> tuple[int, int, int]:
        """Where a shape stands. Raises: InvalidArgument if it is not in the grid."""
        try:
            return (
                self.widths.index(shape.width),
                self.lengths.index(shape.length),
                self.budgets.index(shape.nodes or ALL),
            )
        except ValueError:
            raise InvalidArgument(f"shape={shape!r}: not in the grid {self}") from None


@dataclass(frozen=True)
class Kind:
    """What a drafter's name says about the static size of its passes.

    always: whether every step drafts W·L nodes. optional: nodes that are there only where something was found
    (a lookup's candidate): its length, or 0 where it is as long as the beam; None where there is no such part.
    """

    always: bool
    optional: int | None

    @staticmethod
    def of(drafter: str) -> Kind:
        """From a drafter's name, such as "redrafter+lookup"."""
        parts = drafter.split("+")
        lookup = "lookup" in parts
        always = any(part != "lookup" for part in parts)
        return Kind(always, (LOOKUP_LENGTH if always else 0) if lookup else None)

    def slots(self, shape: BeamShape, found: bool) -> int:
        """Slots of the pass (1: a plain one), where the optional part was found or not."""
        nodes = shape.width * shape.length if self.always else 0
        if found and self.optional is not None:
            nodes += self.optional or shape.length
        return 1 + nodes if shape.nodes is None else min(shape.nodes, 1 + nodes)

    def depth(self, shape: BeamShape, found: bool) -> int:
        """The greatest depth of the pass."""
        depth = shape.length if self.always else 0
        return max(depth, self.optional or shape.length) if found and self.optional is not None else depth

    def shapes(self, grid: Grid) -> Grid:
        """The grid without what makes no difference: a lookup has one candidate."""
        return grid if self.always else Grid((1,), grid.lengths, (ALL,))
