"""Prompt lookup: what it drafts from."""

from __future__ import annotations

import numpy as np
import pytest

from portadraft.backends import make_ops
from portadraft.core.types import BeamShape
from portadraft.drafters import PromptLookup
from portadraft.errors import InvalidArgument


def draft(ids: list[int], length: int = 4, **options: int) -> list[int] | None:
    ops = make_ops("numpy")
    lookup = PromptLookup(ops, **options)
    lookup.admit(0, ids[:-1])
    lookup.observe([ids[-1:]], None, None)
    beam = lookup.draft(np.asarray(ids[-1:]), np.zeros((1, 4)), BeamShape(1, length))
    return None if beam is None else list(beam.tokens[0, 0, : int(beam.lengths[0, 0])])


def test_what_followed_the_same_tokens() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5, 6, 7]


def test_the_latest_place_wins() -> None:
    assert draft([1, 2, 9, 9, 1, 2, 8, 8, 7, 7, 1, 2]) == [8, 8, 7, 7]


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert draft([5, 1, 2, 9, 9, 9, 6, 1, 2, 8, 8, 8, 5, 1, 2]) == [9, 9, 9, 6]


def test_a_loop_goes_on() -> None:
    assert draft([4, 1, 2, 3, 1, 2, 3, 1, 2], length=7) == [3, 1, 2, 3, 1, 2, 3]
    assert draft([7, 7, 7], length=5) == [7] * 5


def test_nothing_to_say_makes_a_plain_step() -> None:
    assert draft([1, 2, 3, 4, 5]) is None
    assert draft([1]) is None


def test_a_single_token_can_be_enough() -> None:
    assert draft([1, 2, 3, 4, 1], shortest=1) == [2, 3, 4, 1]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 2), (3, 2)])
def test_bad_sizes(shortest: int, longest: int) -> None:
    with pytest.raises(InvalidArgument, match=f"shortest={shortest}, longest={longest}"):
        PromptLookup(make_ops("numpy"), longest=longest, shortest=shortest)
