"""What a training run cost, and how many generated tokens repay it."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from portadraft.core.drafter import Drafter
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.target import Target
from portadraft.core.tree import pack_beam, root_only
from portadraft.core.types import BeamShape
from portadraft.training.progress import skipped_line
from portadraft.tuner.measure import interleave, median_ratio

CONTEXT = 200
"""Tokens of context at which steps are timed."""


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: of the GPU where that is used, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops(
    config: RecurrentConfig, target_parameters: int, target_tokens: int, rows: int, steps: int
) -> dict[str, float]:
    """Estimates: two operations for each parameter and token that is read, six where it is trained.

    target_tokens: that the target read or generated. rows: drafting steps trained, over all positions; steps: T.
    Attention, soft-max, evaluation and the optimiser are left out, and so is the embedding table, of which
    rows are only looked up.
    """
    shapes = config.shapes()
    own = sum(int(np.prod(s)) for name, s in shapes.items() if name != f"lm_head.{config.blocks}.weight")
    width = config.hidden_size if config.tied_head else config.inner_size
    head = config.vocabulary_size * width
    # A frozen head needs no gradient of its own; the target's distributions are made once for each position.
    training: float = rows * (6 * own + (4 if config.tied_head else 6) * head)
    training += rows / max(steps, 1) * 2 * config.vocabulary_size * config.hidden_size
    return {"target": 2.0 * target_parameters * target_tokens, "drafter": training}


@dataclass(frozen=True)
class StepCosts:
    """Medians of one row at a context of `CONTEXT` tokens: a plain step, drafting alone, and a drafted step."""

    plain_ms: float
    draft_ms: float
    drafted_ms: float
    draft_share: float
    step_ratio: float


def step_costs(target: Target, drafter: Drafter, shape: BeamShape, repeats: int = 9) -> StepCosts:
    """Time plain and drafted steps in turns. The text does not matter to the time."""
    ops, facts = target.ops, target.facts
    limit = facts.context_limit or 2 * CONTEXT
    context = max(1, min(CONTEXT, limit - shape.slots() - shape.length - 2))
    ids = [(3 + 7 * i) % facts.vocabulary_size for i in range(context)]
    with ops.no_grad():
        hidden = target.admit([ids], reserve=2 * shape.slots()).hidden[:, 0]
        root = ops.asarray([ids[0]])
        try:

            def plain() -> None:
                target.verify(root_only(ops, root))

            def draft() -> None:
                drafter.draft(root, hidden, shape)

            def drafted() -> None:
                beam = drafter.draft(root, hidden, shape)
                assert beam is not None
                target.verify(pack_beam(ops, root, beam, shape.nodes))

            def timed(step: Any) -> Any:
                def run() -> float:
                    ops.synchronize()
                    start = time.perf_counter()
                    step()
                    ops.synchronize()
                    return (time.perf_counter() - start) * 1000

                return run

            steps = {"plain": timed(plain), "draft": timed(draft), "drafted": timed(drafted)}
            interleave(steps, 2)
            times = interleave(steps, repeats)
        finally:
            target.release(0)
    median = {name: statistics.median(values) for name, values in times.items()}
    return StepCosts(
        median["plain"],
        median["draft"],
        median["drafted"],
        median_ratio(times["draft"], times["plain"]),
        median_ratio(times["drafted"], times["plain"]),
    )


def repayment(costs: StepCosts, tokens_per_step: float, seconds: float) -> dict[str, Any]:
    """The speedup that follows from tokens per step and step costs, and the tokens after which training is repaid.

    It assumes one request at a time on this machine, text like the held-out answers, and that drafting
    goes as in replay. None where drafting saves nothing.
    """
    speedup = tokens_per_step / costs.step_ratio
    saved = (costs.plain_ms / 1000) * (1 - 1 / speedup)  # seconds a token
    return {
        "speedup": round(speedup, 3),
        "repaid_after_tokens": round(seconds / saved) if saved > 0 else None,
        "assumes": "one request at a time on the machine that trained, greedy, text like the held-out answers",
    }


def lines(training: Mapping[str, Any]) -> list[str]:
    """The bill for people."""
    cost, repaid = training.get("step_costs", {}), training.get("repayment", {})
    passes = training.get("target_passes")
    out = [
        f"generated {training.get('generated_tokens', 0):,} tokens"
        + (f" in {passes:,} passes of the model" if passes is not None else "")
        + f"; trained on {training['positions']:,} positions in {training['updates']:,} updates",
        f"{training['minutes_total']:.1f} min, of which training {training['minutes_training']:.1f}; "
        f"about {sum(training['flops'].values()) / 1e15:.3g} PFLOP; "
        f"at most {training['peak_memory_bytes'] / 2**20:,.0f} MiB of memory",
    ]
    if training.get("skipped_updates"):
        places = "; ".join(map(skipped_line, training["skipped"][:3]))
        out.append(f"left out {training['skipped_updates']} updates: {places}")
    if cost:
        out.append(
            f"drafter: {training['parameters'] / 1e6:.2f} M parameters; a draft takes {cost['draft_ms']:.2f} ms, "
            f"{100 * cost['draft_share']:.0f} % of a plain step ({cost['plain_ms']:.2f} ms)"
        )
    if repaid:
        after = repaid["repaid_after_tokens"]
        out.append(
            f"expected speedup {repaid['speedup']:.2f} at {cost['shape']}: "
            + (f"{after:,} generated tokens repay the training" if after is not None else "it does not pay here")
            + f" ({repaid['assumes']})"
        )
    return out
