"""What torch knows of the device that it computes on, as plain data."""

from __future__ import annotations

from typing import Any

import torch

DISTRIBUTIONS = ("torch", "transformers")
"""Whose versions timings depend on."""


def describe(device: str) -> dict[str, Any]:
    """device: as `Ops.device` names it. Returns kind ("cpu", "gpu"), and name, memory_bytes, threads where torch
    knows them; None leaves it to the operating system.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return {"kind": "cpu", "name": None, "memory_bytes": None, "threads": torch.get_num_threads()}
    if kind in ("cuda", "xpu"):
        library: Any = getattr(torch, kind)
        properties = library.get_device_properties(int(index) if index else library.current_device())
        return {"kind": "gpu", "name": properties.name, "memory_bytes": properties.total_memory, "threads": None}
    return {"kind": "gpu", "name": None, "memory_bytes": None, "threads": None}


def free_bytes(device: str) -> int | None:
    """Memory of the device that is free now; None where torch does not say, or the operating system knows."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(int(index) if index else torch.cuda.current_device())[0])
    return None
