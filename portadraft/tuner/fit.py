"""Timing the parts of a step: a ladder of slots, more points where the curve jumps, a few lengths for each width."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from portadraft.tuner.costs import Costs, Curve
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.machine import Machine, is_out_of_memory

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
USELESS = 4.0
"""Steps that cost more than so many plain ones are not worth an exact figure: nothing accepts as much."""
_JUMP = 0.12
_FINER = 8


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
        draft = {w: Curve.fit({n: ms for (v, n), ms in self.draft.items() if v == w}) for w in widths}
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
    """Time what the grid needs within about `seconds`; the first round always runs.

    fits: whether a pass over that many slots is expected to fit into memory; what it denies is not tried.
    """
    timings, depth, end = Timings(), min(4, len(grid.lengths)), clock() + seconds
    needed = {kind.slots(shape, True) for _, shape in grid.cells()}
    timings.too_large = min((n for n in needed if not fits(n)), default=None)
    most = max(n for n in needed | {1} if timings.too_large is None or n < timings.too_large)
    ladder = [n for n in LADDER if n < most] + [most]
    say = report or (lambda text: None)

    def check(slots: int, at: int = depth, into: dict[int, list[float]] | None = None, key: int | None = None) -> bool:
        """Whether it fitted."""
        try:
            ms = machine.check_ms(slots, at)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            timings.too_large = slots if timings.too_large is None else min(slots, timings.too_large)
            return False
        (timings.check if into is None else into).setdefault(slots if key is None else key, []).append(ms)
        return True

    cold: dict[int, list[float]] = {}  # the first passes of each kind are slow
    for slots in (1, 8, 1):
        check(min(slots, most), depth, cold)
    machine.draft_ms(grid.widths[0], 1)
    plain = min(machine.check_ms(1, depth) for _ in range(2))

    kept = []
    for slots in ladder:
        say(f"a pass over {slots} slots")
        if (slots < 64 and not check(slots, depth, cold)) or not check(slots):
            break
        kept.append(slots)
        if timings.check[slots][0] > USELESS * plain:
            check(slots)  # once more, since one slow step may be a hiccup
            if min(timings.check[slots]) > USELESS * plain:
                break
    lengths = sorted({1, min(4, len(grid.lengths)), len(grid.lengths)})
    pairs = []
    for width in grid.widths:
        for length in lengths:
            say(f"drafting {width}x{length}")
            machine.draft_ms(width, length)
            ms = machine.draft_ms(width, length)
            timings.draft[width, length] = [ms]
            if ms < USELESS * plain:
                pairs.append((width, length))
    for round_number in range(1, repeats):
        if clock() > end:
            break
        for slots in kept if round_number % 2 else reversed(kept):
            check(slots)
        for pair in pairs if round_number % 2 else reversed(pairs):
            timings.draft[pair].append(machine.draft_ms(*pair))
        if most > 8:
            for at in (1, 8):
                check(9, at, timings.depth, at)
        if round_number == 2:
            kept = _finer(timings, kept, plain, check, lambda: clock() > end)
    return timings.costs(machine.batch, machine.context, depth), timings


def _finer(
    timings: Timings, kept: list[int], plain: float, check: Callable[[int], bool], late: Callable[[], bool]
) -> list[int]:
    """Halve the intervals in which the curve rises most, until each jump stands between neighbours."""
    for _ in range(_FINER):
        curve = Curve.fit(timings.check)
        pairs = [(a, b) for a, b in pairwise(kept) if b - a > 1 and curve(a) < 2.5 * plain]
        gaps = [(curve(b) - curve(a), a, b) for a, b in pairs]
        if late() or not gaps or max(gaps)[0] < _JUMP * plain:
            break
        _, a, b = max(gaps)
        middle = (a + b) // 2
        if not all(check(middle) for _ in range(3)):
            break
        kept = sorted([*kept, middle])
    return kept
