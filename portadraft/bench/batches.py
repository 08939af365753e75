"""Many prompts through the slots of a batch, against the same prompts one by one."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portadraft.api import Model, load
from portadraft.bench.acceptance import read_prompts
from portadraft.bench.verify import encoded
from portadraft.errors import InvalidArgument


def batches(
    prompts: Path,
    *,
    model: str = "smollm2-135m",
    slots: Sequence[int] = (1, 4),
    drafters: Sequence[str] = ("none", "auto"),
    count: int = 40,
    max_tokens: int = 48,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Wall time and tokens/s of `count` prompts, from the shortest of the file to the longest, mixed.

    slots: rows decoded together; 1 is one by one. Answers end where the model ends them, at
    max_tokens at the latest. speedup, same_text: against the first of `slots`; how many answers are the
    same (all in float32; in half precision rows of a batch round otherwise). peak_mb: of
    the process, after a quarter of the answers and after all, in the last run.

    Raises: InvalidArgument, ModelNotFound for the file.
    """
    if count < 1 or not slots or min(slots) < 1:
        raise InvalidArgument(f"count={count}, slots={list(slots)}: expected numbers of at least 1")
    whole = read_prompts(prompts)
    texts = spread(whole, count)
    loaded = load(model, dtype=dtype)
    lengths = [len(encoded(loaded, f"#{whole.index(text) + 1}", text)) for text in texts]  # all, before any is run
    loaded.generate(texts[:2], max_tokens=4)  # what is done once is not timed
    rows: list[dict[str, Any]] = []
    peaks: list[float] = []
    for drafter in drafters:
        first: tuple[list[tuple[int, ...]], float] | None = None
        for width in slots:
            row, ids, peaks = _run(loaded, texts, drafter, width, max_tokens)
            first = first or (ids, row["wall_s"])
            row["same_text"] = sum(a == b for a, b in zip(ids, first[0], strict=True))
            row["speedup"] = round(first[1] / row["wall_s"], 2)
            rows.append(row)
    return {
        "bench": "batches",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "prompts": len(texts),
        "prompt_tokens": {"least": min(lengths), "median": statistics.median(lengths), "most": max(lengths)},
        "max_tokens": max_tokens,
        "peak_mb": peaks,
        "runs": rows,
    }


def spread(texts: Sequence[str], count: int) -> list[str]:
    """`count` of the texts, evenly by length, in an order that puts long beside short."""
    ordered = sorted(texts, key=len)
    count = min(count, len(ordered))
    taken = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
    stride = next(s for s in (7, 11, 13, 17, 1) if len(taken) % s or s == 1)
    return [taken[i * stride % len(taken)] for i in range(len(taken))]


def _run(
    model: Model, texts: Sequence[str], drafter: str, slots: int, max_tokens: int
) -> tuple[dict[str, Any], list[tuple[int, ...]], list[float]]:
    """One way to decode all texts; the ids of each answer; the process' peak memory on the way."""
    answers: dict[int, tuple[int, ...]] = {}
    peaks: list[float] = []
    options: dict[str, Any] = {} if drafter == "auto" else {"drafter": drafter}
    start = time.perf_counter()
    for i, answer in model.as_completed(list(texts), max_tokens=max_tokens, batch_size=slots, **options):
        answers[i] = answer.ids
        if len(answers) in (max(1, len(texts) // 4), len(texts)):
            peaks.append(_peak_mb())
    seconds = time.perf_counter() - start
    tokens = sum(len(ids) for ids in answers.values())
    row = {
        "drafter": drafter,
        "slots": slots,
        "wall_s": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
    }
    return row, [answers[i] for i in range(len(texts))], peaks


def _peak_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)
