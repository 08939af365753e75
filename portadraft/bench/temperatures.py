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
    dtype: str = "auto",
) -> dict[str, Any]:
    """Decode prompts one by one: plainly, drafted at each width, and by rejection at width 1, in turns.

    The default node budget of the device holds at every width. tokens_per_step is of all steps together, speedup
    of all tokens over all time against plain decoding of the same prompts; error: the standard error of the
    prompts' own speedups. limit: only so many prompts, spread over the file; limit_s: begin no
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

    def once(key: tuple[float, str, int], i: int, most: int) -> Generation:
        answer: Generation = loaded.generate(texts[i], temperature=key[0], seed=i, max_tokens=most, **tried[key])
        return answer

    for key in tried:
        once(key, 0, 4)  # first passes of each kind are slow
    runs: dict[tuple[float, str, int], list[Generation]] = {key: [] for key in tried}
    start = time.perf_counter()
    for i in range(len(texts)):
        if i and limit_s is not None and time.perf_counter() - start > limit_s:
            break
        keys = list(tried) if i % 2 == 0 else list(reversed(tried))
        for key in keys:
            runs[key].append(once(key, i, max_tokens))
    return {
        "bench": "temperatures",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "drafter": loaded.chosen["drafter"].value,
        "length": length,
        "nodes": nodes,
        "prompts": len(runs[next(iter(runs))]),
        "max_tokens": max_tokens,
        "rows": [_row(key, found, runs[(key[0], *PLAIN)]) for key, found in runs.items()],
    }


def _row(key: tuple[float, str, int], runs: list[Generation], plain: list[Generation]) -> dict[str, Any]:
    temperature, rule, width = key
    steps = sum(sum(g.stats.accepted.values()) for g in runs)
    tokens = sum((n + 1) * count for g in runs for n, count in g.stats.accepted.items())
    ratios = [_rate([g]) / _rate([p]) for g, p in zip(runs, plain, strict=True) if len(g.ids) > 1 and len(p.ids) > 1]
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


def _rate(runs: Sequence[Generation]) -> float:
    """Tokens per second of decoding, the prefill's own token left out."""
    seconds = sum(g.stats.decode_s for g in runs)
    return sum(len(g.ids) - 1 for g in runs) / seconds if seconds else math.nan
