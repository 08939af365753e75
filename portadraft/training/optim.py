"""Optimisers and averages for a handful of matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def schedule(progress: float, warmup: float = 0.03, least: float = 0.02) -> float:
    """Learning-rate factor at a share of the budget: linear warm-up, then a cosine down to `least`."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    x = min((progress - warmup) / (1.0 - warmup), 1.0)
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * x))


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """Roughly the nearest matrix with orthonormal rows or columns: a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.to(torch.bfloat16)
    tall = y.shape[0] > y.shape[1]
    if tall:
        y = y.T
    y = y / (y.norm() + 1e-7)
    for _ in range(rounds):
        s = y @ y.T
        y = a * y + (b * s + c * (s @ s)) @ y
    return (y.T if tall else y).to(x.dtype)


class Optimizer:
    """AdamW for vectors; for matrices either AdamW or momentum made orthogonal ("muon").

    State is kept in plain dictionaries by parameter name, so that it saves and loads as tensors.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        kind: str,
        rate: float,
        weight_decay: float,
        vector_rate: float = 2e-3,
        scales: dict[str, Tensor] | None = None,
    ) -> None:
        self.params, self.kind, self.rate, self.weight_decay = params, kind, rate, weight_decay
        self.vector_rate = vector_rate
        self.first = {k: torch.zeros_like(v) for k, v in params.items()}
        self.second = {k: torch.zeros_like(v) for k, v in params.items() if not self.is_muon(v)}
        self.count = 0
        self.scales = scales or {}

    def state(self) -> dict[str, Tensor]:
        """Its moments, by name; with `count` they are all it knows."""
        return {f"first.{k}": v for k, v in self.first.items()} | {f"second.{k}": v for k, v in self.second.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], count: int) -> None:
        """Go on from what `state` gave after `count` steps. Raises: KeyError for a tensor that is missing."""
        for name, value in self.state().items():
            value.copy_(state[name])
        self.count = count

    def is_muon(self, x: Tensor) -> bool:
        return self.kind == "muon" and x.ndim == 2

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], factor: float) -> None:
        self.count += 1
        for name, x in self.params.items():
            g, m = grads[name], self.first[name]
            if self.is_muon(x):
                m.mul_(0.95).add_(g)
                update = orthogonal(g + 0.95 * m) * max(1.0, x.shape[0] / x.shape[1]) ** 0.5
                x.mul_(1 - self.rate * factor * self.weight_decay).sub_(self.rate * factor * update)
                continue
            rate = (self.rate if self.kind == "adamw" else self.vector_rate) * factor
            v = self.second[name]
            m.lerp_(g, 0.1)
            v.mul_(0.98).addcmul_(g, g, value=0.02)
            hat = m / (1 - 0.9**self.count)
            root = (v / (1 - 0.98**self.count)).sqrt_().add_(1e-8)
            if x.ndim == 2:
                x.mul_(1 - rate * self.weight_decay)
            update = hat / root
            if name in self.scales:
                update *= self.scales[name]
            x.sub_(rate * update)
