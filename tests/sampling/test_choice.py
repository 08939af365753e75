"""The generator is pinned, and the target's choice is the inverse CDF that it says it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portadraft.core import draw
from portadraft.core.choice import Chooser, Situation
from portadraft.core.sampling import Sampling
from portadraft.core.uniforms import COIN, DRAFT, philox, row_seed, uniforms


@pytest.fixture(scope="module")
def ops(forms):
    """Every backend, in float64 and as it computes without; see tests/sampling/conftest.py."""
    return forms


def plain_philox(counter, key):
    """Philox 4x32-10 as its paper writes it, on Python integers; counter of four words, key of two."""
    word = 2**32
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], word)
        high1, low1 = divmod(0xCD9E8D57 * c[2], word)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return c


def ours(counter, key):
    low = np.asarray([counter[0] | counter[1] << 32], dtype=np.uint64)
    keys = np.asarray([key[0] | key[1] << 32], dtype=np.uint64)
    return [int(w[0]) for w in philox(low, keys, stream=counter[2] | counter[3] << 32)]


ONES = 0xFFFFFFFF
KNOWN = [  # of Random123's known-answer file: counter, key, result
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    assert plain_philox(counter, key) == expected
    assert ours(counter, key) == expected


WORD = st.integers(0, ONES)


@given(counter=st.lists(WORD, min_size=4, max_size=4), key=st.lists(WORD, min_size=2, max_size=2))
def test_philox_equals_the_plain_form(counter, key):
    assert ours(counter, key) == plain_philox(counter, key)


def test_uniforms_are_pinned():
    """These numbers are in users' texts: they must never change."""
    values = uniforms([0, 1, 2**64 - 1], [0, 5, 1000], 3)
    assert values.dtype == np.float64
    for row, (seed, position) in enumerate([(0, 0), (1, 5), (2**64 - 1, 1000)]):
        for i in range(3):
            words = plain_philox([position + i, 0, 0, 0], [seed & ONES, seed >> 32])
            assert values[row, i] == ((words[0] << 21) | (words[1] >> 11)) / 2**53
    assert uniforms([0], [0], 1)[0, 0] == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53 == 0.3990464708489645


def test_uniforms_depend_on_seed_and_position_alone():
    whole = uniforms([7], [0], 50)[0]
    assert len(set(whole.tolist())) == 50
    for start in (0, 3, 49):
        assert uniforms([9, 7], [start + 1, start], 50 - start)[1].tolist() == whole[start:].tolist()
    assert uniforms([], [], 3).shape == (0, 3)


def test_uniforms_are_uniform():
    values = uniforms([3], [0], 20000)[0]
    assert ((values >= 0) & (values < 1)).all()
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001


def test_row_seeds():
    seeds = [row_seed(5, i) for i in range(1000)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 1000
    assert all(0 <= s < 2**64 for s in seeds)
    words = plain_philox([3, 0, 1, 0], [5, 0])
    assert seeds[3] == words[2] << 32 | words[3]


def test_streams_are_apart():
    assert len({uniforms([3], [9], 1, stream)[0, 0] for stream in (0, DRAFT, COIN)}) == 3
    words = plain_philox([9, 0, DRAFT, 0], [3, 0])
    assert uniforms([3], [9], 1, DRAFT)[0, 0] == ((words[0] << 21) | (words[1] >> 11)) / 2**53


# the choice


def chosen(ops, logits, temperature=0.0, numbers=None):
    logits = ops.asarray(np.asarray(logits, dtype=np.float32), "float32")
    numbers = None if numbers is None else draw.numbers(ops, np.asarray(numbers, dtype=np.float64)[:, None])
    chooser = Chooser(ops, Sampling(temperature), logits.shape[1])
    got = chooser.choose(logits, Situation(numbers), 0, None)
    assert ops.dtype(got) == "int32"
    return ops.to_numpy(got).tolist()


def test_greedy_takes_the_lowest_id_among_equals(ops):
    logits = np.zeros((3, 1000))
    logits[0, [17, 900]] = 2.0
    logits[2, 999] = 1.0
    assert chosen(ops, logits) == [17, 0, 999]


def reference_cdf(logits, temperature):
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return np.cumsum(weights) / weights.sum()


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10, 97, 100, 4096, 49152])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sampling_is_the_inverse_cdf(ops, vocabulary, temperature):
    """Against float64; without it, and then only, a uniform within rounding of a step may go either way."""
    generator = np.random.default_rng(vocabulary)
    rows = 200 if vocabulary < 1000 else 12
    logits = generator.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    numbers = generator.random(rows)
    near = 0
    for got, row, u in zip(chosen(ops, logits, temperature, numbers), logits, numbers, strict=True):
        cdf = reference_cdf(row, temperature)
        expected = int(np.argmax(cdf > u))
        if got != expected:
            near += 1
            low, high = min(got, expected), max(got, expected)
            assert ops.wide == "float32", (got, expected)
            assert abs(cdf[low] - u) < draw.EDGE, (got, expected)
            assert cdf[high - 1] - cdf[low] < draw.EDGE
    assert near <= 2


@pytest.mark.parametrize("vocabulary", [4, 50, 50000])
def test_the_ends_of_the_unit_interval(ops, vocabulary):
    logits = np.full((2, vocabulary), -np.inf, dtype=np.float32)
    logits[:, 1] = 0.0
    logits[:, -2] = 0.5
    # What a uniform of 1 is clamped to: the last kept token.
    assert chosen(ops, logits, 1.0, [0.0, 1.0]) == [1, vocabulary - 2]


def test_a_uniform_of_one_draws_the_last_token_that_has_any_weight(ops):
    logits = np.full((2, 300), -np.inf, dtype=np.float32)
    logits[:, 10], logits[:, 11] = 0.0, -12.0
    logits[0, 200], logits[1, 200] = -12.0, -40.0  # 4e-18 of all adds nothing
    assert chosen(ops, logits, 1.0, [1.0, 1.0]) == [200, 11]


@settings(max_examples=80)
@given(
    vocabulary=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    u=st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53, 1.0]), st.floats(0, 1)),
    temperature=st.sampled_from([1e-15, 1e-6, 0.1, 1.0, 100.0]),
)
def test_tokens_without_weight_are_never_chosen(ops, vocabulary, seed, u, temperature):
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 5, (1, vocabulary)).astype(np.float32)
    masked = generator.random(vocabulary) < 0.5
    masked[generator.integers(vocabulary)] = False
    logits[0, masked] = -np.inf
    with np.errstate(over="ignore"):
        (token,) = chosen(ops, logits, temperature, [u])
    assert 0 <= token < vocabulary
    assert not masked[token]
    if temperature <= 1e-6:
        assert token == int(np.argmax(logits[0]))


def test_the_distribution_is_the_models(ops):
    logits = np.asarray([1.0, 0.0, -1.0, 2.0, -np.inf, 0.5], dtype=np.float32)
    rows = 20000
    numbers = uniforms([11], [0], rows)[0]
    tokens = chosen(ops, np.broadcast_to(logits, (rows, 6)), 0.8, numbers)
    counts = np.bincount(tokens, minlength=6)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    expected = rows * weights / weights.sum()
    assert counts[4] == 0
    alive = expected > 0
    assert ((counts - expected)[alive] ** 2 / expected[alive]).sum() < 18.5  # 4 degrees, p = 0.001


def test_a_choice_does_not_depend_on_the_rows_beside_it(ops):
    generator = np.random.default_rng(8)
    logits, numbers = generator.normal(0, 3, (6, 333)), generator.random(6)
    together = chosen(ops, logits, 0.7, numbers)
    assert together == [chosen(ops, logits[i : i + 1], 0.7, numbers[i : i + 1])[0] for i in range(6)]
