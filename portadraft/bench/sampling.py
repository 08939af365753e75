"""What choosing tokens costs, against the passes whose logits they are chosen from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from portadraft.api import load
from portadraft.bench.demo import prompts
from portadraft.core.accept import accept
from portadraft.core.choice import Chooser, Situation
from portadraft.core.ops import Ops
from portadraft.core.penalties import History
from portadraft.core.sampling import Sampling
from portadraft.core.tree import pack_beam, root_only
from portadraft.core.types import Array, Beam, PackedBeam

KINDS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(0.7),
    "temperature 0.7, top-p 0.9": Sampling(0.7, top_p=0.9),
    "temperature 1, top-p 0.9": Sampling(1.0, top_p=0.9),
    "temperature 0.7, top-k 50": Sampling(0.7, top_k=50),
    "all filters": Sampling(0.7, top_k=50, top_p=0.9, min_p=0.05),
    "top-p and penalties": Sampling(0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.1),
}


def sampling_costs(model: str, *, dtype: str = "auto", length: int = 4, repeats: int = 30) -> dict[str, Any]:
    """Milliseconds of a walk of `length` + 1 choices, and their share of a plain step, at a real prompt."""
    loaded = load(model, dtype=dtype, drafter="none")
    target = loaded.target
    ops, vocabulary = target.ops, target.facts.vocabulary_size
    ids = loaded.codec.encode_prompt(prompts()[0]["prompt"])
    with ops.no_grad():
        target.admit([ids], reserve=64)
        try:
            roots = ops.asarray([ids[-1]])
            tokens = ops.asarray(np.asarray(ids[-length:], dtype=np.int32)[None, None])
            scores = ops.asarray(-np.arange(length, dtype=np.float32)[None, None], "float32")
            packed = pack_beam(ops, roots, Beam(tokens, ops.full((1, 1), length, "int32"), scores))
            plain_ms = _median_ms(ops, lambda: target.verify(root_only(ops, roots)).logits[0, 0, :1], repeats)
            logits = target.verify(packed).logits
        finally:
            target.release(0)
        numbers = ops.asarray(np.linspace(0.1, 0.9, length + 1, dtype=np.float32)[None], "float32")
        rows = []
        for name, sampling in KINDS.items():
            chooser = Chooser(ops, sampling, vocabulary)
            history = History.of(ops, sampling, [(ids, ())], vocabulary)
            situation = Situation(None if sampling.greedy else numbers, None, history)
            walk = partial(_walk, ops, packed, logits, chooser, situation)
            ms = _median_ms(ops, walk, repeats)
            rows.append({"sampling": name, "walk_ms": round(ms, 3), "of_a_plain_step": f"{ms / plain_ms:.1%}"})
    facts = {"bench": "sampling", "model": loaded.name, "dtype": target.facts.dtype}
    return {**facts, "vocabulary": vocabulary, "plain_step_ms": round(plain_ms, 2), "kinds": rows}


def _walk(ops: Ops, packed: PackedBeam, logits: Array, chooser: Chooser, situation: Situation) -> Array:
    return accept(ops, packed, logits, chooser, situation)[0].tokens


def _median_ms(ops: Ops, run: Callable[[], Array], repeats: int) -> float:
    """Of a function's result on the host: libraries that compute when asked are asked."""
    times = []
    for _ in range(repeats + 3):
        ops.synchronize()
        start = time.perf_counter()
        ops.to_numpy(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1000
