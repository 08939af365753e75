"""Arrays to try operations on, and comparisons of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from portadraft.core.ops import Ops

Host = np.ndarray[Any, Any]

FLOATS = np.asarray([[1.5, -2.0, 0.25, 1.5], [0.0, 3.0, 3.0, -1.0], [-5.0, -5.0, -7.0, -5.0]], dtype=np.float32)
INTS = np.asarray([[3, 1, 3, 2], [0, 0, 0, 0], [-4, 7, 7, -4]], dtype=np.int32)
WIDE = np.asarray([[0.1 + 2.0**-40, 0.7, 0.2], [1 / 3, 1 - 2.0**-45, 1e-9]])
BOOLS = np.asarray([[False, True, True, False], [False, False, False, False], [True, False, True, True]])


def native(ops: Ops, values: Host) -> Any:
    names = {"f": "float32", "i": "int32", "b": "bool"}
    return ops.asarray(values, names[values.dtype.kind])


def assert_same(ops: Ops, got: Any, expected: Host, dtype: str | None = None) -> None:
    if dtype is not None:
        assert ops.dtype(got) == dtype
    host = ops.to_numpy(got)
    assert host.shape == expected.shape
    np.testing.assert_array_equal(host, expected)


def assert_close(ops: Ops, got: Any, expected: Host, atol: float = 1e-7) -> None:
    assert ops.dtype(got) == "float32"
    host = ops.to_numpy(got)
    assert host.shape == expected.shape
    np.testing.assert_allclose(host, expected, rtol=2e-6, atol=atol)


def logits() -> Sequence[Host]:
    generator = np.random.default_rng(2)
    masked = FLOATS.copy()
    masked[0, 1] = masked[2, 3] = -np.inf
    return FLOATS, masked, generator.normal(0, 30, (3, 50)).astype(np.float32), FLOATS + np.float32(1000)


def log_softmax(values: Host, axis: int) -> Host:
    wide = values.astype(np.float64)
    wide = wide - wide.max(axis, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis, keepdims=True)))
