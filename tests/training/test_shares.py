"""Halves by positions: as much in every epoch, in as many jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from portadraft.bench.study import shared


def source(seed: int) -> Any:
    """Segments of very different lengths, as many short documents give."""
    lengths = np.random.default_rng(seed).choice([1, 2, 3, 32], size=200)
    ends = np.cumsum(lengths)
    segments = np.stack([ends - lengths, ends, ends], axis=1)
    return SimpleNamespace(segments=lambda length, held_out: segments.copy(), total=int(ends[-1]))


def test_a_share_is_of_positions_and_every_epoch_has_as_many_jobs() -> None:
    one, other = source(1), source(2)
    jobs = shared([one, other], [0.5, 1.0])
    counts = set()
    for epoch in range(40):
        made = jobs(128, 32, np.random.default_rng(epoch))
        counts.add(len(made))
        taken = [sum(int((s[:, 1] - s[:, 0]).sum()) for of, s in made if of is which) for which in (one, other)]
        assert 0 <= taken[0] - round(one.total / 2) < 32 and taken[1] == other.total
        assert all(len(s) for _, s in made)
    assert len(counts) == 1
