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


def test_a_length_of_its_own() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], length=2) == [3, 4]
    ops = make_ops("numpy")
    lookup = PromptLookup(ops, length=6)
    assert lookup.depth(BeamShape(1, 2)) == 6
    with pytest.raises(InvalidArgument, match="length=0"):
        PromptLookup(ops, length=0)


def test_beside_another_drafter_padding_costs_no_slots() -> None:
    """Candidates of 3 x 2 and 1 x 7 tokens hold at most 13 nodes, not 4 x 7."""
    from portadraft.core.tree import pack_beam
    from portadraft.drafters import OracleDrafter, Together

    ops = make_ops("numpy")
    ids = (5, 6, 7, 8, 9, 5, 6)
    drafters = [OracleDrafter(ops, {ids: [7] * 20}, 50, 0.5), PromptLookup(ops, length=7)]
    both = Together(ops, drafters)
    both.admit(0, ids)
    shape = BeamShape(3, 2)
    beam = both.draft(np.asarray([6]), np.zeros((1, 4)), shape)
    assert beam is not None
    assert both.depth(shape) == 7
    assert pack_beam(ops, np.asarray([6]), beam).tokens.shape == (1, 14)
    assert pack_beam(ops, np.asarray([6]), beam, 8).tokens.shape == (1, 8)
    packed = pack_beam(ops, np.asarray([6]), beam)
    assert 7 in packed.depths
