"""Captured functions: all kernels of a function launched at once, on the same memory each time.

On a GPU a step of a small model is hundreds of kernels of a few microseconds, and launching
them one by one from Python takes longer than they do. A function whose shapes are static and
which reads nothing but its inputs and memory that stays where it is can be captured once and
replayed. What is captured must not depend on host numbers: they would be those of the capture
for ever.

`Graphs` knows nothing of CUDA: its recorder does, so that another one can prove on a CPU that
a function may be captured.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

ENVIRONMENT = "PORTADRAFT_GRAPHS"
MOST = 64
"""Graphs that are kept; the one that was used longest ago goes first."""
_MOST_SEEN = 1024

Outputs: TypeAlias = "Tensor | tuple[Tensor, ...]"


class Recorder(Protocol):
    """Records what a function does to device memory."""

    def capture(self, function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """The function's outputs, and what computes them again in the same place.

        Raises: whatever a function that cannot be captured causes.
        """


class CudaRecorder:
    """CUDA graphs; all of one recorder share a memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread of the process may allocate or read while we capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


class _Captured:
    """One graph with the memory that it reads its inputs from and leaves its outputs in."""

    def __init__(self, recorder: Recorder, function: Callable[..., Outputs], inputs: Sequence[Tensor | None]) -> None:
        with torch.inference_mode():
            self._inputs = [None if x is None else x.clone() for x in inputs]
            self._outputs, self._replay = recorder.capture(lambda: function(*self._inputs))

    def __call__(self, inputs: Sequence[Tensor | None]) -> Outputs:
        with torch.inference_mode():
            for mine, given in zip(self._inputs, inputs, strict=True):
                if mine is not None and given is not None:
                    mine.copy_(given, non_blocking=True)
            self._replay()
            # Copies: the next replay writes to the same place, and a caller may keep what it was given.
            if isinstance(self._outputs, Tensor):
                return self._outputs.clone()
            return tuple(x.clone() for x in self._outputs)


class Graphs:
    """Runs functions, captured from their second use with inputs of the same shapes on.

    The first use runs as it is, which also warms the libraries up, so that what is used once
    costs nothing. A function that cannot be captured runs as it is for good; `failures` says why.
    most: graphs kept at a time.
    """

    def __init__(self, recorder: Recorder, most: int = MOST) -> None:
        self._recorder = recorder
        self._most = most
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self.failures: dict[str, str] = {}
        """By the name of the function: the reason why it is not captured."""
        self.replays = 0

    def __len__(self) -> int:
        return len(self._captured)

    def run(
        self, name: str, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[Tensor | None]
    ) -> Outputs:
        """function(*inputs), replayed where it was captured under this name, key and shapes.

        name: of the function; key: all else that it depends on. It must compute the same from
        the same inputs, and keep no host number that may differ between two calls.
        """
        if name in self.failures:
            return function(*inputs)
        whole = (name, key, tuple(None if x is None else (tuple(x.shape), x.dtype) for x in inputs))
        captured = self._captured.get(whole)
        if captured is None:
            if whole not in self._seen:
                self._seen[whole] = None
                if len(self._seen) > _MOST_SEEN:
                    self._seen.popitem(last=False)
                return function(*inputs)
            captured = self._capture(name, whole, function, inputs)
            if captured is None:
                return function(*inputs)
        self._captured.move_to_end(whole)
        self.replays += 1
        return captured(inputs)

    def _capture(
        self, name: str, whole: Hashable, function: Callable[..., Outputs], inputs: Sequence[Tensor | None]
    ) -> _Captured | None:
        while len(self._captured) >= self._most:
            self._captured.popitem(last=False)
        try:
            captured = _Captured(self._recorder, function, inputs)
        except torch.OutOfMemoryError:
            # Fewer graphs, rather than none: what is captured now is what is used now.
            self.forget()
            self._most = max(1, self._most // 2)
            return None
        except Exception as error:  # a model's code may do anything that a capture does not allow
            text = (str(error).strip() or "no message").splitlines()[0][:200]
            self.failures[name] = f"{type(error).__name__}: {text}"
            self.forget(name)
            return None
        self._captured[whole] = captured
        return captured

    def forget(self, name: str | None = None) -> None:
        """Drop the graphs of one function, whose memory moves, or all of them."""
        for store in (self._captured, self._seen):
            for whole in [w for w in store if name is None or w[0] == name]:  # type: ignore[index]
                del store[whole]


def default_graphs(device: torch.device) -> Graphs | None:
    """CUDA graphs on a CUDA device, unless $PORTADRAFT_GRAPHS is 0; None elsewhere."""
    if device.type != "cuda" or os.environ.get(ENVIRONMENT, "").strip() == "0":
        return None
    return Graphs(CudaRecorder())


def context_bucket(length: int) -> int:
    """The static context of a pass for rows of up to `length` tokens: 256, 512 … in steps of a quarter of itself."""
    step = max(256, 1 << max(0, length.bit_length() - 3))
    return max(step, -(-length // step) * step)
