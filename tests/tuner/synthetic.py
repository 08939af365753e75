"""Acceptance tables and devices by formula, for tests of the search."""

from __future__ import annotations

import numpy as np

from portadraft.tuner.acceptance import AcceptanceTable, Origin
from portadraft.tuner.costs import Costs, Curve
from portadraft.tuner.grid import Grid, Kind

RECORDINGS = 6


def table(drafter: str = "redrafter", first: float = 0.5, grid: Grid | None = None, seed: int = 0) -> AcceptanceTable:
    """Wider beams hold the truth more often, with falling gain; a budget cuts that; recordings differ a little."""
    grid = Kind.of(drafter).shapes(grid or Grid())
    kind = Kind.of(drafter)
    accepted = np.zeros((RECORDINGS, *grid.size))
    generator = np.random.default_rng(seed)
    quality = 1 + generator.normal(0, 0.08, RECORDINGS)
    for index, shape in grid.cells():
        full = 1 + shape.width * shape.length
        cut = min(1.0, kind.slots(shape, True) / full) ** 0.35
        p = min(0.9, first + 0.09 * np.log2(shape.width)) * cut
        accepted[:, *index] = sum(p**d for d in range(1, shape.length + 1)) * quality
    steps = np.full(accepted.shape, 400, np.int32)
    found = np.full(accepted.shape, 150 if kind.optional is not None else 0, np.int32)
    nodes = np.full(accepted.shape, 800, np.int32)
    return AcceptanceTable(
        grid,
        Origin(drafter, "made-up"),
        tuple("ab"[i % 2] for i in range(RECORDINGS)),
        steps,
        np.round(accepted * steps).astype(np.int32),
        found,
        nodes,
    )


def device(plain: float = 40.0, per_slot: float = 1.0, cliff: tuple[int, float] | None = None, batch: int = 1) -> Costs:
    """A straight cost with, where asked for, a jump of `cliff[1]` ms after `cliff[0]` slots."""
    slots = sorted({*range(1, 40), 48, 64, 96, 128, 192, 256, 300})
    jump = [cliff[1] if cliff and n > cliff[0] else 0.0 for n in slots]
    check = Curve(tuple(slots), tuple(plain + per_slot * batch * (n - 1) + j for n, j in zip(slots, jump, strict=True)))
    lengths = tuple(range(1, 9))
    draft = {
        w: Curve(lengths, tuple(0.5 + n * (1.2 + 0.12 * w * batch) for n in lengths)) for w in (1, 2, 4, 8, 16, 32)
    }
    return Costs(batch, 200, check, draft)
