"""What every `Ops` must do, numpy being the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from portadraft.core.ops import BITS, Ops
from portadraft.errors import InvalidArgument

Host = np.ndarray[Any, Any]

FLOATS = np.asarray([[1.5, -2.0, 0.25, 1.5], [0.0, 3.0, 3.0, -1.0], [-5.0, -5.0, -7.0, -5.0]], dtype=np.float32)
INTS = np.asarray([[3, 1, 3, 2], [0, 0, 0, 0], [-4, 7, 7, -4]], dtype=np.int32)
WIDE = np.asarray([[0.1 + 2.0**-40, 0.7, 0.2], [1 / 3, 1 - 2.0**-45, 1e-9]])
BOOLS = np.asarray([[False, True, True, False], [False, False, False, False], [True, False, True, True]])


class OpsConformance:
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
        np.testing.assert_array_equal(ops.to_numpy(ops.cast(_of(ops, FLOATS), ops.wide)), FLOATS)
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

    # creation

    @pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
    def test_asarray(self, ops: Ops, dtype: str) -> None:
        for values in ([[1, 0], [0, 1]], np.asarray([[1, 0], [0, 1]], dtype=np.int64), np.eye(2)):
            _same(ops, ops.asarray(values, dtype), np.eye(2), dtype)
        _same(ops, ops.asarray(ops.asarray([[1, 0], [0, 1]]), dtype), np.eye(2), dtype)

    def test_asarray_defaults_to_int32(self, ops: Ops) -> None:
        _same(ops, ops.asarray([5, 6]), np.asarray([5, 6]), "int32")

    def test_asarray_of_read_only_memory_and_of_nothing(self, ops: Ops) -> None:
        values = np.arange(3, dtype=np.int32)
        values.flags.writeable = False
        _same(ops, ops.asarray(values), values, "int32")
        assert tuple(ops.asarray([]).shape) == (0,)

    def test_arange(self, ops: Ops) -> None:
        _same(ops, ops.arange(5), np.arange(5), "int32")
        assert tuple(ops.arange(0).shape) == (0,)

    @pytest.mark.parametrize(
        ("value", "dtype"), [(7, "int32"), (1, "bool"), (0, "bool"), (0.5, "float32"), (-3, "float32")]
    )
    def test_full(self, ops: Ops, value: float, dtype: str) -> None:
        _same(ops, ops.full((2, 3), value, dtype), np.full((2, 3), value), dtype)
        _same(ops, ops.full([2], value, dtype), np.full(2, value), dtype)

    def test_full_infinite(self, ops: Ops) -> None:
        _same(ops, ops.full((2,), float("-inf"), "float32"), np.full(2, -np.inf), "float32")

    # form

    def test_cast(self, ops: Ops) -> None:
        _same(ops, ops.cast(_of(ops, FLOATS), "bool"), FLOATS != 0, "bool")
        _same(ops, ops.cast(_of(ops, BOOLS), "int32"), BOOLS.astype(int), "int32")
        _same(ops, ops.cast(_of(ops, INTS), "float32"), INTS.astype(float), "float32")
        _same(ops, ops.cast(_of(ops, FLOATS), "int32"), np.trunc(FLOATS), "int32")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_cast_half_or_refused(self, ops: Ops, dtype: str) -> None:
        try:
            half = ops.cast(_of(ops, FLOATS), dtype)
        except InvalidArgument as error:
            assert dtype in str(error)
            return
        assert ops.dtype(half) == dtype
        back = ops.to_numpy(half)
        np.testing.assert_array_equal(back, FLOATS)  # these values are exact in both
        _same(ops, ops.cast(half, "float32"), FLOATS, "float32")

    def test_dtype(self, ops: Ops) -> None:
        for values, dtype in ((FLOATS, "float32"), (INTS, "int32"), (BOOLS, "bool")):
            assert ops.dtype(_of(ops, values)) == dtype

    def test_dtype_unknown_is_refused(self, ops: Ops) -> None:
        with pytest.raises(InvalidArgument, match="complex64"):
            ops.asarray([1], "complex64")
        with pytest.raises(InvalidArgument, match="int7"):
            ops.cast(ops.asarray([1]), "int7")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_concat(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            expected = np.concatenate([values, values[:3]], axis=axis)
            _same(ops, ops.concat([_of(ops, values), _of(ops, values)], axis), expected)

    def test_concat_keeps_empty_parts_harmless(self, ops: Ops) -> None:
        _same(ops, ops.concat([_of(ops, INTS)[:, :0], _of(ops, INTS)], 1), INTS)

    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_stack(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            _same(ops, ops.stack([_of(ops, values), _of(ops, values)], axis), np.stack([values, values], axis))

    def test_broadcast_to(self, ops: Ops) -> None:
        x = _of(ops, INTS)[:, None, :]
        _same(ops, ops.broadcast_to(x, (3, 5, 4)), np.broadcast_to(INTS[:, None], (3, 5, 4)))
        # Its result may be reshaped and computed with.
        wide = ops.broadcast_to(x, (3, 5, 4)).reshape(15, 4) + 1
        _same(ops, wide, np.broadcast_to(INTS[:, None], (3, 5, 4)).reshape(15, 4) + 1)

    def test_transpose(self, ops: Ops) -> None:
        x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        for axes in ((0, 2, 1), (2, 0, 1), (0, 1, 2)):
            _same(ops, ops.transpose(_of(ops, x), axes), x.transpose(axes))
        _same(ops, ops.transpose(_of(ops, x), (0, 2, 1)).reshape(2, 12), x.transpose(0, 2, 1).reshape(2, 12))

    # indexing

    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("indices", [[1, 0, 1], [[0, 2], [2, 1]], []])
    def test_take(self, ops: Ops, axis: int, indices: Any) -> None:
        index = np.asarray(indices, dtype=np.int32)
        for values in (FLOATS, INTS, BOOLS):
            _same(ops, ops.take(_of(ops, values), _of(ops, index), axis), np.take(values, index, axis))

    def test_take_defaults_to_rows(self, ops: Ops) -> None:
        index = np.asarray([2, 0], dtype=np.int32)
        _same(ops, ops.take(_of(ops, FLOATS), _of(ops, index)), FLOATS[[2, 0]])
        _same(ops, ops.take(ops.arange(4), _of(ops, index)), np.asarray([2, 0]), "int32")

    @pytest.mark.parametrize("axis", [1, -1])
    def test_gather(self, ops: Ops, axis: int) -> None:
        index = np.asarray([[3, 3], [0, 2], [1, 0]], dtype=np.int32)
        for values in (FLOATS, INTS, BOOLS):
            expected = np.take_along_axis(values, index, axis)
            _same(ops, ops.gather(_of(ops, values), _of(ops, index), axis), expected)

    def test_gather_along_the_first_axis(self, ops: Ops) -> None:
        index = np.asarray([[2, 0, 1, 1]], dtype=np.int32)
        _same(ops, ops.gather(_of(ops, INTS), _of(ops, index), 0), np.take_along_axis(INTS, index, 0))

    def test_gather_broadcasts(self, ops: Ops) -> None:
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        one = np.asarray([[[2, 0]]], dtype=np.int32)  # broadcast over x's other axes
        _same(ops, ops.gather(_of(ops, x), _of(ops, one), 2), np.take_along_axis(x, one, 2))
        rows = np.asarray([[[1, 0, 3, 2]] * 5] * 2, dtype=np.int32)
        narrow = x[:, :1]  # x is broadcast over the indices' other axes
        expected = np.take_along_axis(np.broadcast_to(narrow, (2, 5, 4)), rows, 2)
        _same(ops, ops.gather(_of(ops, narrow), _of(ops, rows), 2), expected)

    @pytest.mark.parametrize("axis", [1, -1])
    def test_scatter(self, ops: Ops, axis: int) -> None:
        index = np.asarray([[3, 0], [1, 2], [2, 0]], dtype=np.int32)
        for base, values in ((FLOATS, FLOATS[:, :2]), (INTS, INTS[:, 1:3]), (BOOLS, BOOLS[:, 1:3])):
            expected = base.copy()
            np.put_along_axis(expected, index, values, axis)
            x = _of(ops, base)
            _same(ops, ops.scatter(x, _of(ops, index), _of(ops, values), axis), expected)
            _same(ops, x, base)  # x itself stays

    def test_scatter_takes_one_of_several_values(self, ops: Ops) -> None:
        got = ops.to_numpy(ops.scatter(ops.full((1, 3), 0, "int32"), ops.asarray([[1, 1]]), ops.asarray([[5, 6]]), 1))
        assert got.tolist() in ([[0, 5, 0]], [[0, 6, 0]])

    def test_clip(self, ops: Ops) -> None:
        _same(ops, ops.clip(_of(ops, INTS), -1, 3), np.clip(INTS, -1, 3), "int32")
        _same(ops, ops.clip(_of(ops, FLOATS), -2.5, 1.0), np.clip(FLOATS, -2.5, 1.0), "float32")
        infinite = np.asarray([np.inf, -np.inf], dtype=np.float32)
        _same(ops, ops.clip(_of(ops, infinite), 0, 5), np.asarray([5.0, 0.0]), "float32")

    def test_bits(self, ops: Ops) -> None:
        values = np.asarray([0.0, 2.0**-149, 1e-30, 0.1, 1.0, 2.0, np.inf], dtype=np.float32)
        got = ops.bits(_of(ops, values))
        _same(ops, got, values.view(np.int32), "int32")
        assert (np.diff(ops.to_numpy(got)) > 0).all()
        _same(ops, ops.bits(_of(ops, FLOATS)), FLOATS.view(np.int32), "int32")

    def test_where(self, ops: Ops) -> None:
        for values in (FLOATS, INTS, BOOLS):
            x, y = _of(ops, values), _of(ops, values[::-1].copy())
            _same(ops, ops.where(_of(ops, BOOLS), x, y), np.where(BOOLS, values, values[::-1]))

    def test_where_with_numbers_keeps_the_type(self, ops: Ops) -> None:
        condition = _of(ops, BOOLS)
        _same(ops, ops.where(condition, _of(ops, INTS), 0), np.where(BOOLS, INTS, 0), "int32")
        _same(ops, ops.where(condition, 9, _of(ops, INTS)), np.where(BOOLS, 9, INTS), "int32")
        for number in (float("inf"), float("-inf"), -3.0e38, 0.0):
            number32 = np.float32(number)
            _same(ops, ops.where(condition, _of(ops, FLOATS), number), np.where(BOOLS, FLOATS, number32), "float32")
            _same(ops, ops.where(condition, number, _of(ops, FLOATS)), np.where(BOOLS, number32, FLOATS), "float32")

    def test_where_broadcasts(self, ops: Ops) -> None:
        got = ops.where(_of(ops, BOOLS)[:, None, :], _of(ops, INTS)[:, :, None], 0)
        _same(ops, got, np.where(BOOLS[:, None, :], INTS[:, :, None], 0), "int32")

    # reductions and order

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_cumsum(self, ops: Ops, axis: int) -> None:
        _same(ops, ops.cumsum(_of(ops, BOOLS), axis), np.cumsum(BOOLS, axis), "int32")
        _same(ops, ops.cumsum(_of(ops, INTS), axis), np.cumsum(INTS, axis), "int32")
        _same(ops, ops.cumsum(_of(ops, FLOATS), axis), np.cumsum(FLOATS, axis), "float32")

    def test_cumsum_of_many_bools_does_not_wrap(self, ops: Ops) -> None:
        _same(ops, ops.cumsum(ops.full((1, 300), 1, "bool"), 1), np.arange(1, 301)[None], "int32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_argmax(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            _same(ops, ops.argmax(_of(ops, values), axis), np.argmax(values, axis), "int32")

    @pytest.mark.parametrize("size", [2, 7, 64, 1000, 5000])
    def test_argmax_takes_the_first_of_equals(self, ops: Ops, size: int) -> None:
        generator = np.random.default_rng(size)
        values = generator.integers(0, 3, (4, size))
        for typed in (values.astype(np.float32), values.astype(np.int32), values > 0, np.zeros((4, size), dtype=bool)):
            _same(ops, ops.argmax(_of(ops, typed), 1), np.argmax(typed, 1), "int32")
        _same(ops, ops.argmax(_of(ops, np.full((2, size), -np.inf, dtype=np.float32)), 1), np.zeros(2), "int32")
        for half in ("float16", "bfloat16"):
            try:
                tied = ops.asarray(values.astype(np.float32), half)
            except InvalidArgument:  # a backend may lack it
                continue
            _same(ops, ops.argmax(tied, 1), np.argmax(values, 1), "int32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_argsort(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS):
            _same(ops, ops.argsort(_of(ops, values), axis), np.argsort(values, axis, kind="stable"), "int32")

    @pytest.mark.parametrize("size", [3, 17, 64, 257])
    def test_argsort_is_stable(self, ops: Ops, size: int) -> None:
        values = np.random.default_rng(size).choice(
            np.asarray([0.0, -0.0, 1.0, np.inf, -np.inf], dtype=np.float32), (3, size)
        )
        _same(ops, ops.argsort(_of(ops, values), 1), np.argsort(values, 1, kind="stable"), "int32")

    @pytest.mark.parametrize("k", [1, 3, 40])
    def test_top_k(self, ops: Ops, k: int) -> None:
        values = np.random.default_rng(k).permutation(120).astype(np.float32).reshape(3, 40)
        order = np.argsort(-values, axis=-1)[:, :k]
        got, indices = ops.top_k(_of(ops, values), k)
        _same(ops, got, np.take_along_axis(values, order, 1), "float32")
        _same(ops, indices, order, "int32")

    def test_top_k_of_equals_names_different_places(self, ops: Ops) -> None:
        got, indices = ops.top_k(_of(ops, np.zeros((2, 2, 5), dtype=np.float32)), 3)
        _same(ops, got, np.zeros((2, 2, 3)), "float32")
        for row in ops.to_numpy(indices).reshape(4, 3):
            assert len(set(row.tolist())) == 3

    def test_searchsorted(self, ops: Ops) -> None:
        rising = np.asarray([[1, 1, 3, 8], [0, 0, 0, 0], [-5, 2, 2, 9]], dtype=np.int32)
        for values in ([1, 0, 10], [0, -1, 2], [8, 5, -5]):
            expected = (rising <= np.asarray(values)[:, None]).sum(axis=1)
            _same(ops, ops.searchsorted(_of(ops, rising), ops.asarray(values)), expected, "int32")

    @pytest.mark.parametrize("size", [1, 2, 5, 300, 20000])
    @pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
    def test_mass_threshold(self, ops: Ops, size: int, share: float) -> None:
        generator = np.random.default_rng(size)
        for scale in (0.0, 1.0, 6.0):
            x = np.exp(generator.normal(0, scale, (4, size))).astype(np.float32)
            x[1] /= x[1].sum()
            x[2, 1:] = 0
            got = ops.mass_threshold(_of(ops, x), share)
            assert ops.dtype(got) == "float32"
            for row, least in zip(x.astype(np.float64), ops.to_numpy(got).tolist(), strict=True):
                assert least in row  # one of the entries themselves, and the right one but for the sums' rounding
                total = row.sum()
                assert row[row > least].sum() < share * total + 1e-5 * total
                assert row[row >= least].sum() >= share * total - 1e-5 * total

    def test_mass_threshold_in_the_wide_type(self, ops: Ops) -> None:
        generator = np.random.default_rng(1)
        for scale, share in ((1.0, 0.9), (3.0, 0.5), (6.0, 0.99), (0.1, 0.999)):
            x = ops.asarray(np.exp(generator.normal(0, scale, (3, 7001))), ops.wide)
            got = ops.mass_threshold(x, share)
            assert ops.dtype(got) == ops.wide
            off = 1e-12 if ops.wide == "float64" else 1e-5
            for row, least in zip(ops.to_numpy(x).astype(np.float64), ops.to_numpy(got).tolist(), strict=True):
                assert least in row
                assert row[row > least].sum() < (share + off) * row.sum()
                assert row[row >= least].sum() >= (share - off) * row.sum()

    @pytest.mark.parametrize("rows", [1, 3])
    def test_at_least(self, ops: Ops, rows: int) -> None:
        x = np.random.default_rng(3).random((rows, 50))
        x[0, 0] = 0
        for dtype in ("float32", ops.wide):
            native = ops.asarray(x, dtype)
            host = ops.to_numpy(native)
            for least in (host[:, 7], host[:, 8] * 0, host.max(axis=1)):
                got = ops.at_least(native, ops.asarray(least, dtype))
                _same(ops, got, np.where(host >= least[:, None], host, 0), dtype)

    @pytest.mark.parametrize("size", [1, 5, 256, 257, 1500])
    def test_pick(self, ops: Ops, size: int) -> None:
        generator = np.random.default_rng(size)
        weights = generator.integers(0, 4, (300, size)).astype(np.float64)  # sums are exact
        weights[:, generator.integers(size)] = 2
        whole = generator.integers(0, 2**BITS, 300)
        whole[:2] = 0, 2**BITS - 1
        uniforms = whole * 2.0**-BITS
        given = ops.asarray(uniforms, "float64") if ops.wide == "float64" else ops.asarray(whole)
        got = ops.pick(ops.asarray(weights, ops.wide), given)
        assert ops.dtype(got) == "int32"
        sums = np.cumsum(weights, axis=1)
        right = (sums <= (uniforms * sums[:, -1])[:, None]).sum(axis=1)
        off = ops.to_numpy(got) != right
        assert (np.take_along_axis(weights, ops.to_numpy(got)[:, None], axis=1) > 0).all()
        assert off.mean() <= (0 if ops.wide == "float64" else 0.01)

    def test_pick_names_rows_that_weigh_nothing(self, ops: Ops) -> None:
        given = ops.asarray([0.5] * 2, "float64") if ops.wide == "float64" else ops.asarray([2 ** (BITS - 1)] * 2)
        weights = np.zeros((2, 300))
        weights[1, 299] = 1e-6
        with np.errstate(all="ignore"):
            assert ops.to_numpy(ops.pick(ops.asarray(weights, ops.wide), given)).tolist() == [-1, 299]

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_max(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS):
            _same(ops, ops.max(_of(ops, values), axis), values.max(axis))
        low = np.full((2, 3), -np.inf, dtype=np.float32)
        _same(ops, ops.max(_of(ops, low), axis), low.max(axis), "float32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_any(self, ops: Ops, axis: int) -> None:
        _same(ops, ops.any(_of(ops, BOOLS), axis), np.asarray(BOOLS.any(axis)), "bool")

    def test_surely_none(self, ops: Ops) -> None:
        """It may always be False: a device need not tell."""
        assert not ops.surely_none(_of(ops, BOOLS))
        assert ops.surely_none(_of(ops, BOOLS)[1]) in (True, False)

    # numbers

    def test_exp_in_the_wide_type(self, ops: Ops) -> None:
        values = -np.random.default_rng(4).random((2, 5000)) * 50
        values[0, 0] = 0
        got = ops.exp(ops.asarray(values, ops.wide))
        assert ops.dtype(got) == ops.wide
        off = 1e-14 if ops.wide == "float64" else 1e-5
        np.testing.assert_allclose(ops.to_numpy(got), np.exp(values), rtol=off)
        assert ops.to_numpy(got)[0, 0] == 1
        _same(ops, ops.exp(ops.full((2,), float("-inf"), ops.wide)), np.zeros(2), ops.wide)

    def test_exp(self, ops: Ops) -> None:
        _close(ops, ops.exp(_of(ops, FLOATS)), np.exp(FLOATS.astype(np.float64)))
        _same(ops, ops.exp(ops.full((2,), float("-inf"), "float32")), np.zeros(2), "float32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_softmax(self, ops: Ops, axis: int) -> None:
        for values in _logits():
            _close(ops, ops.softmax(_of(ops, values), axis), np.exp(_log_softmax(values, axis)))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_log_softmax(self, ops: Ops, axis: int) -> None:
        for values in _logits():
            _close(ops, ops.log_softmax(_of(ops, values), axis), _log_softmax(values, axis))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_logsumexp(self, ops: Ops, axis: int) -> None:
        for values in _logits():
            wide = values.astype(np.float64)
            top = wide.max(axis, keepdims=True)
            expected = (np.log(np.exp(wide - top).sum(axis, keepdims=True)) + top).squeeze(axis)
            _close(ops, ops.logsumexp(_of(ops, values), axis), expected)

    def test_logsumexp_is_never_below_the_maximum(self, ops: Ops) -> None:
        values = np.random.default_rng(0).normal(0, 20, (200, 64)).astype(np.float32)
        assert (ops.to_numpy(ops.logsumexp(_of(ops, values), -1)) >= values.max(-1)).all()

    def test_silu(self, ops: Ops) -> None:
        values = np.asarray([-200.0, -20.0, -1.0, 0.0, 1.0, 20.0, 200.0], dtype=np.float32)
        wide = values.astype(np.float64)
        _close(ops, ops.silu(_of(ops, values)), wide / (1 + np.exp(-wide)), atol=1e-6)

    def test_linear(self, ops: Ops) -> None:
        generator = np.random.default_rng(1)
        x, weight, bias = (generator.normal(size=s).astype(np.float32) for s in ((2, 3, 5), (7, 5), (7,)))
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        _close(ops, ops.linear(_of(ops, x), _of(ops, weight)), expected, atol=1e-5)
        _close(ops, ops.linear(_of(ops, x), _of(ops, weight), _of(ops, bias)), expected + bias, atol=1e-5)
        _close(ops, ops.linear(_of(ops, x[0, 0]), _of(ops, weight)), expected[0, 0], atol=1e-5)

    # running

    def test_compile(self, ops: Ops) -> None:
        def function(x: Any, y: Any) -> Any:
            return ops.cumsum(x, 1) + y

        compiled = ops.compile(function)
        for _ in range(2):
            _same(ops, compiled(_of(ops, INTS), _of(ops, INTS)), np.cumsum(INTS, 1) + INTS, "int32")

    def test_no_grad(self, ops: Ops) -> None:
        with ops.no_grad():
            _close(ops, ops.exp(_of(ops, FLOATS)), np.exp(FLOATS.astype(np.float64)))

    def test_synchronize(self, ops: Ops) -> None:
        ops.exp(_of(ops, FLOATS))
        ops.synchronize()

    def test_to_numpy(self, ops: Ops) -> None:
        for values in (FLOATS, INTS, BOOLS):
            got = ops.to_numpy(_of(ops, values))
            assert isinstance(got, np.ndarray)
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
        _same(ops, ops.transpose(_of(ops, INTS), (1, 0)), INTS.T)

    # what native arrays must do by themselves

    def test_operators(self, ops: Ops) -> None:
        x, y = _of(ops, INTS), _of(ops, INTS[:, ::-1].copy())
        a, b = INTS, INTS[:, ::-1]
        for got, expected in (
            (x + y, a + b),
            (x - 1, a - 1),
            (x * 3, a * 3),
            (x // 2, a // 2),
        ):
            _same(ops, got, expected, "int32")
        for is_so, so in ((x == y, a == b), (x < y, a < b), (x > 1, a > 1), (x >= y, a >= b)):
            _same(ops, is_so, so, "bool")
        p, q = _of(ops, BOOLS), _of(ops, BOOLS[::-1].copy())
        _same(ops, p & q, BOOLS & BOOLS[::-1], "bool")
        _same(ops, p | q, BOOLS | BOOLS[::-1], "bool")
        _same(ops, ~p, ~BOOLS, "bool")
        _same(ops, _of(ops, FLOATS) / 2, FLOATS / 2, "float32")
        _same(ops, -_of(ops, FLOATS), -FLOATS, "float32")
        _same(ops, _of(ops, INTS)[:, None, 1:3], INTS[:, None, 1:3], "int32")
        _same(ops, _of(ops, INTS)[..., -1], INTS[..., -1], "int32")
        _close(ops, _of(ops, FLOATS).sum(axis=1), FLOATS.sum(axis=1))
        assert tuple(x.shape) == (3, 4)
        _same(ops, x.reshape(2, -1), a.reshape(2, -1), "int32")


def _of(ops: Ops, values: Host) -> Any:
    names = {"f": "float32", "i": "int32", "b": "bool"}
    return ops.asarray(values, names[values.dtype.kind])


def _same(ops: Ops, got: Any, expected: Host, dtype: str | None = None) -> None:
    if dtype is not None:
        assert ops.dtype(got) == dtype
    host = ops.to_numpy(got)
    assert host.shape == expected.shape
    np.testing.assert_array_equal(host, expected)


def _close(ops: Ops, got: Any, expected: Host, atol: float = 1e-7) -> None:
    assert ops.dtype(got) == "float32"
    host = ops.to_numpy(got)
    assert host.shape == expected.shape
    np.testing.assert_allclose(host, expected, rtol=2e-6, atol=atol)


def _logits() -> Sequence[Host]:
    generator = np.random.default_rng(2)
    masked = FLOATS.copy()
    masked[0, 1] = masked[2, 3] = -np.inf
    return FLOATS, masked, generator.normal(0, 30, (3, 50)).astype(np.float32), FLOATS + np.float32(1000)


def _log_softmax(values: Host, axis: int) -> Host:
    wide = values.astype(np.float64)
    wide = wide - wide.max(axis, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis, keepdims=True)))
