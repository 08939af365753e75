"""What a step costs on a device: drafting (W, L), and checking N slots, with the steps that kernels make.

A cost model is fitted to timings, or given as a curve for a device that is not here. Costs
depend on device, backend, data type, architecture, batch size and context, and on no text.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.tuner.grid import Kind

_MOST_MS = 1e18
"""Far above any step, curves that go on past their last point included; infinities and NaN are not below it."""


@dataclass(frozen=True)
class Curve:
    """A rising function of a count through measured points: straight between neighbours, so that a jump is as steep
    as the points around it are close; past the last point it goes on with the slope of the last third.
    """

    at: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.at or len(self.at) != len(self.ms) or list(self.at) != sorted(set(self.at)):
            raise InvalidArgument(f"at={self.at!r}, ms={self.ms!r}: expected rising counts, each with a time")
        if self.at[0] < 0 or any(not 0 <= x < _MOST_MS for x in self.ms):
            raise InvalidArgument(f"ms={self.ms!r:.200}: expected milliseconds from 0 to {_MOST_MS:g}")

    def __call__(self, count: float) -> float:
        at, ms = self.at, self.ms
        if count <= at[0]:
            return ms[0]
        if count >= at[-1]:
            return ms[-1] + (count - at[-1]) * self._last_slope()
        i = bisect.bisect_right(at, count)
        share = (count - at[i - 1]) / (at[i] - at[i - 1])
        return ms[i - 1] + share * (ms[i] - ms[i - 1])

    def _last_slope(self) -> float:
        if len(self.at) < 2:
            return 0.0
        i = min(bisect.bisect_left(self.at, self.at[-1] * 2 / 3), len(self.at) - 2)
        return (self.ms[-1] - self.ms[i]) / (self.at[-1] - self.at[i])

    @staticmethod
    def fit(samples: Mapping[int, Sequence[float]]) -> Curve:
        """The rising curve nearest to the medians (isotonic regression, weighted by the number of samples)."""
        counts = sorted(samples)
        blocks: list[tuple[float, float, int]] = []  # mean, weight, points
        for count in counts:
            mean, weight, points = statistics.median(samples[count]), float(len(samples[count])), 1
            while blocks and blocks[-1][0] > mean:
                m, w, p = blocks.pop()
                mean, weight, points = (m * w + mean * weight) / (w + weight), w + weight, points + p
            blocks.append((mean, weight, points))
        return Curve(tuple(counts), tuple(mean for mean, _, points in blocks for _ in range(points)))


@dataclass(frozen=True)
class Costs:
    """Milliseconds at one batch size and context.

    check: of a step over N slots (pass, acceptance, commit; drafting left out), at depth `check_depth`, 1 slot being
    a plain step. depth_ms: for each further depth of the walk. draft: by width, of drafting and packing by length.
    """

    batch: int
    context: int
    check: Curve
    draft: Mapping[int, Curve]
    depth_ms: float = 0.0
    check_depth: int = 4

    @property
    def plain_ms(self) -> float:
        return self.check(1)

    def check_ms(self, slots: int, depth: int) -> float:
        """A step's cost without drafting."""
        if slots <= 1:
            return self.plain_ms
        return max(self.check(slots) + self.depth_ms * (depth - self.check_depth), 0.0)

    def draft_ms(self, width: int, length: int) -> float:
        """Drafting and packing; straight between measured widths."""
        widths = sorted(self.draft)
        if not widths:
            return 0.0
        if width in self.draft:
            return self.draft[width](length)
        low = max((w for w in widths if w < width), default=widths[0])
        high = min((w for w in widths if w > width), default=widths[-1])
        if low == high or width < widths[0]:
            low, high = (widths[-2], widths[-1]) if len(widths) > 1 and width > widths[-1] else (widths[0], widths[0])
        a, b = self.draft[low](length), self.draft[high](length)
        return a if low == high else a + (width - low) / (high - low) * (b - a)

    def step_ms(self, kind: Kind, shape: BeamShape, found: float) -> float:
        """An average step. found: the share of steps of ONE row in which its optional part is there."""
        any_row = 1.0 - (1.0 - found) ** self.batch if kind.optional is not None else 0.0
        with_it = self.check_ms(kind.slots(shape, True), kind.depth(shape, True)) if any_row else 0.0
        without = self.check_ms(kind.slots(shape, False), kind.depth(shape, False)) if any_row < 1 else 0.0
        return self.draft_ms(shape.width, shape.length) + any_row * with_it + (1 - any_row) * without

    def seen_ms(self, kind: Kind, shape: BeamShape, slots: int) -> float:
        """A step of which the slots are known (1: it found nothing to draft)."""
        found = kind.optional is not None and slots == kind.slots(shape, True)
        return self.draft_ms(shape.width, shape.length) + self.check_ms(slots, kind.depth(shape, found))
