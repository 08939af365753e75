"""Measuring fairly: alternatives take turns, and a disturbed machine is noticed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K")
R = TypeVar("R")


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
    of plain steps within the round, and plain steps far slower than in the quickest rounds.
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
        if before is not None and after is not None and wall > 0.3:  # the counters tick at 10 ms
            busy = (after - before) / wall / (os.cpu_count() or 1)
            if busy > self._load:
                return True
        ordered = sorted(plain_ms)
        inner = ordered[:-1] if len(ordered) > 3 else ordered  # one hiccup is no disturbance
        return inner[-1] > self._spread * inner[0] or middle > self._slower * quickest


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
