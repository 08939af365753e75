"""What a run of `tune` found: by drafter and batch size, and which drafter wins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from portadraft.core.drafter import Drafter
from portadraft.core.types import BeamShape
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.costs import Costs
from portadraft.tuner.fit import Timings
from portadraft.tuner.predict import Prediction
from portadraft.tuner.search import Result


@dataclass
class DrafterResult:
    """What was found for one drafter: a result for each batch size, in order."""

    name: str
    reason: str
    drafter: Drafter
    table: AcceptanceTable
    results: list[Result] = field(default_factory=list)
    costs: list[tuple[Costs, Timings]] = field(default_factory=list)

    def score(self, batches: Collection[int] | None = None) -> float:
        """Mean log speed over batch sizes (None: all that it has), to compare drafters."""
        logs = [np.log(r.tokens_per_s) for r in self.results if batches is None or r.batch in batches]
        return float(np.mean(logs)) if logs else -np.inf


@dataclass
class Outcome:
    """All of a run. best: the drafter that wins. notes: for people. stopped: by Ctrl-C, wherever that was."""

    model: str
    config: TuneConfig
    drafters: list[DrafterResult]
    run: str
    notes: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def best(self) -> DrafterResult:
        # A drafter that lacks a batch size (interrupted, out of memory) is compared by those that all have.
        common = set.intersection(*({r.batch for r in d.results} for d in self.drafters))
        return max(self.drafters, key=lambda d: d.score(common or None))

    @property
    def disturbed(self) -> bool:
        return any(r.disturbed for d in self.drafters for r in d.results)

    @property
    def interrupted(self) -> bool:
        return self.stopped or any(r.interrupted for d in self.drafters for r in d.results)

    @property
    def recommended_batch_size(self) -> int | None:
        """The batch size with the most tokens per second in all, for the objective "throughput"."""
        if self.config.objective != "throughput" or not self.best.results:
            return None
        return max(self.best.results, key=lambda r: r.tokens_per_s).batch


def predicted(prediction: Prediction, seconds: float, disturbed: bool = False) -> Result:
    """A result without whole steps, of which there is no spread. disturbed: its costs were measured while the machine
    was busy.
    """
    best = prediction.best()
    tokens = 1.0 if best is None else float(prediction.tokens_per_step[prediction.table.grid.index(best)])
    rate, plain = prediction.of(best), prediction.plain_tokens_per_s
    return Result(
        prediction.costs.batch, best, rate, plain, 0.0, tokens, prediction, disturbed=disturbed, seconds=seconds
    )


def shape_name(shape: BeamShape | None) -> str:
    """For people."""
    if shape is None:
        return "plain"
    return f"{shape.width}x{shape.length}" + (f"/{shape.nodes}" if shape.nodes else "")
