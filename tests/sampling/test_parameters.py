"""Parameters of sampling are checked where they enter, and say what was wrong."""

from __future__ import annotations

import math

import pytest

from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder
from portadraft.core.sampling import Sampling
from portadraft.errors import InvalidArgument

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("temperature", x) for x in (-0.1, NAN, INF, "1", None, True)],
        *[("seed", x) for x in (-1, 2**64, True, 1.5, None)],
        *[("top_k", x) for x in (-1, 1.5, True, None, "5")],
        *[("top_p", x) for x in (0, 0.0, -0.1, 1.01, NAN, None)],
        *[("min_p", x) for x in (-0.1, 1.01, NAN, None)],
        *[("repetition_penalty", x) for x in (0, -1, NAN, INF, None)],
        *[("presence_penalty", x) for x in (NAN, INF, None)],
        *[("frequency_penalty", x) for x in (NAN, -INF, "0")],
        *[("min_tokens", x) for x in (-1, 2.0, None, True)],
        *[("banned", x) for x in (5, "5", [-1], [1.5], [True], None)],
        *[("logit_bias", x) for x in (5, "5", [(1, 2)], {-1: 1.0}, {1.5: 1.0}, {1: INF}, {1: NAN}, {1: "x"}, (1,))],
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


def test_a_temperature_beside_a_sampling_is_refused():
    with pytest.raises(InvalidArgument, match=r"temperature=0.5: `sampling` brings one already"):
        Decoder(NumpyTarget.random(1), sampling=Sampling(), temperature=0.5)
