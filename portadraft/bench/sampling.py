"""What choosing tokens costs, as a share of the steps whose logits they are chosen from."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from portadraft.api import Model, load
from portadraft.bench.demo import prompts
from portadraft.core.decode import Decoder, Request
from portadraft.core.drafter import Drafter
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.profiles.shape import default_shape
from portadraft.tuner.measure import interleave

KINDS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(0.7),
    "temperature 0.7, top-p 0.9": Sampling(0.7, top_p=0.9),
    "temperature 0.7, top-p 0.95": Sampling(0.7, top_p=0.95),
    "temperature 1, top-p 0.9": Sampling(1.0, top_p=0.9),
    "temperature 0.7, top-k 50": Sampling(0.7, top_k=50),
    "all filters": Sampling(0.7, top_k=50, top_p=0.9, min_p=0.05),
    "top-p and penalties": Sampling(0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.1),
}


@dataclass(frozen=True)
class _Steps:
    """Milliseconds a step: all of it, and the stage that chooses (uniforms, choices, walk, the host's read)."""

    step_ms: float
    choosing_ms: float


def sampling_costs(model: str, *, dtype: str = "auto", max_tokens: int = 24, repeats: int = 7) -> dict[str, Any]:
    """Steps of real decodings at the default shape, and plain ones, one stage after another.

    For each kind of sampling: walk_ms, the L + 1 choices of a drafted step; of_a_drafted_step, their share of
    that whole step; over_greedy, the share of it that greedy choices would have saved; choice_ms and
    of_a_plain_step, the same of a plain step and its one choice. Medians over `repeats` rounds, in which the
    kinds take turns.
    """
    loaded = load(model, dtype=dtype)
    selected = loaded.selected
    shape, _ = default_shape(selected.name, loaded.target.ops.device)
    tried: dict[tuple[str, bool], Callable[[], _Steps]] = {}
    for name, sampling in KINDS.items():
        for drafted in (True, False):
            drafter = selected.drafter if drafted else None
            tried[name, drafted] = partial(_decode, loaded, drafter, shape, sampling, max_tokens)
    interleave(tried, 1)
    runs = interleave(tried, repeats)
    rows = []
    for name in KINDS:
        drafted_runs, plain_runs, greedy = runs[name, True], runs[name, False], runs["greedy", True]
        extra = [(d.choosing_ms - g.choosing_ms) / d.step_ms for d, g in zip(drafted_runs, greedy, strict=True)]
        rows.append(
            {
                "sampling": name,
                "walk_ms": _median([r.choosing_ms for r in drafted_runs]),
                "of_a_drafted_step": _share([r.choosing_ms / r.step_ms for r in drafted_runs]),
                "over_greedy": _share(extra),
                "choice_ms": _median([r.choosing_ms for r in plain_runs]),
                "of_a_plain_step": _share([r.choosing_ms / r.step_ms for r in plain_runs]),
            }
        )
    return {
        "bench": "sampling",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "vocabulary": loaded.target.facts.vocabulary_size,
        "drafter": selected.name,
        "shape": [shape.width, shape.length, shape.nodes],
        "drafted_step_ms": _median([r.step_ms for r in runs["greedy", True]]),
        "plain_step_ms": _median([r.step_ms for r in runs["greedy", False]]),
        "repeats": repeats,
        "kinds": rows,
    }


def _decode(model: Model, drafter: Drafter | None, shape: BeamShape, sampling: Sampling, max_tokens: int) -> _Steps:
    """An answer of that many tokens, however early it might have ended."""
    decoder = Decoder(model.target, drafter, None if drafter is None else shape, sampling=sampling, profile=True)
    assert decoder.times is not None
    try:
        ids = model.codec.encode_prompt(prompts()[0]["prompt"])
        limit = model.target.facts.context_limit or 2**20
        decoder.admit([Request(tuple(ids[: limit - max_tokens - shape.length - 1]), max_tokens)])
        decoder.times.seconds.clear()
        while decoder.live:
            decoder.step()
    finally:
        decoder.close()
    steps, seconds = max(1, decoder.times.steps), decoder.times.seconds
    return _Steps(1000 * sum(seconds.values()) / steps, 1000 * seconds.get("accept", 0.0) / steps)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _share(values: list[float]) -> str:
    return f"{statistics.median(values):.1%}"
