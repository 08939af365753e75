"""`portadraft bench tuner`: the tuner's choice against the exhaustive truth, and predictions against whole decoding.

The truth is replayed acceptance × measured step cost of every shape of the grid, each timed in turns with plain
decoding. The ten best of it, the tuner's choice and plain decoding are then confirmed by decoding
whole answers, selection and scoring on disjoint rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from portadraft.api import load
from portadraft.bench.answers import Decoded, decode_rounds
from portadraft.bench.predictions import predictions, replayed, spread
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.outcome import DrafterResult, shape_name
from portadraft.tuner.predict import Prediction
from portadraft.tuner.run import Tuner
from portadraft.tuner.search import Measured, Result, Search

TEN = 10
HOPELESS, PROMISING = 0.8, 0.88
_NEIGHBOURS = 4


def tuner_bench(
    model: str = "smollm2-135m",
    *,
    batch: int = 1,
    budget_s: float = 60.0,
    drafter: str = "auto",
    dtype: str = "auto",
    rounds: int = 4,
    turns: int = 2,
    cells: int = 0,
    tokens: int = 48,
    seconds: float = 600.0,
    config: TuneConfig | None = None,
    plot: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tune one batch size, then find out what was best. The acceptance table is made first where there is none.

    rounds: of whole decoding, the first half of which selects among the ten best and the rest scores. turns: of every
    shape of the grid (0: no truth and no search, predictions only); shapes that are predicted to be slower than 0.8 of
    the best are left out. cells: shapes, spread over the grid, whose prediction is compared with whole decoding (0:
    none). tokens: of each answer. seconds: after which no further turn or round begins. config: prompts, grid, ….
    plot: a folder for the heat map and the cost curve.
    """
    if rounds < 2 or turns < 0:
        raise InvalidArgument(f"rounds={rounds}, turns={turns}: expected at least 2 (half of them score) and 0")
    end = time.monotonic() + seconds
    loaded = load(model, dtype=dtype, drafter=drafter)
    asked = replace(
        config or TuneConfig(), budget_s=budget_s, batch_sizes=(batch,), drafters=(drafter,), predict_only=not turns
    )
    tune = Tuner(loaded, asked, say)
    outcome = tune.prepare()
    begun = time.monotonic()
    one = tune.measure(outcome).best
    took = time.monotonic() - begun
    result = one.results[0]
    if plot is not None:
        from portadraft.tuner.plot import draw

        draw(outcome, plot)
    say(f"chosen {shape_name(result.shape)} after {took:.1f} s")
    report: dict[str, Any] = {
        "bench": "tuner",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "drafter": one.name,
        "batch": batch,
        "seconds": round(took, 1),
        "chosen": shape_name(result.shape),
        "chosen_tokens_per_s": round(result.tokens_per_s, 2),
        "plain_tokens_per_s": round(result.plain_tokens_per_s, 2),
        "chosen_speedup_by_tuner": round(result.speedup, 4),
        "best_by_prediction": shape_name(result.prediction.best()),
    }
    confirm: list[BeamShape | None] = [None]
    if turns:
        truth = exhaustive(tune, one, result.prediction, batch, turns, end, say)
        order = sorted(truth, key=lambda s: truth[s], reverse=True)
        best = max(1.0, truth[order[0]])
        report |= {
            "shapes_timed": len(truth),
            "best_by_cost": shape_name(order[0]),
            "best_speedup_by_cost": round(best, 4),
            "chosen_of_best_by_cost": round((truth[result.shape] if result.shape else 1.0) / best, 4),
            "predicted_best_of_best_by_cost": round(truth.get(result.prediction.best(), 1.0) / best, 4),  # type: ignore[arg-type]
            "rank_of_chosen": order.index(result.shape) + 1 if result.shape in order else None,
            "ten_best_by_cost": {shape_name(s): round(truth[s], 4) for s in order[:TEN]},
        }
        confirm += order[:TEN]
        if result.shape not in confirm:
            confirm.append(result.shape)
    spread_out = spread(result.prediction, cells)
    everything: list[BeamShape | None] = [*confirm, *(s for s in spread_out if s not in confirm)]
    done = decode_rounds(tune, one, everything, batch, rounds, tokens, end, say)
    if turns:
        report |= _confirmed(done, confirm, result)
    if cells:
        table = replayed(tune, one, batch, rounds, tokens)
        report |= predictions(table, result, done, spread_out)
    return report


def exhaustive(
    tune: Tuner,
    one: DrafterResult,
    prediction: Prediction,
    batch: int,
    turns: int,
    end: float,
    say: Callable[[str], None],
) -> dict[BeamShape, float]:
    """Speedup of every shape over plain decoding: replayed acceptance × step cost, in turns with plain steps."""
    shapes = prediction.distinct()
    shapes = [s for s in shapes if prediction.of(s) >= HOPELESS * prediction.of(shapes[0])]
    turns_taken: list[Measured] = []
    with tune.machine(one.drafter, batch) as machine:
        search = Search(machine, prediction, 0.0)
        for turn in range(turns):
            for i in range(0, len(shapes), 5):
                if time.monotonic() > end and turn:
                    break
                group = shapes[i : i + 5]
                # Those that may be best deserve more steps.
                search.turn = 4 if prediction.of(group[0]) > PROMISING * prediction.of(shapes[0]) else 2
                turns_taken += search.one_round(group, "search")[0]
                say(f"every shape, turn {turn + 1}: {i} of {len(shapes)}")
    return speedups(turns_taken, prediction)


def speedups(turns_taken: Sequence[Measured], prediction: Prediction) -> dict[BeamShape, float]:
    """Of every shape over plain decoding, which is taken over a few neighbouring rounds: a single round's few plain
    steps would decide between hundreds of shapes by their luck.
    """
    plain = {m.round: math.log(m.plain_ms / prediction.costs.plain_ms) for m in turns_taken if m.shape is None}
    out: dict[BeamShape, list[float]] = {}
    for m in turns_taken:
        if m.shape is not None:
            near = [v for n, v in plain.items() if abs(n - m.round) <= _NEIGHBOURS]
            out.setdefault(m.shape, []).append(m.ratio + plain[m.round] - statistics.median(near))
    rate = prediction.plain_tokens_per_s
    return {s: prediction.of(s) / rate * math.exp(-statistics.median(r)) for s, r in out.items()}


def _confirmed(
    done: dict[BeamShape | None, list[Decoded]], confirm: Sequence[BeamShape | None], result: Result
) -> dict[str, Any]:
    """Select the best on the first half of the rounds and score it, and the tuner's choice, on the second.

    Speeds are those of the decoded steps at the acceptance of all recorded answers: a few answers would decide between
    shapes by their luck. As they were decoded is reported beside it.
    """
    drafted = [s for s in confirm if s is not None]
    rounds = min(len(done[s]) for s in drafted)
    half = rounds // 2
    grid, means = result.prediction.table.grid, result.prediction.tokens_per_step

    def speed(shape: BeamShape | None, part: slice) -> float:
        if shape is None:
            return 1.0
        return float(means[grid.index(shape)]) * math.exp(
            statistics.fmean(math.log(d.plain_ms / d.step_ms) for d in done[shape][part])
        )

    def raw(shape: BeamShape | None) -> float:
        if shape is None:
            return 1.0
        batch = result.batch
        return statistics.geometric_mean([d.tokens_per_s * d.plain_ms / 1000 / batch for d in done[shape]])

    def deviation(shape: BeamShape) -> float:
        logs = [math.log(d.plain_ms / d.step_ms) for d in done[shape]]
        return statistics.stdev(logs) if len(logs) > 1 else 0.0

    best = max(confirm, key=lambda s: speed(s, slice(0, half)))
    scored = slice(half, rounds)
    return {
        "rounds": rounds,
        "best_by_decoding": shape_name(best),
        "best_speedup": round(speed(best, scored), 4),
        "chosen_speedup": round(speed(result.shape, scored), 4),
        "chosen_of_best": round(speed(result.shape, scored) / speed(best, scored), 4),
        "chosen_speedup_as_decoded": round(raw(result.shape), 4),
        "best_speedup_as_decoded": round(raw(best), 4),
        "deviation_of_a_round": round(statistics.median(deviation(s) for s in drafted), 4),
        "confirmed": {shape_name(s): round(speed(s, scored), 4) for s in confirm},
    }
