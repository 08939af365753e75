"""`portadraft bench calibration`: first choices alone (cross-entropy) against whole distributions (divergence)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from portadraft.bench.certainty import Calibration, calibration_of
from portadraft.bench.study import Study, difference
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.training.budget import parse_budget
from portadraft.training.config import TrainConfig
from portadraft.training.corpus import CorpusRequest
from portadraft.training.data import read_rows
from portadraft.training.evaluation import shape_name
from portadraft.training.finish import runnable
from portadraft.training.progress import Progress
from portadraft.training.teacher import load_teacher

SHAPES = (BeamShape(1, 4), BeamShape(4, 4), BeamShape(4, 4, 8))
TEMPERATURES = (0.0, 0.7, 1.0)
SHARES = {"soft": 0.0, "default": 0.1, "greedy-only": 1.0}
"""The ways to train that are compared: each by the share of cross-entropy in its loss."""


def calibration(
    model: str = "smollm2-135m",
    *,
    data: Sequence[str | Path],
    budget: str = "0.1Mtok",
    rows: int = 1000,
    shapes: Sequence[BeamShape] = SHAPES,
    temperatures: Sequence[float] = TEMPERATURES,
    prompts: int = 40,
    config: TrainConfig | None = None,
    work: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = True,
) -> dict[str, Any]:
    """Train a drafter in each of the ways of `SHARES` on the same recorded features, with the same budget and start.

    data, rows: what `--data` of `portadraft train` takes, at most so many rows of each file: answers recorded before,
    or prompts that are answered first. budget: positions that each drafter is trained on. prompts: held out at most;
    their answers, of at most `config.max_answer` tokens, are the texts that figures are of, one set for each
    temperature. `difference` is by the first shape, against the default, with its standard error.

    Raises: InvalidArgument, ModelNotFound and what loading a model raises.
    """
    config = _checked(data, budget, rows, shapes, temperatures, prompts, config)
    request = CorpusRequest(
        data=tuple(data),
        rows=rows,
        steps=config.fit.loss.steps,
        held_out=prompts,
        max_answer=config.max_answer,
        max_length=config.max_length,
        batch=config.batch,
        seed=config.fit.seed,
    )
    for path in request.data:
        read_rows(path, rows)
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="portadraft-calibration-")))
        study = Study(load_teacher(model, dtype, device), folder, request, config, Progress(progress))
        return _compared(study, shapes, temperatures)


def _checked(
    data: Sequence[str | Path],
    budget: str,
    rows: int,
    shapes: Sequence[BeamShape],
    temperatures: Sequence[float],
    prompts: int,
    config: TrainConfig | None,
) -> TrainConfig:
    """All that can be refused before a model is loaded; the configuration with the budget in it."""
    tokens = parse_budget(budget).tokens
    if tokens is None:
        raise InvalidArgument(f"budget={budget!r}: expected tokens, such as 0.1Mtok, so that all drafters get the same")
    for name, value in (("data", len(data)), ("shapes", len(shapes)), ("rows", rows), ("prompts", prompts)):
        if value < 1:
            raise InvalidArgument(f"{name}={value!r}: expected at least 1")
    if not temperatures or not all(math.isfinite(t) and t >= 0 for t in temperatures):
        raise InvalidArgument(f"temperatures={tuple(temperatures)!r}: expected numbers of at least 0")
    base = config or TrainConfig(max_answer=128)
    return replace(base, fit=replace(base.fit, tokens=tokens, epochs=None, minutes=None))


def _compared(study: Study, shapes: Sequence[BeamShape], temperatures: Sequence[float]) -> dict[str, Any]:
    loss = study.config.fit.loss
    sources = list(study.sources.values())
    drafters = {
        name: study.drafter(name, sources, [1.0] * len(sources), replace(loss, hard=share))
        for name, share in SHARES.items()
    }
    rows: list[dict[str, Any]] = []
    said = sources[0].said
    for temperature in temperatures:
        recordings = study.recordings(temperature)
        counts = {name: study.replayed(name, one, temperature, shapes) for name, one in drafters.items()}
        for name, one in drafters.items():
            more, error = difference(counts[name][0], counts["default"][0])
            study.show.say(f"calibration of {name!r} at temperature {temperature:g}")
            found = calibration_of(
                one.config, runnable(study.target, one), recordings, loss.steps, temperature, said
            )  # fmt: skip
            row: dict[str, Any] = {"trained": name, "temperature": temperature}
            row |= {
                shape_name(shape): round(count.tokens_per_step, 3)
                for shape, count in zip(shapes, counts[name], strict=True)
            }
            row |= {"difference": round(more, 3), "error": None if math.isnan(error) else round(error, 3)}
            rows.append(row | {name: _short(values) for name, values in found.__dict__.items() if name != "positions"})
    return {
        "bench": "calibration",
        "model": study.teacher.identity.name,
        "dtype": study.target.facts.dtype,
        "hard": SHARES,
        "positions": {name: one.training["positions"] for name, one in drafters.items()},
        "training_s": {name: round(one.training["seconds"], 1) for name, one in drafters.items()},
        "held_out_prompts": len(study.recordings(temperatures[0])),
        "best": best(rows, shape_name(shapes[0])),
        "rows": rows,
    }


def tables(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For people: tokens per step, and each measure of calibration by step."""
    measures = {"ece": "calibration error by step", "right": "best guess right", "divergence": "divergence, nats"}
    at = ("trained", "temperature")
    out = {
        "tokens per step": [
            {k: v for k, v in row.items() if k not in Calibration.__dataclass_fields__} for row in report["rows"]
        ]
    }
    for name, title in measures.items():
        out[title] = [
            {k: row[k] for k in at} | {str(t): v for t, v in enumerate(row[name], 1)} for row in report["rows"]
        ]
    return out


def best(rows: Sequence[Mapping[str, Any]], shape: str) -> str:
    """The way to train with the most tokens per step for a shape, averaged over temperatures."""
    names = dict.fromkeys(str(row["trained"]) for row in rows)
    return max(names, key=lambda name: sum(float(row[shape]) for row in rows if row["trained"] == name))


def _short(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(v) else round(v, 3) for v in values]
