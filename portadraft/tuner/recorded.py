"""A device's costs from published whole-step timings, of which the parts are not known.

A step over rows = W·(L + 1) (nothing deduplicated) is taken to cost

    base + per_row · rows + per_length · L + jump · [rows > last]

by least absolute deviations (one cell of a recording is often a cold start). The jump is what kernels
do; where the data leave its place open, it is put as early as they allow, so that nothing is
recommended beyond the last count of rows that is known to be cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portadraft.errors import InvalidArgument

Cell = tuple[int, int]
_ROUNDS = 60
_NOTABLE = 0.15


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step. last: the greatest count of rows before the jump, None where there is none."""

    base: float
    per_row: float
    per_length: float
    jump: float
    last: int | None

    def __call__(self, width: int, length: int) -> float:
        rows = width * (length + 1)
        late = self.last is not None and rows > self.last
        return self.base + self.per_row * rows + self.per_length * length + (self.jump if late else 0.0)


def fit_steps(step_ms: Mapping[Cell, float]) -> StepCosts:
    """Fit to milliseconds of a step by (W, L). Raises: InvalidArgument for fewer than five cells."""
    if len(step_ms) < 5:
        raise InvalidArgument(f"step_ms: {len(step_ms)} cells; expected at least five, to tell four parts apart")
    cells = list(step_ms)
    y = np.array([step_ms[c] for c in cells])
    rows = np.array([w * (n + 1) for w, n in cells], float)
    length = np.array([n for _, n in cells], float)
    plain = np.stack([np.ones(len(y)), rows, length], axis=1)
    best, coefficients, last = _fit(plain, y)[0], _fit(plain, y)[1], None
    for at in sorted(set(rows.tolist()))[:-1]:
        late = (rows > at).astype(float)
        error, found = _fit(np.concatenate([plain, late[:, None]], axis=1), y)
        if error < best * 0.6 and found[3] > _NOTABLE * float(np.median(y)):
            best, coefficients, last = error, found, int(at)
    jump = float(coefficients[3]) if last is not None else 0.0
    return StepCosts(float(coefficients[0]), float(coefficients[1]), float(coefficients[2]), jump, last)


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Least absolute deviations by reweighting, relative to y: the mean relative error, and the coefficients."""
    weight = 1.0 / y
    solution: NDArray[np.float64] = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        scale = np.sqrt(weight)
        solution = np.asarray(np.linalg.lstsq(x * scale[:, None], y * scale, rcond=None)[0], np.float64)
        solution = np.maximum(solution, 0.0) if (solution[1:3] < 0).any() else solution
        weight = 1.0 / (y * np.maximum(np.abs(y - x @ solution), 1e-3 * y))
    return float(np.mean(np.abs(y - x @ solution) / y)), solution
