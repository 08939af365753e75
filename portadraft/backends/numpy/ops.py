"""`Ops` in numpy: the reference that the other backends are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from portadraft.backends import host
from portadraft.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "int32": np.int32,
    "bool": np.bool_,
    "float32": np.float32,
    "float16": np.float16,
    "float64": np.float64,
}
NAMES = {np.dtype(v): k for k, v in DTYPES.items()}


def _dtype(name: str) -> Any:
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidArgument(f"dtype={name!r}: numpy serves {', '.join(DTYPES)}; use float32") from None


class NumpyOps:
    name = "numpy"
    device = "cpu"
    wide = "float64"

    def asarray(self, values: Any, dtype: str = "int32") -> Array:
        return np.asarray(values, dtype=_dtype(dtype))

    def arange(self, stop: int) -> Array:
        return np.arange(stop, dtype=np.int32)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        return np.full(tuple(shape), value, dtype=_dtype(dtype))

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(_dtype(dtype), copy=False)

    def dtype(self, x: Array) -> str:
        return NAMES[x.dtype]

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return np.concatenate(list(xs), axis=axis)

    def stack(self, xs: Sequence[Array], axis: int) -> Array:
        return np.stack(list(xs), axis=axis)

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return np.broadcast_to(x, tuple(shape))

    def transpose(self, x: Array, axes: Sequence[int]) -> Array:
        return np.transpose(x, tuple(axes))

    def take(self, x: Array, indices: Array, axis: int = 0) -> Array:
        return np.take(x, indices, axis=axis)

    def gather(self, x: Array, indices: Array, axis: int) -> Array:
        return np.take_along_axis(x, indices, axis=axis)

    def scatter(self, x: Array, indices: Array, values: Array, axis: int) -> Array:
        out = np.array(x)
        np.put_along_axis(out, indices, values, axis=axis)
        return out

    def clip(self, x: Array, low: float, high: float) -> Array:
        return np.asarray(np.clip(x, low, high))

    def bits(self, x: Array) -> Array:
        return np.ascontiguousarray(x).view(np.int32)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        # A Python number takes the other branch's type, as in torch and mlx.
        if not isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            a = np.asarray(a, dtype=b.dtype)
        elif not isinstance(b, np.ndarray) and isinstance(a, np.ndarray):
            b = np.asarray(b, dtype=a.dtype)
        return np.asarray(np.where(condition, a, b))

    def cumsum(self, x: Array, axis: int) -> Array:
        dtype = np.int32 if x.dtype in (np.bool_, np.int32) else x.dtype
        return np.asarray(np.cumsum(x, axis=axis, dtype=dtype))

    def argmax(self, x: Array, axis: int) -> Array:
        return np.asarray(np.argmax(x, axis=axis), dtype=np.int32)

    def argsort(self, x: Array, axis: int) -> Array:
        return np.argsort(x, axis=axis, kind="stable").astype(np.int32)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(x, order, axis=-1), order.astype(np.int32)

    def searchsorted(self, x: Array, values: Array) -> Array:
        return np.asarray((x <= np.asarray(values)[:, None]).sum(axis=1, dtype=np.int32))

    def mass_threshold(self, x: Array, share: float) -> Array:
        falling = np.sort(x, axis=1)[:, ::-1]
        sums = np.cumsum(falling, axis=1, dtype=np.float64)
        before = (sums < share * sums[:, -1:]).sum(axis=1)
        return np.asarray(np.take_along_axis(falling, np.minimum(before, x.shape[1] - 1)[:, None], axis=1)[:, 0])

    def at_least(self, x: Array, least: Array) -> Array:
        return self.where(x >= least[:, None], x, 0.0)

    def pick(self, weights: Array, uniforms: Array) -> Array:
        return host.pick(weights, uniforms)

    def max(self, x: Array, axis: int) -> Array:
        return np.asarray(x.max(axis=axis))

    def any(self, x: Array, axis: int) -> Array:
        return np.asarray(x.any(axis=axis))

    def surely_none(self, x: Array) -> bool:
        return not x.any()

    def exp(self, x: Array) -> Array:
        return np.asarray(np.exp(x))

    def softmax(self, x: Array, axis: int) -> Array:
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        return np.asarray(e / e.sum(axis=axis, keepdims=True))

    def log_softmax(self, x: Array, axis: int) -> Array:
        shifted = x - x.max(axis=axis, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))

    def logsumexp(self, x: Array, axis: int) -> Array:
        top = x.max(axis=axis, keepdims=True)
        return np.asarray(np.log(np.exp(x - top).sum(axis=axis)) + np.squeeze(top, axis=axis))

    def silu(self, x: Array) -> Array:
        # 1/(1+exp(-x)) without overflow on either side.
        e = np.exp(-np.abs(x))
        return np.asarray(x * np.where(x >= 0, 1 / (1 + e), e / (1 + e)))

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        y = x @ weight.T
        return y if bias is None else y + bias

    def compile(self, function: F) -> F:
        return function

    def no_grad(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        return None

    def to_numpy(self, x: Array) -> Array:
        return np.asarray(x)
