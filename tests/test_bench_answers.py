"""What `bench tuner` takes a step's time to be."""

from __future__ import annotations

import statistics

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("skopt", reason="scikit-optimize is not installed")

from portadraft.bench.answers import middle_mean


def test_a_hiccup_is_not_the_shapes() -> None:
    steps = [40.0] * 10
    assert middle_mean([*steps, 900.0, 1.0]) == 40
    assert statistics.fmean([*steps, 900.0, 1.0]) > 100  # what it would have been


def test_steps_that_differ_all_count() -> None:
    assert middle_mean([30.0, 50.0] * 9) == 40
    assert middle_mean([7.0]) == 7
    assert middle_mean([1.0, 2.0, 3.0, 4.0, 5.0]) == 3
