"""`Ops` in torch, for cpu, cuda and mps by device.

Indices are int32 outside and int64 inside: torch's gather, scatter and index_select on
some devices take no int32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from portadraft.backends import host
from portadraft.backends.torch.graphs import Graphs
from portadraft.core.picking import pick_on_device
from portadraft.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = {
    "int32": torch.int32,
    "bool": torch.bool,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
NAMES = {v: k for k, v in DTYPES.items()}
_HOST = {"bfloat16": "float32"}
"""The numpy type from which a type that numpy lacks is made."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch data type of that name.

    Raises: InvalidArgument for a name outside `DTYPES`.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidArgument(f"dtype={name!r}: expected one of {', '.join(DTYPES)}") from None


class TorchOps:
    name = "torch"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.torch_device = torch.device(device)
        self.device = str(self.torch_device)
        self.graphs: Graphs | None = None
        """What `compile` captures with; a target on CUDA sets it."""
        self._names = itertools.count()

    @property
    def host(self) -> bool:
        """Whether arrays lie in the host's memory, where looking at them waits for nothing."""
        return self.torch_device.type == "cpu"

    @property
    def wide(self) -> str:
        return "float64" if self.torch_device.type in ("cpu", "cuda") and not self.careful else "float32"

    @property
    def careful(self) -> bool:
        """Whether to keep off what MPS does otherwise: its sort is not stable in all supported versions, nothing says
        which of equal maxima it takes, and its scatter reads and writes views wrongly.
        """
        return self.torch_device.type == "mps"

    def asarray(self, values: Any, dtype: str = "int32") -> Tensor:
        kind = torch_dtype(dtype)
        if isinstance(values, Tensor):
            return values.to(self.torch_device, kind)
        if isinstance(values, np.ndarray):
            # A copy: torch would otherwise share memory that the caller may write or has mapped read-only.
            # Cast on the host: MPS knows no float64.
            return torch.from_numpy(values.astype(_HOST.get(dtype, dtype))).to(kind).to(self.torch_device)
        return torch.tensor(values, dtype=kind, device=self.torch_device)

    def arange(self, stop: int) -> Tensor:
        return torch.arange(stop, dtype=torch.int32, device=self.torch_device)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Tensor:
        return torch.full(tuple(shape), value, dtype=torch_dtype(dtype), device=self.torch_device)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(torch_dtype(dtype))

    def dtype(self, x: Tensor) -> str:
        return NAMES[x.dtype]

    def concat(self, xs: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(xs), dim=axis)

    def stack(self, xs: Sequence[Tensor], axis: int) -> Tensor:
        return torch.stack(list(xs), dim=axis)

    def broadcast_to(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.expand(tuple(shape))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(tuple(axes))

    def take(self, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        flat = x.index_select(axis, indices.reshape(-1).long())
        if indices.ndim == 1:
            return flat
        axis %= x.ndim
        return flat.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

    def gather(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        # torch.gather does not broadcast; numpy and mlx do.
        axis %= x.ndim
        if _but(x.shape, axis) == _but(indices.shape, axis):
            return x.gather(axis, indices.long())
        shape = list(torch.broadcast_shapes(_but(x.shape, axis), _but(indices.shape, axis)))
        shape_x, shape_i = list(shape), list(shape)
        shape_x[axis], shape_i[axis] = x.shape[axis], indices.shape[axis]
        return x.expand(shape_x).gather(axis, indices.expand(shape_i).long())

    def scatter(self, x: Tensor, indices: Tensor, values: Tensor, axis: int) -> Tensor:
        values = values.expand(indices.shape)
        if self.careful:
            indices, values = indices.contiguous(), values.contiguous()
        return x.scatter(axis, indices.long(), values)

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    def bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)

    def where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        return torch.where(condition, a, b)

    def cumsum(self, x: Tensor, axis: int) -> Tensor:
        dtype = torch.int32 if x.dtype in (torch.bool, torch.int32) else x.dtype
        return x.cumsum(axis, dtype=dtype)

    def argmax(self, x: Tensor, axis: int) -> Tensor:
        if x.dtype == torch.bool:
            x = x.to(torch.int32)
        if self.careful:
            return _first_greatest(x, axis)
        # max gives the first index of the greatest value too, and is four times faster in bfloat16 on a CPU.
        return x.max(axis).indices.to(torch.int32)

    def argsort(self, x: Tensor, axis: int) -> Tensor:
        if self.careful:
            return _stable_order(x, axis)
        return x.argsort(dim=axis, stable=True).to(torch.int32)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(k, dim=-1)
        return values, indices.to(torch.int32)

    def searchsorted(self, x: Tensor, values: Tensor) -> Tensor:
        return torch.searchsorted(x, values[:, None], right=True, out_int32=True)[:, 0]

    def mass_threshold(self, x: Tensor, share: float) -> Tensor:
        if self.host:
            # torch sorts 49,152 numbers in 12 ms on a CPU; here few are sorted, in memory that is the host's anyway.
            return torch.from_numpy(host.mass_threshold(np.from_dlpack(x.detach()), share))
        falling = x.sort(dim=1, descending=True).values
        if x.dtype == torch.float64:
            sums = falling.cumsum(1)
            before = torch.searchsorted(sums, sums[:, -1:] * share, out_int32=True)
            return falling.gather(1, before.clamp(max=x.shape[1] - 1).long())[:, 0]
        # In whole numbers: sums that are exact, and rise, in whatever order a device adds.
        whole = (falling * (2.0**30 / falling.sum(1, keepdim=True)) + 0.5).to(torch.int32)
        sums = whole.cumsum(1, dtype=torch.int32)
        before = torch.searchsorted(sums, (sums[:, -1:] * share).to(torch.int32), out_int32=True)
        return falling.gather(1, before.clamp(max=x.shape[1] - 1).long())[:, 0]

    def at_least(self, x: Tensor, least: Tensor) -> Tensor:
        if not self.host:
            return torch.where(x >= least[:, None], x, 0.0)
        # A quarter of that on a CPU's thread: it keeps what is more than a number that the host names.
        below = np.nextafter(np.from_dlpack(least), np.float32(-np.inf)).tolist()
        rows = [torch.threshold(row, number, 0.0) for row, number in zip(x, below, strict=True)]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def pick(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        if self.host and weights.dtype == torch.float64:
            return torch.from_numpy(host.pick(np.from_dlpack(weights), np.from_dlpack(uniforms)))
        return pick_on_device(self, weights, uniforms)

    def max(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def any(self, x: Tensor, axis: int) -> Tensor:
        return x.any(axis)

    def surely_none(self, x: Tensor) -> bool:
        # What may be captured must not depend on what it finds.
        return self.host and self.graphs is None and not np.from_dlpack(x).any()

    def exp(self, x: Tensor) -> Tensor:
        if self.host and x.dtype == torch.float64 and not x.requires_grad:
            # numpy's is three times as fast as torch's on a CPU's thread.
            return torch.from_numpy(np.exp(np.from_dlpack(x)))
        return x.exp()

    def softmax(self, x: Tensor, axis: int) -> Tensor:
        return x.softmax(axis)

    def log_softmax(self, x: Tensor, axis: int) -> Tensor:
        return x.log_softmax(axis)

    def logsumexp(self, x: Tensor, axis: int) -> Tensor:
        return x.logsumexp(axis)

    def silu(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def compile(self, function: F) -> F:
        # Never torch.compile: it needs a C++ compiler at run time, and starts slowly.
        if self.graphs is None:
            return function
        graphs, key = self.graphs, next(self._names)
        name = getattr(function, "__name__", "function").strip("_")

        def run(*inputs: Any) -> Any:
            return graphs.run(name, key, function, inputs)

        return run  # type: ignore[return-value]

    def no_grad(self) -> AbstractContextManager[Any]:
        # Not inference_mode: tensors made in it could never be trained on.
        return torch.no_grad()

    def synchronize(self) -> None:
        kind = self.torch_device.type
        if kind == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif kind == "mps":
            torch.mps.synchronize()
        elif kind != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        x = x.detach()
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if x.device.type == "cuda":
            # Into pinned memory: the copy is queued behind the kernels, and the host waits for it alone.
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            torch.cuda.current_stream(x.device).synchronize()
            return host.numpy().copy()
        array: np.ndarray[Any, Any] = x.cpu().numpy()
        return array


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Host numbers as an int64 array on the device; on CUDA without waiting for what runs there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _but(shape: Sequence[int], axis: int) -> list[int]:
    """The shape with 1 in place of `axis`."""
    out = list(shape)
    out[axis] = 1
    return out


def _first_greatest(x: Tensor, axis: int) -> Tensor:
    """The first index of the greatest value, whatever the device's own maximum does with equals; int32."""
    size = x.shape[axis]
    places = torch.arange(size, dtype=torch.int32, device=x.device)
    places = places.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    # Where nothing equals the maximum (it is not a number) the last index stands.
    return torch.where(x == x.amax(axis, keepdim=True), places, size - 1).amin(axis)


def _stable_order(x: Tensor, axis: int) -> Tensor:
    """A stable argsort without a sort, int32: each value's rank is counted.

    Takes n² compares, which is little for the few hundred nodes of a beam. What is not a number
    ranks as infinity.
    """
    x = x.movedim(axis, -1)
    if x.is_floating_point():
        x = torch.where(x == x, x, float("inf"))
    places = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    mine, other = x[..., :, None], x[..., None, :]
    before = (other < mine) | ((other == mine) & (places < places[:, None]))
    rank = before.sum(-1, dtype=torch.int32)
    places = places.expand(rank.shape).contiguous()
    return torch.zeros_like(places).scatter(-1, rank.long(), places).movedim(-1, axis)
