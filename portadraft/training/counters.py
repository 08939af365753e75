"""Where a training run stands, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Params = dict[str, Tensor]
Report = Callable[[dict[str, Any]], None]


@dataclass
class Counters:
    """Where a run stands: all of its state but the tensors.

    number: batches taken from the order; updates: those that changed the parameters; positions: trained on; rows:
    drafting steps at positions, which is what the work goes by. skipped: what was left out, and why.
    norms: the latest gradients' norms. stale: evaluations since the best. seconds: spent, over all sessions.
    """

    number: int = 0
    updates: int = 0
    positions: int = 0
    rows: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    skipped_updates: int = 0
    norms: list[float] = field(default_factory=list)
    score: float = -1.0
    stale: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, int] | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    ended: str = ""


@dataclass
class FitResult:
    """The best averaged parameters, and what was seen on the way (see `Counters`).

    score: tokens per step of the first shape, -1 where nothing was held out. ended: why it ended, in words.
    """

    params: Params
    score: float
    history: list[dict[str, Any]]
    updates: int
    positions: int
    rows: int
    skipped: int
    skipped_where: list[dict[str, Any]]
    planned: int
    seconds: float
    peak_bytes: int
    ended: str
