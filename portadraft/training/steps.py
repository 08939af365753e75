"""What stands between a gradient and the step it makes: the mean over processes, and the guard against bad ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from portadraft.training.distributed import Processes

REMEMBERED = 64
ENOUGH = 16
"""Norms that must have been seen before one can be called far above the others."""


@dataclass
class Mean:
    """Gradients of the mean loss over all processes, and sums over them.

    rows, positions: that the gradients come from. broken: the processes whose own were not finite.
    """

    grads: dict[str, Tensor]
    norm: float
    rows: int
    positions: int
    broken: tuple[int, ...] = ()


def averaged_gradients(
    processes: Processes, grads: Mapping[str, Tensor], rows: float, positions: int, weight: float | None = None
) -> Mean:
    """Each process's gradients of its own mean loss, weighted by what that is a mean over; the same bits in all.

    weight: the sum of its rows' weights, `rows` if left out.
    """
    weight = rows if weight is None else weight
    if processes.world == 1:
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        return Mean(dict(grads), norm, int(rows), positions)
    device = next(iter(grads.values())).device
    flat = torch.cat([g.flatten() for g in grads.values()]) * weight
    facts = torch.zeros(3 + processes.world, device=device)
    facts[0], facts[1], facts[2] = rows, positions, weight
    facts[3 + processes.rank] = float(not bool(torch.isfinite(flat).all()))
    total = processes.add(torch.cat([flat, facts]))
    counts = total[len(flat) :].tolist()
    mean = total[: len(flat)] / max(counts[2], 1e-12)
    out, at = {}, 0
    for name, g in grads.items():
        out[name] = mean[at : at + g.numel()].reshape(g.shape)
        at += g.numel()
    broken = tuple(rank for rank, bad in enumerate(counts[3:]) if bad)
    return Mean(out, float(mean.norm()), int(counts[0]), int(counts[1]), broken)


class Guard:
    """Objects to gradients that are not finite, or far above the running median.

    norms: the latest finite ones, which it keeps up to date. A larger scale that lasts moves the median, and is
    then accepted.
    """

    def __init__(self, explode: float, norms: list[float]) -> None:
        self.explode, self.norms = explode, norms

    def objection(self, norm: float) -> str | None:
        """Why not to take the step, or None."""
        if not math.isfinite(norm):
            return "the gradient is not finite"
        median = statistics.median(self.norms) if len(self.norms) >= ENOUGH else None
        self.norms.append(norm)
        del self.norms[:-REMEMBERED]
        if median is not None and norm > self.explode * max(median, 1e-12):
            return f"the gradient is {norm / max(median, 1e-12):.0f} times the running median"
        return None
