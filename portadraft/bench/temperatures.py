"""What sampling leaves of drafting: tokens per step and speedup by temperature, rule and width."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portadraft.api import load
from portadraft.bench.acceptance import read_prompts
from portadraft.generation import Generation
from portadraft.profiles.shape import default_shape

PLAIN = ("plain", 0)


def temperatures(
    prompts: Path,
    *,
    model: str = "smollm2-135m",
    drafter: str = "redrafter",
    values: Sequence[float] = (0.0, 0.7, 1.0),
    widths: Sequence[int] = (1, 2, 4, 8),
    length: int = 4,
    max_tokens: int = 48,
    limit: int | None = None,
    limit_s: float | None = None,
    batch: int = 1,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Decode prompts, `batch` at once: plainly, drafted at each width, and by rejection at width 1, in turns.

    The default node budget of the device holds at every width. tokens_per_step is of all steps together, speedup
    of all tokens over all time against plain decoding of the same prompts; error: the standard error of the
    batches' own speedups. limit: only so many prompts, spread over the file; limit_s: begin no
    prompt after so many seconds, but the first. Greedy decoding has one rule only.

    Raises: InvalidArgument, ModelNotFound for the file.
    """
    texts = read_prompts(prompts)
    if limit is not None and limit < len(texts):
        texts = [texts[i * len(texts) // limit] for i in range(limit)]
    loaded = load(model, dtype=dtype, drafter=drafter)
    nodes = default_shape(loaded.selected.name, loaded.target.ops.device)[0].nodes
    tried: dict[tuple[float, str, int], dict[str, Any]] = {}
    for temperature in values:
        tried[(temperature, *PLAIN)] = {"drafter": None}
        for width in widths:
            tried[temperature, "match", width] = {"width": width, "length": length, "nodes": nodes}
        if temperature > 0:
            tried[temperature, "rejection", 1] = {
                "acceptance": "rejection", "width": 1, "length": length, "nodes": nodes,
            }  # fmt: skip

    def once(key: tuple[float, str, int], first: int, most: int) -> list[Generation]:
        seeds = list(range(first, min(first + batch, len(texts))))
        some = [texts[i] for i in seeds]
        answers: list[Generation] = loaded.generate(
            some, temperature=key[0], seed=seeds, max_tokens=most, batch_size=batch, **tried[key]
        )
        return answers

    for key in tried:
        once(key, 0, 4)  # first passes of each kind are slow
    runs: dict[tuple[float, str, int], list[list[Generation]]] = {key: [] for key in tried}
    start = time.perf_counter()
    for number, first in enumerate(range(0, len(texts), batch)):
        if number and limit_s is not None and time.perf_counter() - start > limit_s:
            break
        for key in tried if number % 2 == 0 else reversed(tried):
            runs[key].append(once(key, first, max_tokens))
    return {
        "bench": "temperatures",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "drafter": loaded.chosen["drafter"].value,
        "length": length,
        "nodes": nodes,
        "prompts": sum(map(len, runs[next(iter(runs))])),
        "batch": batch,
        "max_tokens": max_tokens,
        "rows": [_row(key, found, runs[(key[0], *PLAIN)]) for key, found in runs.items()],
    }


def _row(key: tuple[float, str, int], runs: list[list[Generation]], plain: list[list[Generation]]) -> dict[str, Any]:
    temperature, rule, width = key
    accepted = [pair for batch in runs for g in batch for pair in g.stats.accepted.items()]
    steps, tokens = sum(count for _, count in accepted), sum((n + 1) * count for n, count in accepted)
    ratios = [_rate([one]) / _rate([other]) for one, other in zip(runs, plain, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return {
        "temperature": temperature,
        "rule": rule,
        "width": width,
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "tokens_per_s": round(_rate(runs), 2),
        "speedup": round(_rate(runs) / _rate(plain), 3),
        "error": None if math.isnan(error) else round(error, 3),
    }


def _rate(batches: Sequence[Sequence[Generation]]) -> float:
    """Tokens per second of decoding, the prefills' own tokens left out; a batch takes as long as its longest row."""
    seconds = sum(max(g.stats.decode_s for g in batch) for batch in batches)
    return sum(len(g.ids) - 1 for batch in batches for g in batch) / seconds if seconds else math.nan
