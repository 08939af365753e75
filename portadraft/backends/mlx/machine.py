"""What MLX knows of the device that it computes on, as plain data."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

DISTRIBUTIONS = ("mlx", "mlx-lm")
"""Whose versions timings depend on."""


def describe(device: str) -> dict[str, Any]:
    """device: as `Ops.device` names it. Returns kind ("cpu", "gpu"), and name, memory_bytes, threads where MLX
    knows them; None leaves it to the operating system.
    """
    if device == "cpu":
        return {"kind": "cpu", "name": None, "memory_bytes": None, "threads": None}
    found = mx.device_info() if hasattr(mx, "device_info") else {}
    return {
        "kind": "gpu",
        "name": found.get("device_name"),
        "memory_bytes": found.get("memory_size") or found.get("total_memory"),
        "threads": None,
    }


def free_bytes(device: str) -> int | None:
    """Memory of the device that mlx may still take; None where the operating system knows."""
    return None if device == "cpu" else max(0, mx.get_memory_limit() - mx.get_active_memory())
