"""`portadraft bench table4`: the paper's table 4, distilled against ground truth, from the same texts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from portadraft.bench.study import Count, Study, difference
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.training import bill
from portadraft.training.budget import parse_budget
from portadraft.training.config import TrainConfig
from portadraft.training.corpus import CorpusRequest
from portadraft.training.data import read_rows
from portadraft.training.progress import Progress
from portadraft.training.teacher import load_teacher

WIDTHS = (1, 2, 4, 16, 64)
TEMPERATURES = (0.0, 0.7)
DISTILLED = ("local", "text", "sequence")
TRUTH, HALF = "ground-truth", "half"


def table4(
    model: str = "smollm2-135m",
    *,
    data: Sequence[str | Path],
    budget: str = "0.1Mtok",
    epochs: float = 2.0,
    distilled: str = "local",
    widths: Sequence[int] = WIDTHS,
    length: int = 4,
    nodes: int | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    prompts: int = 40,
    repeats: int = 9,
    config: TrainConfig | None = None,
    work: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = True,
) -> dict[str, Any]:
    """Train three drafters from the same texts, with the same budget and the same start.

    data: files of prompts with references (what they are read from, `--data` of `portadraft train`). budget: positions
    each drafter is trained on; budget ÷ epochs tokens of text are read. distilled: the mode that the first drafter
    imitates; the second learns the texts themselves, the third half of its positions from each. nodes: a budget for
    every width (None: all unique nodes are verified, as in the paper). prompts: held out at most; the target's own
    answers to these, of at most `config.max_answer` tokens, greedy and sampled, are what is replayed. config: sizes of
    drafter and draft vocabulary, seed, and loss. work: a folder in which all that is costly is kept.

    Tokens per step come from replay, and the speedup from them and from step costs that are measured here:
    a drafted step (draft, pack, one pass over all slots) in turns with a plain one, at a context of 200.

    Raises: InvalidArgument, ModelNotFound and what loading a model raises.
    """
    config = _checked(budget, epochs, distilled, widths, length, nodes, temperatures, prompts, repeats, config)
    request = _request(data, epochs, distilled, prompts, config)
    shapes = [BeamShape(width, length, nodes) for width in widths]
    if not any(row.text for path in request.text for row in read_rows(path, request.rows)):
        raise InvalidArgument("data: no row has a `reference` or a `text`; expected prompts with references")
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="portadraft-table4-")))
        study = Study(load_teacher(model, dtype, device), folder, request, config, Progress(progress))
        return _compared(study, distilled, shapes, temperatures, repeats)


def _checked(
    budget: str,
    epochs: float,
    distilled: str,
    widths: Sequence[int],
    length: int,
    nodes: int | None,
    temperatures: Sequence[float],
    prompts: int,
    repeats: int,
    config: TrainConfig | None,
) -> TrainConfig:
    """All that can be refused before a model is loaded; the configuration with the budget in it."""
    tokens = parse_budget(budget).tokens
    if tokens is None:
        raise InvalidArgument(f"budget={budget!r}: expected tokens, such as 0.1Mtok, so that all drafters get the same")
    if distilled not in DISTILLED:
        raise InvalidArgument(f"distilled={distilled!r}: expected one of {', '.join(DISTILLED)}")
    if not (math.isfinite(epochs) and epochs > 0):
        raise InvalidArgument(f"epochs={epochs!r}: expected a number above 0")
    for name, value in (("prompts", prompts), ("repeats", repeats), ("widths", len(widths))):
        if value < 1:
            raise InvalidArgument(f"{name}={value!r}: expected at least 1")
    for width in widths:
        BeamShape(width, length, nodes)
    if not temperatures or not all(math.isfinite(t) and t >= 0 for t in temperatures):
        raise InvalidArgument(f"temperatures={tuple(temperatures)!r}: expected numbers of at least 0")
    base = config or TrainConfig(max_answer=80)
    return replace(base, fit=replace(base.fit, tokens=tokens, epochs=None, minutes=None))


def _request(
    data: Sequence[str | Path], epochs: float, distilled: str, prompts: int, config: TrainConfig
) -> CorpusRequest:
    if not data:
        raise InvalidArgument("data=(): expected at least one file of prompts with references")
    assert config.fit.tokens is not None
    tokens = max(1, math.ceil(config.fit.tokens / epochs))
    rows = config.rows
    if distilled == "sequence" and rows is None:
        rows = max(16, math.ceil(tokens / config.max_answer))  # every prompt is answered
    return CorpusRequest(
        text=tuple(data),
        mix={distilled: 1.0, TRUTH: 1.0},
        text_tokens=tokens,
        rows=rows,
        steps=config.fit.loss.steps,
        held_out=prompts,
        max_answer=config.max_answer,
        max_length=config.max_length,
        batch=config.batch,
        seed=config.fit.seed,
    )


def _compared(
    study: Study, distilled: str, shapes: Sequence[BeamShape], temperatures: Sequence[float], repeats: int
) -> dict[str, Any]:
    sources, loss = study.sources, study.config.fit.loss
    ways = {
        distilled: ([sources[distilled]], [1.0]),
        TRUTH: ([sources[TRUTH]], [1.0]),
        HALF: ([sources[distilled], sources[TRUTH]], _halves(study, distilled)),
    }
    drafters = {name: study.drafter(name, *way, loss) for name, way in ways.items()}
    bound = study.bound(drafters[distilled])
    study.show.say("timing steps")
    costs = {shape: bill.step_costs(study.target, bound, shape, repeats) for shape in shapes}
    counts: dict[tuple[str, float, BeamShape], Count] = {}
    for temperature in temperatures:
        for name, checkpoint in drafters.items():
            for shape, count in zip(shapes, study.replayed(name, checkpoint, temperature, shapes), strict=True):
                counts[name, temperature, shape] = count
    rows: list[dict[str, Any]] = []
    for temperature in temperatures:
        for shape in shapes:
            one = {name: counts[name, temperature, shape] for name in drafters}
            ratio = costs[shape].step_ratio
            more, error = difference(one[distilled], one[TRUTH])
            row: dict[str, Any] = {"temperature": temperature, "width": shape.width}
            row |= {name: round(count.tokens_per_step, 3) for name, count in one.items()}
            row |= {"gain": round(more, 3), "error": None if math.isnan(error) else round(error, 3)}
            row |= {f"speedup {name}": round(count.tokens_per_step / ratio, 3) for name, count in one.items()}
            row["speedup gain"] = f"{one[distilled].tokens_per_step / one[TRUTH].tokens_per_step - 1:+.1%}"
            rows.append(row | {"nodes": round(one[distilled].nodes, 1), "step_ratio": round(ratio, 3)})
    first = next(iter(costs.values()))
    return {
        "bench": "table4",
        "model": study.teacher.identity.name,
        "dtype": study.target.facts.dtype,
        "distilled": distilled,
        "positions": {name: one.training["positions"] for name, one in drafters.items()},
        "training_s": {name: round(one.training["seconds"], 1) for name, one in drafters.items()},
        "text_tokens": study.corpus.facts["text_tokens"],
        "held_out_prompts": len(study.recordings(temperatures[0])),
        "plain_ms": round(first.plain_ms, 2),
        "speedup_from": "tokens per step by replay ÷ measured cost of a drafted step in plain steps, context 200",
        "rows": rows,
    }


def _halves(study: Study, distilled: str) -> list[float]:
    """Shares of the two sources that give each half of an epoch's positions."""
    counts = []
    for name in (distilled, TRUTH):
        segments = study.sources[name].segments(1 << 30, held_out=False)
        counts.append(int((segments[:, 1] - segments[:, 0]).sum()))
    least = min(counts)
    return [0.5 * least / n for n in counts]


def tables(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For people: tokens per step, and speedup."""
    names = [report["distilled"], TRUTH, HALF]
    at = ("temperature", "width")
    return {
        "tokens per step": [{k: row[k] for k in (*at, *names, "gain", "error", "nodes")} for row in report["rows"]],
        "speedup": [
            {k: row[k] for k in at}
            | {name: row[f"speedup {name}"] for name in names}
            | {k: row[k] for k in ("speedup gain", "step_ratio")}
            for row in report["rows"]
        ],
    }
