"""Our plain decoding with mlx against mlx-lm's own `generate_step`, in one run."""

from __future__ import annotations

import statistics
import time
from typing import Any

from portadraft.api import load
from portadraft.bench.demo import prompts
from portadraft.tuner.measure import interleave, median_ratio


def plain_against_mlx_lm(
    model: str = "smollm2-135m", *, dtype: str = "auto", max_tokens: int = 64, repeats: int = 7
) -> dict[str, Any]:
    """Passes per second of our plain decoding and of mlx-lm's `generate_step`.

    The ratio is the median over rounds of ours ÷ theirs on the same prompt, model object and dtype. It counts
    one-token passes alone: ours from the end of the prefill, theirs from the pass over the prompt's last token,
    which generate_step runs by itself (it computes ahead: its first token is no place to start from, and it
    runs one pass more than it gives tokens, which is counted). `whole_ratio` is of tokens, prefill included.

    Raises: what `load` raises.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from portadraft.core.decode import Decoder, Request

    loaded = load(model, backend="mlx", dtype=dtype, drafter=None)
    target: Any = loaded.target
    ids = loaded.codec.encode_prompt(prompts()[0]["prompt"], raw=False)

    def ours() -> tuple[float, float]:
        decoder = Decoder(target)
        try:
            begin = time.perf_counter()
            decoder.admit([Request(tuple(ids), max_tokens)])
            first, count = time.perf_counter(), 0
            while progress := decoder.step():
                count += sum(len(p.tokens) for p in progress)
            end = time.perf_counter()
        finally:
            decoder.close()
        return count / (end - first), (count + 1) / (end - begin)

    def theirs() -> tuple[float, float]:
        marks: list[float] = []
        begin = time.perf_counter()
        count = sum(
            1
            for _ in generate_step(
                mx.array(ids),
                target.model,
                max_tokens=max_tokens,
                prompt_progress_callback=lambda done, total: marks.append(time.perf_counter()),
            )
        )
        end = time.perf_counter()
        # Called before the prefill, after each of its chunks, and once more after the last token's pass.
        return (count + 1) / (end - marks[-2]), count / (end - begin)

    alternatives = {"ours": ours, "mlx-lm": theirs}
    interleave(alternatives, 1)
    rates = interleave(alternatives, repeats)
    decoding, whole = ({name: [r[i] for r in rates[name]] for name in alternatives} for i in (0, 1))
    return {
        "bench": "plain",
        "model": loaded.name,
        "dtype": target.facts.dtype,
        "ours_passes_per_s": round(statistics.median(decoding["ours"]), 2),
        "mlx_lm_passes_per_s": round(statistics.median(decoding["mlx-lm"]), 2),
        "ratio": round(median_ratio(decoding["ours"], decoding["mlx-lm"]), 3),
        "whole_ratio": round(median_ratio(whole["ours"], whole["mlx-lm"]), 3),
        "repeats": repeats,
    }
