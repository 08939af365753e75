"""Predicted tokens per second (replayed acceptance × cost of the parts) against whole answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portadraft.bench.answers import STRIDE, Decoded
from portadraft.core.types import BeamShape
from portadraft.tuner.acceptance import AcceptanceTable, make_table
from portadraft.tuner.outcome import DrafterResult, shape_name
from portadraft.tuner.predict import Prediction, predict
from portadraft.tuner.recordings import record
from portadraft.tuner.run import Tuner
from portadraft.tuner.search import Result

SLOWEST = 0.3


def spread(prediction: Prediction, count: int) -> list[BeamShape]:
    """Shapes spread evenly over the logarithm of the predicted speed, from the fastest to the slowest.

    By rank most of them would lie within a few percent of each other, where noise alone decides the order. What is
    predicted to be slower than 0.3 of the best is nobody's candidate and left out.
    """
    shapes = prediction.distinct()
    shapes = [s for s in shapes if prediction.of(s) >= SLOWEST * prediction.of(shapes[0])]
    if count >= len(shapes):
        return shapes
    logs = [math.log(prediction.of(shape)) for shape in shapes]
    left, out = list(range(len(shapes))), []
    for i in range(count):
        wanted = logs[0] + (logs[-1] - logs[0]) * i / max(count - 1, 1)
        out.append(min(left, key=lambda k, wanted=wanted: abs(logs[k] - wanted)))  # type: ignore[misc]
        left.remove(out[-1])
    return [shapes[i] for i in sorted(out)]


def replayed(tune: Tuner, one: DrafterResult, batch: int, rounds: int, tokens: int) -> AcceptanceTable:
    """Acceptance over exactly the answers that the rounds decode: an answer's beginning accepts less than its whole."""
    numbers = [(n * batch * STRIDE + i) % len(tune.ids) for n in range(rounds) for i in range(batch)]
    config, facts = tune.config, tune.target.facts
    ids = [tune.ids[i] for i in numbers]
    recordings = record(tune.target, ids, max_tokens=tokens, temperature=config.temperature, batch=batch)
    origin = replace(one.table.origin, prompts="")
    return make_table(tune.target.ops, one.drafter, recordings, origin, one.table.grid, dtype=facts.dtype)


def predictions(
    table: AcceptanceTable,
    result: Result,
    done: dict[BeamShape | None, list[Decoded]],
    shapes: Sequence[BeamShape],
) -> dict[str, Any]:
    """Predicted (replayed acceptance of the same answers × cost of the parts) against measured tokens per second.

    As it stands, and with the machine's drift taken out: speed in steps of plain decoding just before and after, the
    median over rounds, at the plain speed that the costs were measured with.
    """
    prediction = predict(table, result.prediction.costs)
    plain = prediction.plain_tokens_per_s
    lines: list[dict[str, Any]] = []
    for shape in shapes:
        rounds = done[shape]
        measured = statistics.geometric_mean([d.tokens_per_s for d in rounds])
        tokens = len(rounds) / sum(1 / d.tokens_per_step for d in rounds)
        steady = plain * tokens * statistics.median(d.plain_ms / d.step_ms for d in rounds)
        predicted = prediction.of(shape)
        lines.append(
            {
                "shape": shape_name(shape),
                "predicted": round(predicted, 2),
                "measured": round(measured, 2),
                "measured_without_drift": round(steady, 2),
                "tokens_per_step": [
                    round(float(prediction.tokens_per_step[table.grid.index(shape)]), 3),
                    round(tokens, 3),
                ],
                "step_ms": [
                    round(float(prediction.step_ms[table.grid.index(shape)]), 1),
                    round(statistics.median(d.step_ms for d in rounds), 1),
                ],
            }
        )

    def error(name: str) -> float:
        return round(statistics.median(abs(line["predicted"] / line[name] - 1) for line in lines), 4)

    def correlation(name: str) -> float:
        return round(rank_correlation([x["predicted"] for x in lines], [x[name] for x in lines]), 4)

    return {
        "cells": len(lines),
        "median_error": error("measured"),
        "rank_correlation": correlation("measured"),
        "median_error_without_drift": error("measured_without_drift"),
        "rank_correlation_without_drift": correlation("measured_without_drift"),
        "predictions": lines,
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, ties by their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.asarray(values)
        return (array[:, None] > array[None, :]).sum(axis=1) + ((array[:, None] == array[None, :]).sum(axis=1) - 1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])
