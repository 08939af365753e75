"""What every `Ops` must do, numpy being the oracle."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from portadraft.core.ops import Ops
from portadraft.testing.arrays import ArrayConformance
from portadraft.testing.choosing import ChoiceConformance
from portadraft.testing.comparing import (
    BOOLS,
    FLOATS,
    INTS,
    WIDE,
    assert_close,
    assert_same,
    log_softmax,
    logits,
    native,
)


class OpsConformance(ArrayConformance, ChoiceConformance):
    """Needs the fixture `ops`. A method `m` of the protocol is covered by `test_m` or `test_m_…`."""

    def test_every_method_is_covered(self) -> None:
        methods = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]
        tests = [name for name in dir(OpsConformance) if name.startswith("test_")]
        missing = [m for m in methods if not any(t == f"test_{m}" or t.startswith(f"test_{m}_") for t in tests)]
        assert len(methods) >= 25
        assert not missing

    def test_protocol(self, ops: Ops) -> None:
        assert isinstance(ops, Ops)
        assert ops.name
        assert ops.device

    def test_wide(self, ops: Ops) -> None:
        """The type itself, and what choices are made of in it."""
        assert ops.wide in ("float64", "float32")
        x = ops.asarray(WIDE, ops.wide)
        assert ops.dtype(x) == ops.wide
        eps = 2.0**-52 if ops.wide == "float64" else 2.0**-23
        expected = WIDE.astype(np.float64 if ops.wide == "float64" else np.float32)
        np.testing.assert_array_equal(ops.to_numpy(x), expected)
        np.testing.assert_array_equal(ops.to_numpy(ops.cast(native(ops, FLOATS), ops.wide)), FLOATS)
        for got, right in (
            (x * 1.1, WIDE * 1.1),
            (x / 0.7, WIDE / 0.7),
            (x - ops.max(x, axis=1)[:, None], WIDE - WIDE.max(axis=1, keepdims=True)),
            (ops.cumsum(x, 1), np.cumsum(WIDE, axis=1)),
            (x.sum(axis=1), WIDE.sum(axis=1)),
            (ops.where(x > 0.4, x, 0.0), np.where(WIDE > 0.4, WIDE, 0)),
            (ops.clip(x, 0.1, 0.9), np.clip(WIDE, 0.1, 0.9)),
            (ops.gather(x, ops.asarray([[1], [0]]), 1), np.take_along_axis(WIDE, np.asarray([[1], [0]]), 1)),
            (ops.take(x, ops.asarray([1, 0])), WIDE[[1, 0]]),
            (ops.concat([x, ops.full((2, 1), 0.0, ops.wide)], axis=1), np.concatenate([WIDE, [[0], [0]]], axis=1)),
            (ops.top_k(x, 2)[0], np.sort(WIDE, axis=1)[:, :0:-1]),
        ):
            assert ops.dtype(got) == ops.wide
            np.testing.assert_allclose(ops.to_numpy(got), right, rtol=4 * eps, atol=eps)
        assert ops.to_numpy(ops.argmax(x, 1)).tolist() == [1, 1]

    # numbers

    def test_exp_in_the_wide_type(self, ops: Ops) -> None:
        values = -np.random.default_rng(4).random((2, 5000)) * 50
        values[0, 0] = 0
        got = ops.exp(ops.asarray(values, ops.wide))
        assert ops.dtype(got) == ops.wide
        off = 1e-14 if ops.wide == "float64" else 1e-5
        np.testing.assert_allclose(ops.to_numpy(got), np.exp(values), rtol=off)
        assert ops.to_numpy(got)[0, 0] == 1
        assert_same(ops, ops.exp(ops.full((2,), float("-inf"), ops.wide)), np.zeros(2), ops.wide)

    def test_exp(self, ops: Ops) -> None:
        assert_close(ops, ops.exp(native(ops, FLOATS)), np.exp(FLOATS.astype(np.float64)))
        assert_same(ops, ops.exp(ops.full((2,), float("-inf"), "float32")), np.zeros(2), "float32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_softmax(self, ops: Ops, axis: int) -> None:
        for values in logits():
            assert_close(ops, ops.softmax(native(ops, values), axis), np.exp(log_softmax(values, axis)))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_log_softmax(self, ops: Ops, axis: int) -> None:
        for values in logits():
            assert_close(ops, ops.log_softmax(native(ops, values), axis), log_softmax(values, axis))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_logsumexp(self, ops: Ops, axis: int) -> None:
        for values in logits():
            wide = values.astype(np.float64)
            top = wide.max(axis, keepdims=True)
            expected = (np.log(np.exp(wide - top).sum(axis, keepdims=True)) + top).squeeze(axis)
            assert_close(ops, ops.logsumexp(native(ops, values), axis), expected)

    def test_logsumexp_is_never_below_the_maximum(self, ops: Ops) -> None:
        values = np.random.default_rng(0).normal(0, 20, (200, 64)).astype(np.float32)
        assert (ops.to_numpy(ops.logsumexp(native(ops, values), -1)) >= values.max(-1)).all()

    def test_silu(self, ops: Ops) -> None:
        values = np.asarray([-200.0, -20.0, -1.0, 0.0, 1.0, 20.0, 200.0], dtype=np.float32)
        wide = values.astype(np.float64)
        assert_close(ops, ops.silu(native(ops, values)), wide / (1 + np.exp(-wide)), atol=1e-6)

    def test_linear(self, ops: Ops) -> None:
        generator = np.random.default_rng(1)
        x, weight, bias = (generator.normal(size=s).astype(np.float32) for s in ((2, 3, 5), (7, 5), (7,)))
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        assert_close(ops, ops.linear(native(ops, x), native(ops, weight)), expected, atol=1e-5)
        assert_close(
            ops, ops.linear(native(ops, x), native(ops, weight), native(ops, bias)), expected + bias, atol=1e-5
        )
        assert_close(ops, ops.linear(native(ops, x[0, 0]), native(ops, weight)), expected[0, 0], atol=1e-5)

    # running

    def test_compile(self, ops: Ops) -> None:
        def function(x: Any, y: Any) -> Any:
            return ops.cumsum(x, 1) + y

        compiled = ops.compile(function)
        for _ in range(2):
            assert_same(ops, compiled(native(ops, INTS), native(ops, INTS)), np.cumsum(INTS, 1) + INTS, "int32")

    def test_no_grad(self, ops: Ops) -> None:
        with ops.no_grad():
            assert_close(ops, ops.exp(native(ops, FLOATS)), np.exp(FLOATS.astype(np.float64)))

    def test_synchronize(self, ops: Ops) -> None:
        ops.exp(native(ops, FLOATS))
        ops.synchronize()

    def test_to_numpy(self, ops: Ops) -> None:
        for values in (FLOATS, INTS, BOOLS):
            got = ops.to_numpy(native(ops, values))
            assert isinstance(got, np.ndarray)
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
        assert_same(ops, ops.transpose(native(ops, INTS), (1, 0)), INTS.T)

    # what native arrays must do by themselves

    def test_operators(self, ops: Ops) -> None:
        x, y = native(ops, INTS), native(ops, INTS[:, ::-1].copy())
        a, b = INTS, INTS[:, ::-1]
        for got, expected in (
            (x + y, a + b),
            (x - 1, a - 1),
            (x * 3, a * 3),
            (x // 2, a // 2),
        ):
            assert_same(ops, got, expected, "int32")
        for is_so, so in ((x == y, a == b), (x < y, a < b), (x > 1, a > 1), (x >= y, a >= b)):
            assert_same(ops, is_so, so, "bool")
        p, q = native(ops, BOOLS), native(ops, BOOLS[::-1].copy())
        assert_same(ops, p & q, BOOLS & BOOLS[::-1], "bool")
        assert_same(ops, p | q, BOOLS | BOOLS[::-1], "bool")
        assert_same(ops, ~p, ~BOOLS, "bool")
        assert_same(ops, native(ops, FLOATS) / 2, FLOATS / 2, "float32")
        assert_same(ops, -native(ops, FLOATS), -FLOATS, "float32")
        assert_same(ops, native(ops, INTS)[:, None, 1:3], INTS[:, None, 1:3], "int32")
        assert_same(ops, native(ops, INTS)[..., -1], INTS[..., -1], "int32")
        assert_close(ops, native(ops, FLOATS).sum(axis=1), FLOATS.sum(axis=1))
        assert tuple(x.shape) == (3, 4)
        assert_same(ops, x.reshape(2, -1), a.reshape(2, -1), "int32")
