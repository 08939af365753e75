"""Measuring fairly: alternatives take turns, and a disturbed machine is noticed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K")
R = TypeVar("R")

UNEVEN_SHARE = 0.25
"""Of what was measured (rounds, parts): more that is disturbed makes the whole disturbed."""


def interleave(alternatives: Mapping[K, Callable[[], R]], repeats: int) -> dict[K, list[R]]:
    """Run every alternative `repeats` times in turns; the order flips each round."""
    results: dict[K, list[R]] = {name: [] for name in alternatives}
    names = list(alternatives)
    for round_number in range(repeats):
        for name in names if round_number % 2 == 0 else reversed(names):
            results[name].append(alternatives[name]())
    return results


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


class Disturbance:
    """Whether something else used the machine during a round.

    Told by three signs: other processes' share of the processors (if psutil is installed), the spread
    of plain steps within the round, and plain steps far slower than in the quickest rounds. Where the parts of a step
    are all that is timed (`end_of_parts`), their own spread takes the place of the rounds'.
    """

    def __init__(
        self,
        *,
        load: float = 0.15,
        spread: float = 1.6,
        slower: float = 1.35,
        others: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._load, self._spread, self._slower = load, spread, slower
        self._others = others or others_seconds
        self._clock = clock
        self._rounds: list[float] = []
        self._before: tuple[float, float | None] = (0.0, None)

    def begin(self) -> None:
        """A round begins."""
        self._before = self._clock(), self._others()

    def end(self, plain_ms: Sequence[float]) -> bool:
        """A round of these plain steps has ended: was it disturbed?"""
        start, before = self._before
        wall, after = self._clock() - start, self._others()
        middle = statistics.median(plain_ms)
        quickest = min([*self._rounds, middle])
        self._rounds.append(middle)
        if self._others_busy(wall, before, after):
            return True
        ordered = sorted(plain_ms)
        inner = ordered[:-1] if len(ordered) > 3 else ordered  # one hiccup is no disturbance
        return inner[-1] > self._spread * inner[0] or middle > self._slower * quickest

    def end_of_parts(self, timed: Mapping[int, Sequence[float]]) -> bool:
        """The parts of a step were timed since `begin`, several times each, over minutes: was that disturbed?

        timed: milliseconds of passes by slots, 1 being a plain step. A part is uneven where its quartiles are further
        apart than plain steps of a round may be: single hiccups, of which so many samples have some, do not count.
        """
        start, before = self._before
        if self._others_busy(self._clock() - start, before, self._others()):
            return True
        uneven = {slots: self._uneven(ms) for slots, ms in timed.items() if len(ms) >= 2}
        if uneven.get(1) and len(timed[1]) >= 3:
            return True
        return bool(uneven) and statistics.fmean(uneven.values()) > UNEVEN_SHARE

    def _uneven(self, ms: Sequence[float]) -> bool:
        low, _, high = statistics.quantiles(ms, n=4, method="inclusive")
        return high > self._spread * low

    def _others_busy(self, wall: float, before: float | None, after: float | None) -> bool:
        if before is None or after is None or wall <= 0.3:  # the counters tick at 10 ms
            return False
        return (after - before) / wall / (os.cpu_count() or 1) > self._load


def others_seconds() -> float | None:
    """Processor seconds that all other processes have used; None where that cannot be told."""
    try:
        import psutil
    except ImportError:
        return None
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guest time is counted within user time as well.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return float(total - idle - own.user - own.system)
