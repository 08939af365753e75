"""Parameters of sampling are checked where they enter, and say what was wrong."""

from __future__ import annotations

import math

import pytest

from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder
from portadraft.core.requests import Request
from portadraft.core.sampling import Sampling
from portadraft.errors import InvalidArgument

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("temperature", x) for x in (-0.1, NAN, INF, "1", None, True, 1e-320, 1e-16)],
        *[("seed", x) for x in (-1, 2**64, True, 1.5, None)],
        *[("top_k", x) for x in (-1, 1.5, True, None, "5")],
        *[("top_p", x) for x in (0, 0.0, -0.1, 1.01, NAN, None)],
        *[("min_p", x) for x in (-0.1, 1.01, NAN, None)],
        *[("repetition_penalty", x) for x in (0, -1, NAN, INF, None, 1e-39, 1e39)],
        *[("presence_penalty", x) for x in (NAN, INF, None, 1e39)],
        *[("frequency_penalty", x) for x in (NAN, -INF, "0", 1e158)],
        *[("min_tokens", x) for x in (-1, 2.0, None, True)],
        *[("banned", x) for x in (5, "5", [-1], [1.5], [True], None)],
        *[("logit_bias", x) for x in (5, "5", [(1, 2)], {-1: 1.0}, {1.5: 1.0}, {1: INF}, {1: NAN}, {1: "x"}, (1,))],
        *[("logit_bias", {1: x}) for x in (1e39, -1e39)],
    ],
)
def test_bad_values_are_refused_by_name(name, bad):
    with pytest.raises(InvalidArgument, match=f"^{name}(=|: )"):
        Sampling(**{name: bad})


def test_good_values_and_the_ends_of_their_ranges():
    sampling = Sampling(
        0, 2**64 - 1, top_k=0, top_p=1, min_p=1, repetition_penalty=0.1, presence_penalty=-2,
        frequency_penalty=2, logit_bias={7: 1, 3: -INF}, banned={9, 2}, min_tokens=3,
    )  # fmt: skip
    assert sampling.greedy
    assert sampling.logit_bias == ((3, -INF), (7, 1.0))
    assert sampling.banned == (2, 9)
    assert hash(sampling) == hash(Sampling(0, 2**64 - 1, top_p=1, min_p=1, repetition_penalty=0.1, presence_penalty=-2,
                                           frequency_penalty=2, logit_bias=((7, 1), (3, -INF)), banned=[9, 2, 9],
                                           min_tokens=3))  # fmt: skip


def test_nothing_asked_for_changes_nothing():
    assert Sampling() == Sampling(0.0, 0)
    assert not Sampling(0.7, top_k=5, top_p=0.5, min_p=0.1).changes_logits
    assert not Sampling(logit_bias={1: 1.0}, banned=[2], min_tokens=1).needs_history
    for options in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert Sampling(**options).needs_history


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"banned": [3, 64]}, r"banned: token id 64 is outside the model's vocabulary 0…63"),
        ({"logit_bias": {70: 1.0}}, r"logit_bias: token id 70 is outside"),
        ({"banned": range(1, 64), "logit_bias": {0: -INF}}, r"banned: all 64 tokens"),
    ],
)
def test_ids_are_checked_against_the_vocabulary(options, message):
    with pytest.raises(InvalidArgument, match=message):
        Decoder(NumpyTarget.random(1, vocabulary_size=64), sampling=Sampling(**options))


@pytest.mark.parametrize("temperature", [0, 1e-15, 0.5])
def test_the_greatest_values_still_leave_numbers(temperature):
    for options in ({"logit_bias": {5: 1e15}}, {"logit_bias": {5: 1e15, 6: -1e15}, "frequency_penalty": 1.0}):
        decoder = Decoder(NumpyTarget.random(1, vocabulary_size=64), sampling=Sampling(temperature, **options))
        decoder.admit([Request((1, 2, 3), 4)])
        assert [token for _ in range(3) for one in decoder.step() for token in one.tokens] == [5, 5, 5]
    everything = {"presence_penalty": 1e15, "frequency_penalty": -1e15, "repetition_penalty": 1e15}
    decoder = Decoder(NumpyTarget.random(1, vocabulary_size=64), sampling=Sampling(temperature, **everything))
    (first,) = decoder.admit([Request((1, 2, 3), 4)])
    assert all(0 <= token < 64 for token in first.tokens + decoder.step()[0].tokens)


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens_needs_a_token_that_is_no_end(temperature):
    target = NumpyTarget.random(1, vocabulary_size=64)
    with pytest.raises(InvalidArgument, match=r"min_tokens=2: all tokens but end tokens are banned"):
        Decoder(target, sampling=Sampling(temperature, banned=range(2, 64), min_tokens=2), end_tokens=[0, 1])
    Decoder(target, sampling=Sampling(temperature, banned=range(2, 64)), end_tokens=[0, 1])
    Decoder(target, sampling=Sampling(temperature, banned=range(3, 64), min_tokens=2), end_tokens=[0, 1])


def test_a_temperature_beside_a_sampling_is_refused():
    with pytest.raises(InvalidArgument, match=r"temperature=0.5: `sampling` brings one already"):
        Decoder(NumpyTarget.random(1), sampling=Sampling(), temperature=0.5)
