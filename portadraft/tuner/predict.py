"""Tokens per second of every shape: acceptance ÷ cost. What cannot fit into memory is nan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portadraft.core.types import BeamShape
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.costs import Costs


@dataclass(frozen=True)
class Prediction:
    """Over the grid of the table, each (W, L, N). tokens_per_s: over all rows of the batch; nan: infeasible."""

    table: AcceptanceTable
    costs: Costs
    step_ms: NDArray[np.float64]
    tokens_per_step: NDArray[np.float64]

    @property
    def tokens_per_s(self) -> NDArray[np.float64]:
        rate: NDArray[np.float64] = self.costs.batch * 1000.0 * self.tokens_per_step / self.step_ms
        return rate

    @property
    def plain_tokens_per_s(self) -> float:
        return self.costs.batch * 1000.0 / self.costs.plain_ms

    def of(self, shape: BeamShape | None) -> float:
        """Tokens per second of a shape of the grid; None: plain decoding."""
        if shape is None:
            return self.plain_tokens_per_s
        return float(self.tokens_per_s[self.table.grid.index(shape)])

    def distinct(self) -> list[BeamShape]:
        """The feasible shapes, best first; of shapes whose budget makes no difference, the one without."""
        seen: dict[tuple[int, int, int], BeamShape] = {}
        for index, shape in self.table.grid.cells():
            if np.isfinite(self.step_ms[index]):
                slots = self.table.kind.slots(shape, True)
                before = seen.get((shape.width, shape.length, slots))
                if before is None or shape.nodes is None:
                    seen[shape.width, shape.length, slots] = shape
        return sorted(seen.values(), key=self.of, reverse=True)

    def best(self) -> BeamShape | None:
        """The fastest by prediction, or None where plain decoding is."""
        shapes = self.distinct()
        return shapes[0] if shapes and self.of(shapes[0]) > self.plain_tokens_per_s else None


def predict(
    table: AcceptanceTable,
    costs: Costs,
    *,
    rows: NDArray[np.int64] | None = None,
    infeasible: Collection[int] = (),
    most_slots: int | None = None,
) -> Prediction:
    """Combine the two. rows: only these recordings count. most_slots: passes over more do not fit into memory."""
    kind, found = table.kind, table.found_share(rows)
    step = np.full(table.grid.size, np.nan)
    for index, shape in table.grid.cells():
        slots = kind.slots(shape, True)
        if slots in infeasible or (most_slots is not None and slots > most_slots):
            continue
        step[index] = costs.step_ms(kind, shape, float(found[index]))
    return Prediction(table, costs, step, table.tokens_per_step(rows))
