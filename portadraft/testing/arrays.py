"""What every `Ops` must do with arrays: make them, change their form, read and write places of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from portadraft.core.ops import Ops
from portadraft.errors import InvalidArgument
from portadraft.testing.comparing import (
    BOOLS,
    FLOATS,
    INTS,
    assert_same,
    native,
)


class ArrayConformance:
    """Needs the fixture `ops`."""

    # creation

    @pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
    def test_asarray(self, ops: Ops, dtype: str) -> None:
        for values in ([[1, 0], [0, 1]], np.asarray([[1, 0], [0, 1]], dtype=np.int64), np.eye(2)):
            assert_same(ops, ops.asarray(values, dtype), np.eye(2), dtype)
        assert_same(ops, ops.asarray(ops.asarray([[1, 0], [0, 1]]), dtype), np.eye(2), dtype)

    def test_asarray_defaults_to_int32(self, ops: Ops) -> None:
        assert_same(ops, ops.asarray([5, 6]), np.asarray([5, 6]), "int32")

    def test_asarray_of_read_only_memory_and_of_nothing(self, ops: Ops) -> None:
        values = np.arange(3, dtype=np.int32)
        values.flags.writeable = False
        assert_same(ops, ops.asarray(values), values, "int32")
        assert tuple(ops.asarray([]).shape) == (0,)

    def test_arange(self, ops: Ops) -> None:
        assert_same(ops, ops.arange(5), np.arange(5), "int32")
        assert tuple(ops.arange(0).shape) == (0,)

    @pytest.mark.parametrize(
        ("value", "dtype"), [(7, "int32"), (1, "bool"), (0, "bool"), (0.5, "float32"), (-3, "float32")]
    )
    def test_full(self, ops: Ops, value: float, dtype: str) -> None:
        assert_same(ops, ops.full((2, 3), value, dtype), np.full((2, 3), value), dtype)
        assert_same(ops, ops.full([2], value, dtype), np.full(2, value), dtype)

    def test_full_infinite(self, ops: Ops) -> None:
        assert_same(ops, ops.full((2,), float("-inf"), "float32"), np.full(2, -np.inf), "float32")

    # form

    def test_cast(self, ops: Ops) -> None:
        assert_same(ops, ops.cast(native(ops, FLOATS), "bool"), FLOATS != 0, "bool")
        assert_same(ops, ops.cast(native(ops, BOOLS), "int32"), BOOLS.astype(int), "int32")
        assert_same(ops, ops.cast(native(ops, INTS), "float32"), INTS.astype(float), "float32")
        assert_same(ops, ops.cast(native(ops, FLOATS), "int32"), np.trunc(FLOATS), "int32")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_cast_half_or_refused(self, ops: Ops, dtype: str) -> None:
        try:
            half = ops.cast(native(ops, FLOATS), dtype)
        except InvalidArgument as error:
            assert dtype in str(error)
            return
        assert ops.dtype(half) == dtype
        back = ops.to_numpy(half)
        np.testing.assert_array_equal(back, FLOATS)  # these values are exact in both
        assert_same(ops, ops.cast(half, "float32"), FLOATS, "float32")

    def test_dtype(self, ops: Ops) -> None:
        for values, dtype in ((FLOATS, "float32"), (INTS, "int32"), (BOOLS, "bool")):
            assert ops.dtype(native(ops, values)) == dtype

    def test_dtype_unknown_is_refused(self, ops: Ops) -> None:
        with pytest.raises(InvalidArgument, match="complex64"):
            ops.asarray([1], "complex64")
        with pytest.raises(InvalidArgument, match="int7"):
            ops.cast(ops.asarray([1]), "int7")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_concat(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            expected = np.concatenate([values, values[:3]], axis=axis)
            assert_same(ops, ops.concat([native(ops, values), native(ops, values)], axis), expected)

    def test_concat_keeps_empty_parts_harmless(self, ops: Ops) -> None:
        assert_same(ops, ops.concat([native(ops, INTS)[:, :0], native(ops, INTS)], 1), INTS)

    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_stack(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            assert_same(
                ops, ops.stack([native(ops, values), native(ops, values)], axis), np.stack([values, values], axis)
            )

    def test_broadcast_to(self, ops: Ops) -> None:
        x = native(ops, INTS)[:, None, :]
        assert_same(ops, ops.broadcast_to(x, (3, 5, 4)), np.broadcast_to(INTS[:, None], (3, 5, 4)))
        # Its result may be reshaped and computed with.
        wide = ops.broadcast_to(x, (3, 5, 4)).reshape(15, 4) + 1
        assert_same(ops, wide, np.broadcast_to(INTS[:, None], (3, 5, 4)).reshape(15, 4) + 1)

    def test_transpose(self, ops: Ops) -> None:
        x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
        for axes in ((0, 2, 1), (2, 0, 1), (0, 1, 2)):
            assert_same(ops, ops.transpose(native(ops, x), axes), x.transpose(axes))
        assert_same(ops, ops.transpose(native(ops, x), (0, 2, 1)).reshape(2, 12), x.transpose(0, 2, 1).reshape(2, 12))

    # indexing

    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("indices", [[1, 0, 1], [[0, 2], [2, 1]], []])
    def test_take(self, ops: Ops, axis: int, indices: Any) -> None:
        index = np.asarray(indices, dtype=np.int32)
        for values in (FLOATS, INTS, BOOLS):
            assert_same(ops, ops.take(native(ops, values), native(ops, index), axis), np.take(values, index, axis))

    def test_take_defaults_to_rows(self, ops: Ops) -> None:
        index = np.asarray([2, 0], dtype=np.int32)
        assert_same(ops, ops.take(native(ops, FLOATS), native(ops, index)), FLOATS[[2, 0]])
        assert_same(ops, ops.take(ops.arange(4), native(ops, index)), np.asarray([2, 0]), "int32")

    @pytest.mark.parametrize("axis", [1, -1])
    def test_gather(self, ops: Ops, axis: int) -> None:
        index = np.asarray([[3, 3], [0, 2], [1, 0]], dtype=np.int32)
        for values in (FLOATS, INTS, BOOLS):
            expected = np.take_along_axis(values, index, axis)
            assert_same(ops, ops.gather(native(ops, values), native(ops, index), axis), expected)

    def test_gather_along_the_first_axis(self, ops: Ops) -> None:
        index = np.asarray([[2, 0, 1, 1]], dtype=np.int32)
        assert_same(ops, ops.gather(native(ops, INTS), native(ops, index), 0), np.take_along_axis(INTS, index, 0))

    def test_gather_broadcasts(self, ops: Ops) -> None:
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        one = np.asarray([[[2, 0]]], dtype=np.int32)  # broadcast over x's other axes
        assert_same(ops, ops.gather(native(ops, x), native(ops, one), 2), np.take_along_axis(x, one, 2))
        rows = np.asarray([[[1, 0, 3, 2]] * 5] * 2, dtype=np.int32)
        narrow = x[:, :1]  # x is broadcast over the indices' other axes
        expected = np.take_along_axis(np.broadcast_to(narrow, (2, 5, 4)), rows, 2)
        assert_same(ops, ops.gather(native(ops, narrow), native(ops, rows), 2), expected)

    @pytest.mark.parametrize("axis", [1, -1])
    def test_scatter(self, ops: Ops, axis: int) -> None:
        index = np.asarray([[3, 0], [1, 2], [2, 0]], dtype=np.int32)
        for base, values in ((FLOATS, FLOATS[:, :2]), (INTS, INTS[:, 1:3]), (BOOLS, BOOLS[:, 1:3])):
            expected = base.copy()
            np.put_along_axis(expected, index, values, axis)
            x = native(ops, base)
            assert_same(ops, ops.scatter(x, native(ops, index), native(ops, values), axis), expected)
            assert_same(ops, x, base)  # x itself stays

    def test_scatter_takes_one_of_several_values(self, ops: Ops) -> None:
        got = ops.to_numpy(ops.scatter(ops.full((1, 3), 0, "int32"), ops.asarray([[1, 1]]), ops.asarray([[5, 6]]), 1))
        assert got.tolist() in ([[0, 5, 0]], [[0, 6, 0]])

    def test_clip(self, ops: Ops) -> None:
        assert_same(ops, ops.clip(native(ops, INTS), -1, 3), np.clip(INTS, -1, 3), "int32")
        assert_same(ops, ops.clip(native(ops, FLOATS), -2.5, 1.0), np.clip(FLOATS, -2.5, 1.0), "float32")
        infinite = np.asarray([np.inf, -np.inf], dtype=np.float32)
        assert_same(ops, ops.clip(native(ops, infinite), 0, 5), np.asarray([5.0, 0.0]), "float32")

    def test_bits(self, ops: Ops) -> None:
        values = np.asarray([0.0, 2.0**-149, 1e-30, 0.1, 1.0, 2.0, np.inf], dtype=np.float32)
        got = ops.bits(native(ops, values))
        assert_same(ops, got, values.view(np.int32), "int32")
        assert (np.diff(ops.to_numpy(got)) > 0).all()
        assert_same(ops, ops.bits(native(ops, FLOATS)), FLOATS.view(np.int32), "int32")

    def test_where(self, ops: Ops) -> None:
        for values in (FLOATS, INTS, BOOLS):
            x, y = native(ops, values), native(ops, values[::-1].copy())
            assert_same(ops, ops.where(native(ops, BOOLS), x, y), np.where(BOOLS, values, values[::-1]))

    def test_where_with_numbers_keeps_the_type(self, ops: Ops) -> None:
        condition = native(ops, BOOLS)
        assert_same(ops, ops.where(condition, native(ops, INTS), 0), np.where(BOOLS, INTS, 0), "int32")
        assert_same(ops, ops.where(condition, 9, native(ops, INTS)), np.where(BOOLS, 9, INTS), "int32")
        for number in (float("inf"), float("-inf"), -3.0e38, 0.0):
            number32 = np.float32(number)
            assert_same(
                ops, ops.where(condition, native(ops, FLOATS), number), np.where(BOOLS, FLOATS, number32), "float32"
            )
            assert_same(
                ops, ops.where(condition, number, native(ops, FLOATS)), np.where(BOOLS, number32, FLOATS), "float32"
            )

    def test_where_broadcasts(self, ops: Ops) -> None:
        got = ops.where(native(ops, BOOLS)[:, None, :], native(ops, INTS)[:, :, None], 0)
        assert_same(ops, got, np.where(BOOLS[:, None, :], INTS[:, :, None], 0), "int32")
