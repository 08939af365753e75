"""`Ops` in mlx, for Metal, CUDA and CPUs, whatever this build of mlx brings.

Three habits of mlx are kept from the callers: indices come as uint32, where 0 - 1 wraps, so they
are cast; `topk` gives values only and in ascending order; slice assignment changes every alias
of an array, so nothing here assigns.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from portadraft.core.picking import pick_on_device
from portadraft.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])
Array = Any  # mx.array

DTYPES: dict[str, Any] = {
    "int32": mx.int32,
    "bool": mx.bool_,
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float64": mx.float64,
}
NAMES: dict[Any, str] = {v: k for k, v in DTYPES.items()}


def mlx_dtype(name: str) -> Any:
    """The mlx data type of that name.

    Raises: InvalidArgument for a name outside `DTYPES`.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidArgument(f"dtype={name!r}: expected one of {', '.join(DTYPES)}") from None


class MlxOps:
    name = "mlx"

    def __init__(self) -> None:
        self._local = threading.local()
        self.device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"

    @property
    def wide(self) -> str:
        return "float64" if self.device == "cpu" else "float32"  # Metal has no float64

    def asarray(self, values: Any, dtype: str = "int32") -> Array:
        return self._kept(self._asarray(values, dtype))

    def _asarray(self, values: Any, dtype: str) -> Array:
        wanted = mlx_dtype(dtype)
        if isinstance(values, mx.array):
            return values.astype(wanted)
        # Through numpy: it knows the shapes of nested and of empty lists.
        host = np.asarray(values)
        if host.dtype == np.bool_ or wanted == mx.bool_:
            return mx.array(np.ascontiguousarray(host != 0)).astype(wanted)
        if wanted == mx.float64:
            return mx.array(np.ascontiguousarray(host.astype(np.float64)), dtype=wanted)
        kind = np.int32 if wanted == mx.int32 else np.float32
        return mx.array(np.ascontiguousarray(host.astype(kind))).astype(wanted)

    def arange(self, stop: int) -> Array:
        return mx.arange(stop, dtype=mx.int32) if stop else mx.zeros((0,), dtype=mx.int32)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        wanted = mlx_dtype(dtype)
        return mx.full(tuple(shape), bool(value) if wanted == mx.bool_ else value, dtype=wanted)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(mlx_dtype(dtype))

    def dtype(self, x: Array) -> str:
        return NAMES[x.dtype]

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return mx.concatenate(list(xs), axis=axis)

    def stack(self, xs: Sequence[Array], axis: int) -> Array:
        return mx.stack(list(xs), axis=axis)

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return mx.broadcast_to(x, tuple(shape))

    def transpose(self, x: Array, axes: Sequence[int]) -> Array:
        return mx.transpose(x, tuple(axes))

    def take(self, x: Array, indices: Array, axis: int = 0) -> Array:
        return self._kept(mx.take(x, indices, axis=axis))

    def _kept(self, x: Array) -> Array:
        """x, computed at once where it is made outside of a step.

        An array that is not computed yet belongs to the thread that made it. What is made outside of
        steps, a drafter's tables for example, lives on and may meet other threads.
        """
        if not getattr(self._local, "depth", 0):
            mx.eval(x)
        return x

    def gather(self, x: Array, indices: Array, axis: int) -> Array:
        return mx.take_along_axis(*_aligned(x, indices, axis), axis=axis)

    def scatter(self, x: Array, indices: Array, values: Array, axis: int) -> Array:
        return mx.put_along_axis(x, indices, mx.broadcast_to(values, indices.shape), axis=axis)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return mx.clip(x, low, high).astype(x.dtype)

    def bits(self, x: Array) -> Array:
        return x.view(mx.int32)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return mx.where(condition, a, b)

    def cumsum(self, x: Array, axis: int) -> Array:
        if x.dtype == mx.bool_:
            x = x.astype(mx.int32)
        return mx.cumsum(x, axis=axis)

    def argmax(self, x: Array, axis: int) -> Array:
        if x.dtype == mx.bool_:
            x = x.astype(mx.int32)
        return mx.argmax(x, axis=axis).astype(mx.int32)

    def argsort(self, x: Array, axis: int) -> Array:
        return mx.argsort(x, axis=axis).astype(mx.int32)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        size = x.shape[-1]
        if k == 1:
            best = mx.argmax(x, axis=-1, keepdims=True)
        elif k >= size:
            best = mx.argsort(-x, axis=-1)
        else:
            best = mx.argpartition(-x, kth=k - 1, axis=-1)[..., :k]
            order = mx.argsort(-mx.take_along_axis(x, best, axis=-1), axis=-1)
            best = mx.take_along_axis(best, order, axis=-1)
        return mx.take_along_axis(x, best, axis=-1), best.astype(mx.int32)

    def searchsorted(self, x: Array, values: Array) -> Array:
        return mx.sum(x <= values[:, None], axis=1).astype(mx.int32)

    def mass_threshold(self, x: Array, share: float) -> Array:
        falling = -mx.sort(-x, axis=1)
        if x.dtype == mx.float64:
            exact = mx.cumsum(falling, axis=1)
            least = mx.sum(exact < exact[:, -1:] * share, axis=1, keepdims=True)
            return mx.take_along_axis(falling, mx.minimum(least, x.shape[1] - 1), axis=1)[:, 0]
        # In whole numbers: sums that are exact, and rise, in whatever order a device adds.
        scale = 2.0**30 / mx.sum(falling, axis=1, keepdims=True)
        sums = mx.cumsum((falling * scale + 0.5).astype(mx.int32), axis=1)
        needed = (sums[:, -1:] * share).astype(mx.int32)
        before = mx.minimum(mx.sum(sums < needed, axis=1, keepdims=True), x.shape[1] - 1)
        return mx.take_along_axis(falling, before, axis=1)[:, 0]

    def at_least(self, x: Array, least: Array) -> Array:
        return mx.where(x >= least[:, None], x, 0.0)

    def pick(self, weights: Array, uniforms: Array) -> Array:
        return pick_on_device(self, weights, uniforms)

    def max(self, x: Array, axis: int) -> Array:
        return mx.max(x, axis=axis)

    def any(self, x: Array, axis: int) -> Array:
        return mx.any(x, axis=axis)

    def surely_none(self, x: Array) -> bool:
        return False  # looking at it would compute everything before it now

    def exp(self, x: Array) -> Array:
        # mlx's own exp is off by 4e-6 in float64 as in float32 (0.32 on x86); its power is not.
        return mx.power(self.full((1,), math.e, "float64"), x) if x.dtype == mx.float64 else mx.exp(x)

    def softmax(self, x: Array, axis: int) -> Array:
        return mx.softmax(x, axis=axis, precise=True)

    def log_softmax(self, x: Array, axis: int) -> Array:
        # Not x - logsumexp(x): the small differences of large numbers would be lost.
        shifted = x - mx.max(x, axis=axis, keepdims=True)
        return shifted - mx.log(mx.sum(mx.exp(shifted), axis=axis, keepdims=True))

    def logsumexp(self, x: Array, axis: int) -> Array:
        return mx.logsumexp(x, axis=axis)

    def silu(self, x: Array) -> Array:
        return nn.silu(x)

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    def compile(self, function: F) -> F:
        """The function compiled on a GPU, and itself on a CPU.

        On a CPU mlx hands what it fuses to the system's C++ compiler: 4 to 13 seconds for each shape of
        a draft, for nothing (docs/LOG.md). On a GPU a fifth fewer kernels start. It takes and gives arrays
        and tuples of them.
        """
        return function if self.device == "cpu" else self._compiled(function)

    def _compiled(self, function: F) -> F:
        traced: Any = mx.compile(function)

        def run(*args: Any) -> Any:
            with self._step():  # while it is traced, nothing may be computed
                return traced(*args)

        return run  # type: ignore[return-value]

    def no_grad(self) -> AbstractContextManager[Any]:
        # mlx differentiates functions, and records nothing outside of that; but see `_kept`.
        return self._step()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def synchronize(self) -> None:
        mx.synchronize()

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        if x.dtype in (mx.float16, mx.bfloat16):
            x = x.astype(mx.float32)
        # A copy: a view would keep mlx from writing in place into the buffer that it shows.
        return np.array(x)


def _aligned(x: Array, indices: Array, axis: int) -> tuple[Array, Array]:
    """Both, broadcast against each other on every axis but `axis`."""
    axis %= x.ndim
    shape_x, shape_i = list(x.shape), list(indices.shape)
    shared = [max(a, b) if min(a, b) else 0 for a, b in zip(shape_x, shape_i, strict=True)]
    wide_x, wide_i = list(shared), list(shared)
    wide_x[axis], wide_i[axis] = shape_x[axis], shape_i[axis]
    if wide_x != shape_x:
        x = mx.broadcast_to(x, wide_x)
    if wide_i != shape_i:
        indices = mx.broadcast_to(indices, wide_i)
    return x, indices
