"""How many updates a run makes, and when it evaluates: fixed before the first one, so that no clock decides later."""

from __future__ import annotations

import math
from dataclasses import dataclass

EPOCHS = 4.0
"""Passes over the data where nothing else ends a run."""
EVALUATING = 0.25
"""The largest share of a time budget that evaluations may take."""


@dataclass(frozen=True)
class Plan:
    """updates: how many; evaluate_every: updates between evaluations."""

    updates: int
    evaluate_every: int


def planned(
    per_epoch: int,
    epochs: float | None,
    positions_per_epoch: int,
    tokens: int | None,
    seconds: float | None,
    update_seconds: float,
    evaluation_seconds: float,
    evaluations: int,
) -> Plan:
    """The least of what passes over the data, tokens and time allow, at least one update.

    per_epoch: updates of one pass, which learns from `positions_per_epoch` positions. seconds: the time for
    updates and evaluations together, which take `update_seconds` and `evaluation_seconds` each.
    """
    if epochs is None:
        epochs = EPOCHS if tokens is None and seconds is None else math.inf
    updates: float = per_epoch * epochs
    if tokens is not None:
        updates = min(updates, tokens / max(positions_per_epoch / per_epoch, 1e-9))
    if seconds is not None:
        affordable = int(EVALUATING * seconds / max(evaluation_seconds, 1e-9))
        evaluations = max(1, min(evaluations, affordable))
        left = seconds - evaluations * evaluation_seconds
        updates = min(updates, left / max(update_seconds, 1e-9))
    whole = max(math.ceil(updates), 1)
    return Plan(whole, max(1, math.ceil(whole / evaluations)))
