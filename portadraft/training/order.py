"""Which positions each update learns from, and its random numbers: functions of (seed, number of the update) alone.

So nothing about the order has to be stored to go on exactly where a run was killed, and several
processes agree on it without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portadraft.training.features import Features

Job = tuple[Features, NDArray[np.int64]]
"""A source, and some of its segments: what one process learns from in one update."""
Jobs = Callable[[int, int, np.random.Generator], list[Job]]
"""(positions of a job, length of a segment, generator) -> one epoch's jobs, as many in every epoch."""


def seed_for(seed: int, number: int, rank: int = 0) -> int:
    """The seed of an update's own random numbers (drop-out, which steps go on): below 2**63."""
    return int(np.random.SeedSequence([seed, 1, number, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def plain_jobs(sources: Sequence[Features], weights: Sequence[float]) -> Jobs:
    """Every source in random order. weights: the share of each that an epoch visits, another part each time."""

    def jobs(positions: int, segment: int, rng: np.random.Generator) -> list[Job]:
        out: list[Job] = []
        per = max(1, positions // segment)
        for source, weight in zip(sources, weights, strict=True):
            segments = source.segments(segment, held_out=False)
            segments = segments[rng.permutation(len(segments))[: int(len(segments) * weight)]]
            out += [(source, segments[i : i + per]) for i in range(0, len(segments), per)]
        return [out[k] for k in rng.permutation(len(out))]

    return jobs


@dataclass(frozen=True)
class Batch:
    """One update's jobs, one for each process but perhaps the last ones of an epoch.

    number: its index in the order; epoch: passes over the data before it.
    """

    number: int
    epoch: float
    jobs: list[Job]


class Order:
    """Epoch after epoch. positions: of one update, over all `world` processes."""

    def __init__(self, jobs: Jobs, positions: int, segment: int, seed: int, world: int = 1) -> None:
        self._jobs, self._positions, self._segment = jobs, max(1, positions // world), segment
        self._seed, self._world = seed, world
        self._epoch, self._laid = -1, list[Job]()
        first = self._epoch_jobs(0)
        self.per_epoch = -(-len(first) // world)
        self.positions_per_epoch = sum(int((s[:, 1] - s[:, 0]).sum()) for _, s in first)

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, self.per_epoch)
        jobs = self._epoch_jobs(epoch)
        return Batch(number, number / self.per_epoch, jobs[place * self._world : (place + 1) * self._world])

    def _epoch_jobs(self, epoch: int) -> list[Job]:
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 0, epoch])
            self._epoch, self._laid = epoch, self._jobs(self._positions, self._segment, rng)
        return self._laid
