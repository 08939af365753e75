"""Pooling is a union of samples: idempotent, commutative, associative; a re-submission counts once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portadraft.errors import InvalidArgument
from portadraft.profiles.pooling import choose, merge, pool, pooling_key, release
from portadraft.profiles.reading import parse
from portadraft.profiles.schema import BatchChoice, Profile, Sample

from .examples import MACHINE, SOFTWARE, make, pooled_parts, sample, shape

NARROW, WIDE = shape(1, 4, None), shape(4, 4, 8)


@given(pooled_parts(), pooled_parts(), pooled_parts())
@settings(max_examples=80)
def test_laws(a: Profile, b: Profile, c: Profile) -> None:
    ab = pool([a, b])
    assert ab == pool([b, a])
    assert pool([ab, c]) == pool([a, pool([b, c])]) == pool([a, b, c])
    assert pool([a, a]) == a
    assert pool([ab, a]) == pool([ab, ab]) == ab
    assert parse(ab.to_bytes()) == ab


def test_the_laws_can_fail() -> None:
    """A mean of chosen figures, which overwriting profiles would do, is not associative."""
    a, b, c = 1.0, 2.0, 6.0
    assert ((a + b) / 2 + c) / 2 != (a + (b + c) / 2) / 2


def _with(*samples: Sample) -> Profile:
    return make(samples=samples)


def test_resubmission_counts_once() -> None:
    once = [sample("ann", 20.0, WIDE), sample("ann", 10.0, None)]
    again = make(samples=tuple(once), source="sent again")
    pooled = pool([_with(*once), again, _with(sample("bob", 12.0, WIDE), sample("bob", 10.0, None))])
    assert len(pooled.samples) == 4
    assert pooled.batches[0].speedup == pytest.approx((2.0 + 1.2) / 2)


def test_each_submitter_counts_once() -> None:
    """A hundred rounds of one machine do not outvote two others."""
    many = [sample("ann", 30.0 + i / 100, WIDE, round=i) for i in range(100)]
    many += [sample("ann", 10.0, None, round=i) for i in range(100)]
    others = [sample(who, v, s) for who in ("bob", "eve") for s, v in ((WIDE, 8.0), (NARROW, 12.0), (None, 10.0))]
    pooled = pool([_with(*many), _with(*others)])
    assert pooled.batches[0].shape == NARROW
    assert pooled.batches[0].speedup == pytest.approx(1.2)


def test_ratios_are_taken_within_a_submitter() -> None:
    """One of two equal machines is throttled: its speeds are lower, its ratio is the same."""
    samples = [
        sample("ann", 20.0, WIDE),
        sample("ann", 10.0, None),
        sample("bob", 10.0, WIDE),
        sample("bob", 5.0, None),
    ]
    assert choose(1, samples).speedup == pytest.approx(2.0)


def test_pooled_figures_agree_with_each_other() -> None:
    """Medians over all submitters alone would not: 20 with drafts and 30 without, though nobody lost by drafting."""
    samples = [
        *(sample(who, v, s) for who in ("ann", "cat") for s, v in ((WIDE, 20.0), (None, 10.0))),
        sample("bob", 60.0, WIDE),
        sample("bob", 50.0, None),
        sample("eve", 50.0, None),
    ]
    chosen = choose(1, samples)
    assert (chosen.shape, chosen.speedup) == (WIDE, pytest.approx(2.0))
    assert chosen.tokens_per_s == pytest.approx(20.0) and chosen.plain_tokens_per_s == pytest.approx(10.0)
    absurd = choose(1, [sample("ann", 1e9, WIDE), sample("ann", 1e-9, None)])
    assert (absurd.shape, absurd.speedup, absurd.plain_tokens_per_s) == (WIDE, None, None)


def test_plain_wins_a_draw() -> None:
    assert choose(1, [sample("ann", 10.1, WIDE), sample("ann", 10.0, None)]).shape is None
    chosen = choose(1, [sample("ann", 10.5, WIDE), sample("ann", 10.0, None)])
    assert chosen.shape == WIDE
    slower = choose(1, [sample("ann", 9.0, WIDE), sample("ann", 10.0, None)])
    assert slower.shape is None and slower.tokens_per_s == 10.0 and slower.speedup == 1.0


def test_one_lucky_measurement_does_not_win() -> None:
    steady = [sample(f"s{i}", v, s) for i in range(9) for s, v in ((WIDE, 20.0), (None, 10.0))]
    assert choose(1, [*steady, sample("eve", 20.2, NARROW), sample("eve", 10.0, None)]).shape == WIDE
    assert choose(1, [*steady, sample("eve", 25.0, NARROW), sample("eve", 10.0, None)]).shape == NARROW


def test_scoring_rounds_count_where_there_are_some() -> None:
    samples = [
        sample("ann", 40.0, WIDE),
        sample("ann", 15.0, WIDE, phase="score"),
        sample("ann", 10.0, None, phase="score"),
        sample("ann", 18.0, NARROW, phase="score"),
    ]
    assert choose(1, samples).shape == NARROW


def test_busy_machines_count_only_alone() -> None:
    calm = [sample("ann", 20.0, WIDE), sample("ann", 10.0, None)]
    busy = [sample("bob", 90.0, NARROW, disturbed=True), sample("bob", 10.0, None, disturbed=True)]
    assert choose(1, [*calm, *busy]).shape == WIDE
    assert choose(1, busy).shape == NARROW
    assert pool([_with(*calm), _with(*busy)]).disturbed is False
    assert pool([_with(*busy), make(samples=(sample("eve", 1.0, None),), disturbed=True)]).disturbed is True


def test_without_raw_samples_a_choice_stays() -> None:
    stated = make(batches=(BatchChoice(batch_size=8, shape=NARROW),))
    pooled = pool([stated, _with(sample("ann", 20.0, WIDE), sample("ann", 10.0, None))])
    assert {choice.batch_size: choice.shape for choice in pooled.batches} == {1: WIDE, 8: NARROW}


def test_throughput_recommends_a_batch_size() -> None:
    conditions = make().conditions.model_copy(update={"objective": "throughput"})
    parts = [
        make(conditions=conditions, samples=(sample("ann", 20.0, WIDE), sample("ann", 10.0, None))),
        make(
            conditions=conditions,
            samples=(sample("ann", 60.0, WIDE, batch_size=4), sample("ann", 50.0, None, batch_size=4)),
        ),
    ]
    assert pool(parts).recommended_batch_size == 4
    assert pool([_with(sample("ann", 20.0, WIDE)), _with(sample("ann", 20.0, None))]).recommended_batch_size is None


@pytest.mark.parametrize(
    "other",
    [
        make(machine=MACHINE.model_copy(update={"name": "NVIDIA L4"})),
        make(machine=MACHINE.model_copy(update={"memory_gb": 24})),
        make(software=SOFTWARE.model_copy(update={"versions": {"torch": "2.12.0", "transformers": "5.24.0"}})),
        make(conditions=make().conditions.model_copy(update={"temperature": 0.7})),
        make(drafter=make().drafter.model_copy(update={"id": "other"})),
        make(origin="predicted"),
    ],
)
def test_what_differs_is_not_pooled(other: Profile) -> None:
    with pytest.raises(InvalidArgument, match="profiles: 2 that differ"):
        pool([make(), other])
    assert len(merge([make(), other, make()])) == 2


def test_none_to_pool() -> None:
    with pytest.raises(InvalidArgument, match="profiles: 0"):
        pool([])
    assert merge([]) == []


def test_drivers_and_patch_releases_are_pooled() -> None:
    other = make(
        machine=MACHINE.model_copy(update={"driver": "560.1", "reported": "L40S"}),
        software=SOFTWARE.model_copy(update={"versions": {"torch": "2.13.1", "transformers": "5.24.3"}}),
    )
    assert pooling_key(other) == pooling_key(make())
    assert len(merge([other, make()])) == 1


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.0+cu126", "2.13"), ("5.24", "5.24"), ("v3", "3.0"), ("git", "git"), ("", "")]
)
def test_release(version: str, expected: str) -> None:
    assert release(version) == expected


@given(st.text(max_size=200))
def test_release_of_anything(version: str) -> None:
    assert isinstance(release(version), str)
