"""A stand-in for a CUDA graph on the CPU: records the operators of a function once, and runs just these again.

What a capture bakes in is baked in here too: every Python number, every tensor that was not
computed on the way (weights, the cache, the static inputs), every decision of Python code. A
host read is refused, as a capture refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.nonzero,
    _aten.masked_select,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
    _aten._unique2,
    _aten.unique_dim,
    _aten.repeat_interleave,
}
"""Operators whose result's value or shape the host must know."""


def _waits(func: Any, args: Any) -> bool:
    """Whether a GPU would make the host wait here; indexing with a mask does."""
    if func.overloadpacket in _READS:
        return True
    indexes = func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_)
    return indexes and any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1] or ())


class Tape:
    """A `Recorder` (see `portadraft.backends.torch.graphs`)."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        recording = _Recording()
        with recording:
            outputs = function()
        flat = [outputs] if isinstance(outputs, Tensor) else list(outputs)

        def replay() -> None:
            computed = recording.run()
            for place, output in enumerate(flat):
                fresh = computed.get(id(output))
                if fresh is not None and fresh is not output:
                    flat[place].copy_(fresh)

        return outputs, replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise RuntimeError(f"a host read ({func}): not permitted while a stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def run(self) -> dict[int, Tensor]:
        """Run the calls again: results take the place of the recorded ones, by identity."""
        fresh: dict[int, Tensor] = {}

        def current(x: Any) -> Any:
            return fresh.get(id(x), x) if isinstance(x, Tensor) else x

        for func, args, kwargs, recorded in self.calls:
            result = func(*tree_map(current, args), **tree_map(current, kwargs))
            olds = recorded if isinstance(recorded, (tuple, list)) else (recorded,)
            news = result if isinstance(result, (tuple, list)) else (result,)
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor):
                    fresh[id(old)] = new
        return fresh
