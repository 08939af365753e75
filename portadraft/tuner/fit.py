"""Timing the parts of a step: a ladder of slots, more points where the curve jumps, a few lengths for each width.

What says most comes first, so that a slow device gives a coarse picture in time rather than a fine one late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from portadraft.tuner.costs import Costs, Curve
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.machine import Machine, is_out_of_memory

T = TypeVar("T")
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
USELESS = 4.0
"""Steps that cost more than so many plain ones are not worth an exact figure: nothing accepts as much."""
_JUMP = 0.12
_FINER = 8
_COLD = 64
"""Passes over fewer slots are run once before they are timed; of larger ones even the first takes long enough."""
_HURRY = 60
"""Where fewer plain steps than that fit into the time, nothing is run without being timed."""


@dataclass
class Timings:
    """Raw milliseconds: of checks by slots, of drafts by (width, length); slots that did not fit into memory."""

    check: dict[int, list[float]] = field(default_factory=dict)
    draft: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    depth: dict[int, list[float]] = field(default_factory=dict)
    too_large: int | None = None

    def costs(self, batch: int, context: int, check_depth: int) -> Costs:
        """The model fitted to them."""
        widths = sorted({w for w, _ in self.draft})
        draft = {w: _by_length({n: ms for (v, n), ms in self.draft.items() if v == w}) for w in widths}
        slope = 0.0
        if len(self.depth) > 1:
            low, high = min(self.depth), max(self.depth)
            slope = max(0.0, (min(self.depth[high]) - min(self.depth[low])) / (high - low))
        return Costs(batch, context, Curve.fit(self.check), draft, slope, check_depth)


def measure_costs(
    machine: Machine,
    kind: Kind,
    grid: Grid,
    *,
    seconds: float,
    fits: Callable[[int], bool] = lambda slots: True,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[str], None] | None = None,
) -> tuple[Costs, Timings]:
    """Time what the grid needs within about `seconds`; a plain step, one pass over several slots and one draft always.

    fits: whether a pass over that many slots is expected to fit into memory; what it denies is not tried.
    """
    return _Fit(machine, kind, grid, seconds, fits, clock, report or (lambda text: None)).run(repeats)


@dataclass
class _Fit:
    """One run of `measure_costs`."""

    machine: Machine
    kind: Kind
    grid: Grid
    seconds: float
    fits: Callable[[int], bool]
    clock: Callable[[], float]
    say: Callable[[str], None]
    timings: Timings = field(default_factory=Timings)
    plain: float = 0.0  # milliseconds
    hurry: bool = False

    def run(self, repeats: int) -> tuple[Costs, Timings]:
        start, timings, machine = self.clock(), self.timings, self.machine
        self.depth = min(4, len(self.grid.lengths))
        needed = {self.kind.slots(shape, True) for _, shape in self.grid.cells()}
        timings.too_large = min((n for n in needed if not self.fits(n)), default=None)
        self.most = max(n for n in needed | {1} if timings.too_large is None or n < timings.too_large)
        self._warm_up()
        kept = self._ladder(start + 0.6 * self.seconds)
        pairs = self._drafts(start + self.seconds)
        for number in range(1, repeats):
            if self.clock() > start + self.seconds:
                break
            self._repeat(kept, pairs, number)
            if number == 2:
                kept = self._finer(kept, start + self.seconds)
        return timings.costs(machine.batch, machine.context, self.depth), timings

    def _check(self, slots: int, keep: bool = True) -> bool:
        """One pass; whether it fitted."""
        ms = self._fitting(slots, self.depth)
        if ms is not None and keep:
            self.timings.check.setdefault(slots, []).append(ms)
        return ms is not None

    def _fitting(self, slots: int, depth: int) -> float | None:
        try:
            return self.machine.check_ms(slots, depth)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            before = self.timings.too_large
            self.timings.too_large = slots if before is None else min(slots, before)
            return None

    def _warm_up(self) -> None:
        """The first passes of each kind are slow. What a plain step takes, and so whether there is time for that."""
        first = self.machine.check_ms(1, self.depth)
        self.hurry = first * _HURRY > 1000 * self.seconds
        self.plain = first
        if self.hurry:
            return
        self._check(min(8, self.most), keep=False)
        self.machine.draft_ms(self.grid.widths[0], 1)
        self.plain = min(self.machine.check_ms(1, self.depth) for _ in range(2))

    def _ladder(self, end: float) -> list[int]:
        """The slots that were timed once: a coarse ladder first, then what lies between."""
        kept: list[int] = []
        useless: float = float("inf")  # from so many slots on passes cost too much to be worth an exact figure
        ladder = [n for n in LADDER if n < self.most] + [self.most]
        for slots in [*ladder[::3], *(n for n in ladder if n not in ladder[::3])]:
            if slots > useless or (self.timings.too_large or slots + 1) <= slots:
                continue
            if self.clock() > end and len(kept) >= min(2, len(ladder)):
                break
            self.say(f"a pass over {slots} slots")
            cold = slots < _COLD and not self.hurry
            if (cold and not self._check(slots, keep=False)) or not self._check(slots):
                continue
            kept.append(slots)
            ms = self.timings.check[slots]
            if slots == 1:
                self.plain = min(self.plain, ms[0])
            if ms[0] > USELESS * self.plain and not self.hurry:
                self._check(slots)  # once more, since one slow step may be a hiccup
            if min(ms) > USELESS * self.plain:
                useless = slots
        return sorted(n for n in kept if n <= useless)

    def _drafts(self, end: float) -> list[tuple[int, int]]:
        """Time each width at a few lengths; the pairs that are worth repeating."""
        longest = len(self.grid.lengths)
        wanted = [
            (width, length)
            for length in dict.fromkeys((min(4, longest), longest, 1))
            for width in coarse_first(self.grid.widths)
        ]
        pairs = []
        for width, length in wanted:
            if self.clock() > end and self.timings.draft:
                break
            self.say(f"drafting {width}x{length}")
            if not self.hurry:
                self.machine.draft_ms(width, length)
            ms = self.machine.draft_ms(width, length)
            self.timings.draft[width, length] = [ms]
            if ms < USELESS * self.plain:
                pairs.append((width, length))
        return pairs

    def _repeat(self, kept: Sequence[int], pairs: Sequence[tuple[int, int]], number: int) -> None:
        """Everything once more; the order flips each time."""
        for slots in kept if number % 2 else reversed(kept):
            self._check(slots)
        for pair in pairs if number % 2 else reversed(pairs):
            self.timings.draft[pair].append(self.machine.draft_ms(*pair))
        if self.most > 8:
            for depth in (1, 8):
                ms = self._fitting(9, depth)
                if ms is not None:
                    self.timings.depth.setdefault(depth, []).append(ms)

    def _finer(self, kept: list[int], end: float) -> list[int]:
        """Halve the intervals in which the curve rises most, until each jump stands between neighbours."""
        for _ in range(_FINER):
            curve = Curve.fit(self.timings.check)
            pairs = [(a, b) for a, b in pairwise(kept) if b - a > 1 and curve(a) < 2.5 * self.plain]
            gaps = [(curve(b) - curve(a), a, b) for a, b in pairs]
            if self.clock() > end or not gaps or max(gaps)[0] < _JUMP * self.plain:
                break
            _, a, b = max(gaps)
            middle = (a + b) // 2
            if not all(self._check(middle) for _ in range(3)):
                break
            kept = sorted([*kept, middle])
        return kept


def coarse_first(values: Sequence[T]) -> list[T]:
    """The first and the last, then the middles of what lies between, again and again."""
    out, parts = list(dict.fromkeys((values[0], values[-1]))), [(0, len(values) - 1)]
    while parts:
        low, high = parts.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            out.append(values[middle])
            parts += [(low, middle), (middle, high)]
    return out


def _by_length(samples: dict[int, list[float]]) -> Curve:
    """A width's drafting by length. From a single length it is taken to go token by token."""
    curve = Curve.fit(samples)
    if len(samples) > 1:
        return curve
    length, ms = curve.at[0], curve.ms[0]
    return Curve((0, length), (0.0, ms)) if length else curve
