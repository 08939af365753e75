"""The number that matters: tokens per step on held-out answers by replay, over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.backends.torch.ops import TorchOps
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.training.distributed import Processes
from portadraft.tuner.replay import Recording, replay


@dataclass(frozen=True)
class Figures:
    """Tokens per step and verified nodes by shape, rounded; score: the first shape's tokens per step, exactly."""

    tokens_per_step: dict[str, float]
    nodes: dict[str, float]
    score: float


def replayed(
    processes: Processes,
    config: RecurrentConfig,
    params: Mapping[str, Tensor],
    table: Tensor,
    held_out: Sequence[Recording],
    shapes: Sequence[BeamShape],
    vocabulary: NDArray[np.int32],
    dtype: str,
) -> Figures:
    """Replay this process's recordings and add up what all of them found.

    params: with the head's; table: (V, E); vocabulary: (V',) the target's id of each drafter id.
    """
    device = table.device
    native = torch.from_numpy(np.asarray(vocabulary)).to(device)
    results = replay(TorchOps(device), config, params, table, held_out, shapes, native, dtype=dtype)
    sums = [[r.steps, sum(map(sum, r.accepted)), r.nodes * r.steps] for r in results]
    # float32 holds the counts exactly up to 16 million
    total = processes.add(torch.tensor(sums, dtype=torch.float32, device=device)).tolist()
    value = {shape_name(r.shape): 1 + a / max(s, 1) for r, (s, a, _) in zip(results, total, strict=True)}
    nodes = {shape_name(r.shape): round(n / max(s, 1), 2) for r, (s, _, n) in zip(results, total, strict=True)}
    return Figures({k: round(v, 4) for k, v in value.items()}, nodes, next(iter(value.values())))


def shape_name(shape: BeamShape) -> str:
    """How a shape is written in reports: 4x4, or 4x4/8 under a node budget."""
    return f"{shape.width}x{shape.length}" + (f"/{shape.nodes}" if shape.nodes else "")
