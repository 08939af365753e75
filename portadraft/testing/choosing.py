"""What every `Ops` must find in arrays: sums, the greatest, orders, and what a uniform number picks."""

from __future__ import annotations

import numpy as np
import pytest

from portadraft.core.ops import BITS, Ops
from portadraft.errors import InvalidArgument
from portadraft.testing.comparing import (
    BOOLS,
    FLOATS,
    INTS,
    assert_same,
    native,
)


class ChoiceConformance:
    """Needs the fixture `ops`."""

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_cumsum(self, ops: Ops, axis: int) -> None:
        assert_same(ops, ops.cumsum(native(ops, BOOLS), axis), np.cumsum(BOOLS, axis), "int32")
        assert_same(ops, ops.cumsum(native(ops, INTS), axis), np.cumsum(INTS, axis), "int32")
        assert_same(ops, ops.cumsum(native(ops, FLOATS), axis), np.cumsum(FLOATS, axis), "float32")

    def test_cumsum_of_many_bools_does_not_wrap(self, ops: Ops) -> None:
        assert_same(ops, ops.cumsum(ops.full((1, 300), 1, "bool"), 1), np.arange(1, 301)[None], "int32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_argmax(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS, BOOLS):
            assert_same(ops, ops.argmax(native(ops, values), axis), np.argmax(values, axis), "int32")

    @pytest.mark.parametrize("size", [2, 7, 64, 1000, 5000])
    def test_argmax_takes_the_first_of_equals(self, ops: Ops, size: int) -> None:
        generator = np.random.default_rng(size)
        values = generator.integers(0, 3, (4, size))
        for typed in (values.astype(np.float32), values.astype(np.int32), values > 0, np.zeros((4, size), dtype=bool)):
            assert_same(ops, ops.argmax(native(ops, typed), 1), np.argmax(typed, 1), "int32")
        assert_same(
            ops, ops.argmax(native(ops, np.full((2, size), -np.inf, dtype=np.float32)), 1), np.zeros(2), "int32"
        )
        for half in ("float16", "bfloat16"):
            try:
                tied = ops.asarray(values.astype(np.float32), half)
            except InvalidArgument:  # a backend may lack it
                continue
            assert_same(ops, ops.argmax(tied, 1), np.argmax(values, 1), "int32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_argsort(self, ops: Ops, axis: int) -> None:
        for values in (FLOATS, INTS):
            assert_same(ops, ops.argsort(native(ops, values), axis), np.argsort(values, axis, kind="stable"), "int32")

    @pytest.mark.parametrize("size", [3, 17, 64, 257])
    def test_argsort_is_stable(self, ops: Ops, size: int) -> None:
        values = np.random.default_rng(size).choice(
            np.asarray([0.0, -0.0, 1.0, np.inf, -np.inf], dtype=np.float32), (3, size)
        )
        assert_same(ops, ops.argsort(native(ops, values), 1), np.argsort(values, 1, kind="stable"), "int32")

    @pytest.mark.parametrize("k", [1, 3, 40])
    def test_top_k(self, ops: Ops, k: int) -> None:
        values = np.random.default_rng(k).permutation(120).astype(np.float32).reshape(3, 40)
        order = np.argsort(-values, axis=-1)[:, :k]
        got, indices = ops.top_k(native(ops, values), k)
        assert_same(ops, got, np.take_along_axis(values, order, 1), "float32")
        assert_same(ops, indices, order, "int32")

    def test_top_k_of_equals_names_different_places(self, ops: Ops) -> None:
        got, indices = ops.top_k(native(ops, np.zeros((2, 2, 5), dtype=np.float32)), 3)
        assert_same(ops, got, np.zeros((2, 2, 3)), "float32")
        for row in ops.to_numpy(indices).reshape(4, 3):
            assert len(set(row.tolist())) == 3

    def test_searchsorted(self, ops: Ops) -> None:
        rising = np.asarray([[1, 1, 3, 8], [0, 0, 0, 0], [-5, 2, 2, 9]], dtype=np.int32)
        for values in ([1, 0, 10], [0, -1, 2], [8, 5, -5]):
            expected = (rising <= np.asarray(values)[:, None]).sum(axis=1)
            assert_same(ops, ops.searchsorted(native(ops, rising), ops.asarray(values)), expected, "int32")

    @pytest.mark.parametrize("size", [1, 2, 5, 300, 20000])
    @pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
    def test_mass_threshold(self, ops: Ops, size: int, share: float) -> None:
        generator = np.random.default_rng(size)
        for scale in (0.0, 1.0, 6.0):
            x = np.exp(generator.normal(0, scale, (4, size))).astype(np.float32)
            x[1] /= x[1].sum()
            x[2, 1:] = 0
            got = ops.mass_threshold(native(ops, x), share)
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
                assert_same(ops, got, np.where(host >= least[:, None], host, 0), dtype)

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
            assert_same(ops, ops.max(native(ops, values), axis), values.max(axis))
        low = np.full((2, 3), -np.inf, dtype=np.float32)
        assert_same(ops, ops.max(native(ops, low), axis), low.max(axis), "float32")

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_any(self, ops: Ops, axis: int) -> None:
        assert_same(ops, ops.any(native(ops, BOOLS), axis), np.asarray(BOOLS.any(axis)), "bool")

    def test_surely_none(self, ops: Ops) -> None:
        """It may always be False: a device need not tell."""
        assert not ops.surely_none(native(ops, BOOLS))
        assert ops.surely_none(native(ops, BOOLS)[1]) in (True, False)
