"""The tensor protocol: all that the core asks of an array library.

Native arrays keep their operators (`+ - * @ == < & | ~`), slicing with ints and slices,
`None` axes, `.shape`, `.reshape` and `.sum(axis=…)`. `Ops` adds only what the libraries
spell differently. Data-dependent shapes (boolean indexing, nonzero) and random numbers
are left out on purpose: a step must be capturable, and uniforms come from the host.

Data types are named by strings: "int32", "bool", "float32", "float16", "bfloat16", "float64".
A backend may lack "bfloat16" and "float16" (numpy computes in float32), and "float64" where
`wide` names another; it then raises InvalidArgument, or what its library raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from portadraft.core.types import Array

F = TypeVar("F", bound=Callable[..., Any])

BITS = 30
"""Of a uniform number where a device has no float64."""


@runtime_checkable
class Ops(Protocol):
    """One array library on one device. Every method is pure unless it says otherwise."""

    name: str
    """The registry's name of the backend: "numpy", "torch", "mlx"."""
    device: str
    """Where arrays live, in the library's own words: "cpu", "cuda:0", "mps", "gpu"."""

    @property
    def wide(self) -> str:
        """The widest float type of the device, which choices are computed in: "float64", or "float32" without it."""

    # creation
    def asarray(self, values: Any, dtype: str = "int32") -> Array:
        """Host values (numbers, nested lists, numpy arrays) or a native array, as a native array."""

    def arange(self, stop: int) -> Array:
        """0 … stop-1, int32."""

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        """An array of one value."""

    # form
    def cast(self, x: Array, dtype: str) -> Array: ...

    def dtype(self, x: Array) -> str:
        """The name of x's data type."""

    def concat(self, xs: Sequence[Array], axis: int) -> Array: ...

    def stack(self, xs: Sequence[Array], axis: int) -> Array: ...

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array: ...

    def transpose(self, x: Array, axes: Sequence[int]) -> Array: ...

    # indexing
    def take(self, x: Array, indices: Array, axis: int = 0) -> Array:
        """Whole slices of x along `axis`; the result has `indices`' shape in place of that axis."""

    def gather(self, x: Array, indices: Array, axis: int) -> Array:
        """Element-wise along `axis` (numpy's take_along_axis); `indices` has x's rank."""

    def scatter(self, x: Array, indices: Array, values: Array, axis: int) -> Array:
        """A copy of x with x[…, indices, …] = values along `axis` (numpy's put_along_axis).

        Where an index stands more than once, one of its values wins; which one is not said.
        """

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array: ...

    def clip(self, x: Array, low: float, high: float) -> Array:
        """x, no element below low or above high; of x's type."""

    def bits(self, x: Array) -> Array:
        """The bits of float32 numbers as int32: in the numbers' own order where none is negative."""

    # reductions and order
    def cumsum(self, x: Array, axis: int) -> Array:
        """Running sums; booleans count as int32, and int32 stays int32."""

    def argmax(self, x: Array, axis: int) -> Array:
        """The FIRST index of the greatest value, int32; booleans are allowed."""

    def argsort(self, x: Array, axis: int) -> Array:
        """Ascending and stable, int32."""

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """The k greatest along the last axis, descending, and their int32 indices."""

    def searchsorted(self, x: Array, values: Array) -> Array:
        """How many entries of each rising row of x (B, n) are at most its value (B,): (B,) int32."""

    def mass_threshold(self, x: Array, share: float) -> Array:
        """The least entry that is needed to hold `share` of each row's sum, the greatest taken first.

        x: (B, n) float32 or of type `wide`, none below 0; 0 < share < 1. Returns (B,) of that type: an entry is at
        least that where the entries greater than it hold less than share · sum.
        """

    def at_least(self, x: Array, least: Array) -> Array:
        """x (B, n) where it is at least its row's entry of `least` (B,), of x's type, and 0 elsewhere."""

    def pick(self, weights: Array, uniforms: Array) -> Array:
        """The first place of each row at which the running sum exceeds uniform · total: (B,) int32.

        weights: (B, n) of type `wide`, none below 0, n at most 2**18. uniforms: (B,), from 0 to 1 in float64; where
        `wide` is another type int32, the number times 2**BITS rounded down. A place of weight 0 is never
        picked. -1 for a row that holds NaN, or nothing above 0.
        """

    def max(self, x: Array, axis: int) -> Array: ...

    def any(self, x: Array, axis: int) -> Array: ...

    def surely_none(self, x: Array) -> bool:
        """Whether no element of x (bool) is true, where that shows without waiting for a device; else False."""

    # numbers
    def exp(self, x: Array) -> Array:
        """Of `wide` numbers from -50 to 0 off by at most 1e-14 of itself, where `wide` is "float64"."""

    def softmax(self, x: Array, axis: int) -> Array: ...

    def log_softmax(self, x: Array, axis: int) -> Array: ...

    def logsumexp(self, x: Array, axis: int) -> Array: ...

    def silu(self, x: Array) -> Array: ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x @ weightᵀ + bias with weight (out, in), in the library's fastest spelling."""

    # running
    def compile(self, function: F) -> F:
        """A faster form of a pure function, or the function itself."""

    def no_grad(self) -> AbstractContextManager[Any]:
        """A context in which no gradients are recorded."""

    def synchronize(self) -> None:
        """Wait until everything that was asked for is done (for timings)."""

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """THE way to the host: a copy or view as numpy (half precision comes as float32)."""
