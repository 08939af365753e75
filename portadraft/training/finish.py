"""The end of a run: the best drafter measured on everything held out, timed on this machine, and its bill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.target import Target
from portadraft.core.types import BeamShape
from portadraft.drafters.checkpoint import Checkpoint
from portadraft.drafters.redrafter import ReDrafter
from portadraft.profiles.shape import default_shape
from portadraft.training import bill, vocabulary
from portadraft.training.counters import FitResult
from portadraft.training.distributed import Processes
from portadraft.training.evaluation import replayed, shape_name
from portadraft.tuner.replay import Recording


def computation(head: Tensor) -> str:
    """In which type the drafter is trained: bfloat16 where the target runs in it, else float32."""
    return "bfloat16" if head.dtype == torch.bfloat16 else "float32"


def head_for(target: Any, chosen: NDArray[np.int32]) -> tuple[Tensor, Tensor | None]:
    """The target's head rows of a draft vocabulary, (V', D), and their bias if it has one."""
    head, bias = target.head_rows(), target.head_bias()
    at = torch.from_numpy(np.asarray(chosen)).long().to(head.device)
    return head[at], None if bias is None else bias[at]


def final_figures(
    target: Any, checkpoint: Checkpoint, recordings: Sequence[Recording], shapes: Sequence[BeamShape]
) -> dict[str, float]:
    """Tokens per step by shape, by replay on every held-out answer, and on the default shape of this device."""
    config = checkpoint.config
    default, _ = default_shape("redrafter", target.ops.device)
    wanted = [
        s
        for s in dict.fromkeys([*shapes, BeamShape(8, 4), BeamShape(16, 5), default])
        if s.width <= config.vocabulary_size
    ]
    if not recordings:
        return {}
    one = runnable(target, checkpoint)
    return replayed(
        Processes(), config, one.params, one.table, recordings, wanted, one.vocabulary, one.dtype
    ).tokens_per_step


@dataclass(frozen=True)
class Runnable:
    """A checkpoint as the drafter's functions take it, in the type that it is trained in.

    params: with the head's; table: (V, E); vocabulary: (V',) the target's id of each drafter id.
    """

    params: dict[str, Tensor]
    table: Tensor
    vocabulary: NDArray[np.int32]
    dtype: str


def runnable(target: Any, checkpoint: Checkpoint) -> Runnable:
    """Bind a checkpoint to its target."""
    chosen = _ids(checkpoint)
    head, bias = head_for(target, chosen)
    name = computation(head)
    dtype = getattr(torch, name)
    params = {k: torch.from_numpy(np.array(v)).to(head.device, dtype) for k, v in checkpoint.params.items()}
    params["head.weight"] = head.to(dtype)
    if bias is not None:
        params["head.bias"] = bias.to(dtype)
    return Runnable(params, target.embeddings().to(dtype), chosen, name)


def facts_of(
    checkpoint: Checkpoint, recordings: Sequence[Recording], result: FitResult, figures: Mapping[str, float]
) -> dict[str, Any]:
    """What the run did and what came out, for `config.json`."""
    covered = vocabulary.coverage(_ids(checkpoint), [r.tokens for r in recordings], checkpoint.identity.vocabulary_size)
    return {
        "held_out_answers": len(recordings),
        "coverage_held_out": None if np.isnan(covered) else round(covered, 4),
        "parameters": _parameters(checkpoint.config),
        "tokens_per_step": dict(figures),
        "updates": result.updates,
        "planned_updates": result.planned,
        "ended": result.ended,
        "positions": result.positions,
        "skipped_updates": result.skipped,
        "skipped": result.skipped_where,
        "minutes_training": round(result.seconds / 60, 2),
        "peak_memory_bytes": result.peak_bytes,
        "history": result.history,
    }


def costs_of(
    target: Target,
    checkpoint: Checkpoint,
    target_parameters: int,
    corpus_facts: Mapping[str, Any],
    figures: Mapping[str, float],
    rows: int,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Times of steps on this machine, operations, and what repays the training.

    rows, steps: see `bill.flops`. seconds: of the whole run.
    """
    config = checkpoint.config
    # At each position of a text that is continued, `steps` more tokens are read.
    read = {k: int(v) for k, v in corpus_facts.items() if k.endswith("_tokens_read")}
    tokens = (
        int(corpus_facts.get("generated_tokens") or 0) + sum(read.values()) + steps * read.get("local_tokens_read", 0)
    )
    out: dict[str, Any] = {
        "flops": bill.flops(config, target_parameters, tokens, rows, steps),
        "minutes_total": round(seconds / 60, 2),
    }
    shape, _ = default_shape("redrafter", target.ops.device)
    if shape.width > config.vocabulary_size:
        return out
    drafter = ReDrafter(target, config, checkpoint.params, checkpoint.draft_vocabulary)
    costs = bill.step_costs(target, drafter, shape)
    name = shape_name(shape)
    out["step_costs"] = {
        "shape": name,
        "context": bill.CONTEXT,
        "plain_ms": round(costs.plain_ms, 3),
        "draft_ms": round(costs.draft_ms, 3),
        "drafted_ms": round(costs.drafted_ms, 3),
        "draft_share": round(costs.draft_share, 4),
    }
    if name in figures:
        out["repayment"] = bill.repayment(costs, figures[name], seconds)
    return out


def _parameters(config: RecurrentConfig) -> int:
    return sum(int(np.prod(s)) for s in config.shapes().values())


def _ids(checkpoint: Checkpoint) -> NDArray[np.int32]:
    """The draft vocabulary, or every token."""
    if checkpoint.draft_vocabulary is None:
        return np.arange(checkpoint.identity.vocabulary_size, dtype=np.int32)
    return checkpoint.draft_vocabulary
