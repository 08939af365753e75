"""Interleaved timing: alternatives take turns, so that a machine's drift hits all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
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
