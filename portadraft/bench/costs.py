"""What steps cost, each as a ratio within one run: plain against transformers, packed against plain, oracle steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from portadraft.api import Model, load
from portadraft.bench.demo import prompts
from portadraft.core.decode import Decoder, Request
from portadraft.core.tree import pack_beam, root_only
from portadraft.core.types import Beam, BeamShape, PackedBeam
from portadraft.drafters.oracle import OracleDrafter
from portadraft.tuner.measure import interleave, median_ratio


def plain_against_transformers(
    model: str = "smollm2-135m", *, dtype: str = "auto", max_tokens: int = 64, repeats: int = 7
) -> dict[str, Any]:
    """Tokens per second of our plain decoding and of transformers' own `generate`, prefill included in both.

    The ratio is the median over rounds of ours ÷ theirs on the same prompt, model object and dtype.
    """
    import torch
    from transformers import GenerationConfig

    loaded = load(model, dtype=dtype, drafter=None)
    hf = loaded.target.model  # type: ignore[attr-defined]
    ends = sorted(loaded.codec.end_tokens)
    config = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=ends[0])
    ids = loaded.codec.encode_prompt(prompts()[0]["prompt"], raw=False)
    tensor = torch.tensor([ids], device=hf.device)

    def ours() -> float:
        start = time.perf_counter()
        count = len(loaded.generate(ids, max_tokens=max_tokens).ids)
        return count / (time.perf_counter() - start)

    def theirs() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            count = hf.generate(tensor, generation_config=config).shape[1] - len(ids)
        return float(count) / (time.perf_counter() - start)

    ours(), theirs()
    rates = interleave({"ours": ours, "transformers": theirs}, repeats)
    return {
        "bench": "plain",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "ours_tokens_per_s": round(statistics.median(rates["ours"]), 2),
        "transformers_tokens_per_s": round(statistics.median(rates["transformers"]), 2),
        "ratio": round(median_ratio(rates["ours"], rates["transformers"]), 3),
        "repeats": repeats,
    }


def packed_passes(
    model: str = "smollm2-135m",
    *,
    dtype: str = "auto",
    contexts: Sequence[int] = (200, 4000),
    slots: Sequence[int] = (1, 4, 8, 12, 16, 24, 32, 64),
    repeats: int = 9,
) -> dict[str, Any]:
    """Milliseconds of one verification pass by number of slots and context, and as a ratio to a plain pass."""
    loaded = load(model, dtype=dtype, drafter=None)
    target, rows = loaded.target, []
    vocabulary = target.facts.vocabulary_size
    for context in contexts:
        with target.ops.no_grad():
            target.admit([[3 + i % (vocabulary - 3) for i in range(context)]], reserve=max(slots) + 1)
            try:
                beams = {n: _chains(loaded, n) for n in slots}

                def once(packed: PackedBeam) -> float:
                    target.ops.synchronize()
                    start = time.perf_counter()
                    target.verify(packed)
                    target.ops.synchronize()
                    return (time.perf_counter() - start) * 1000

                alternatives = {n: (lambda packed=packed: once(packed)) for n, packed in beams.items()}
                interleave(alternatives, 1)
                times = interleave(alternatives, repeats)
            finally:
                target.release(0)
        for n in slots:
            rows.append(
                {
                    "context": context,
                    "slots": n,
                    "latency_ms": round(statistics.median(times[n]), 2),
                    "ratio": round(median_ratio(times[n], times[slots[0]]), 3),
                }
            )
    return {"bench": "packed", "model": loaded.name, "dtype": target.facts.dtype, "repeats": repeats, "passes": rows}


def _chains(model: Model, slots: int) -> PackedBeam:
    """A packed beam of that many slots: chains of up to four tokens below the root."""
    ops = model.target.ops
    roots = ops.asarray([5])
    if slots == 1:
        return root_only(ops, roots)
    length = min(4, slots - 1)
    width = -(-(slots - 1) // length)
    tokens = [[[7 + i * length + step for step in range(length)] for i in range(width)]]
    scores = [[[-1.0 * (step + 1) for step in range(length)] for _ in range(width)]]
    beam = Beam(ops.asarray(tokens), ops.full((1, width), length, "int32"), ops.asarray(scores, "float32"))
    return pack_beam(ops, roots, beam, slots)


def oracle_steps(
    model: str = "smollm2-135m",
    *,
    dtype: str = "float32",
    probability: float = 0.8,
    shapes: Sequence[tuple[int, int]] = ((1, 3), (4, 4), (10, 4)),
    max_tokens: int = 96,
    repeats: int = 3,
) -> dict[str, Any]:
    """Speedup of whole decoding with an oracle drafter, so that acceptance is given and only our costs count."""
    loaded = load(model, dtype=dtype, drafter=None)
    target = loaded.target
    ids = tuple(loaded.codec.encode_prompt(prompts()[4]["prompt"], raw=False))
    answer = loaded.generate(list(ids), max_tokens=max_tokens + 8).ids
    oracle = OracleDrafter(target.ops, {ids: answer}, target.facts.vocabulary_size, probability)

    def decode(shape: BeamShape | None) -> tuple[float, int, int]:
        decoder = Decoder(target, None if shape is None else oracle, shape)
        try:
            decoder.admit([Request(ids, max_tokens)])
            start, steps, tokens = time.perf_counter(), 0, 0
            while progress := decoder.step():
                steps += 1
                tokens += sum(len(p.tokens) for p in progress)
            return time.perf_counter() - start, steps, tokens
        finally:
            decoder.close()

    tried: dict[BeamShape | None, Any] = {None: lambda: decode(None)}
    for drafted in (BeamShape(width, length) for width, length in shapes):
        tried[drafted] = lambda shape=drafted: decode(shape)
    interleave(tried, 1)
    runs = interleave(tried, repeats)
    rows = []
    for shape, results in runs.items():
        if shape is not None:
            rows.append(
                {
                    "width": shape.width,
                    "length": shape.length,
                    "slots": shape.slots(),
                    "tokens_per_step": round(results[0][2] / results[0][1], 3),
                    "speedup": round(median_ratio([p[0] for p in runs[None]], [r[0] for r in results]), 3),
                }
            )
    return {
        "bench": "oracle",
        "model": loaded.name,
        "dtype": target.facts.dtype,
        "probability": probability,
        "repeats": repeats,
        "shapes": rows,
    }
