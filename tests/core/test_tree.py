"""dedup_prefix, pack_beam, the node budget and tree_mask against a trie written in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portadraft import backends
from portadraft.core.tree import dedup_prefix, pack_beam, root_only, tree_mask
from portadraft.core.types import Beam, BeamShape
from portadraft.errors import InvalidArgument

ROOT = 99


@pytest.fixture(scope="module", params=sorted(backends.REGISTRY))
def ops(request):
    missing = backends.REGISTRY[request.param].missing()
    if missing:
        pytest.skip(f"{request.param}: {', '.join(missing)} not installed")
    return backends.make_ops(request.param)


# The oracle: knows candidates and prefixes, and nothing of rectangles.


def trie_pack(candidates, scores, budget):
    """[(token, parent slot, depth)] of slots 1…; candidates: lists of tokens; scores: lists alike."""
    nodes = {}  # prefix -> [best score, depth, first candidate]
    for i, tokens in enumerate(candidates):
        bound = math.inf
        for depth in range(1, len(tokens) + 1):
            score = scores[i][depth - 1]
            # Not a number, or minus infinity: the worst; and never above the parent's.
            bound = min(bound, -math.inf if math.isnan(score) else score)
            node = nodes.setdefault(tuple(tokens[:depth]), [bound, depth, i])
            node[0] = max(node[0], bound)
    ranked = sorted(nodes, key=lambda p: (-nodes[p][0], nodes[p][1], nodes[p][2]))
    kept = set(ranked if budget is None else ranked[: budget - 1])
    ordered = sorted(kept, key=lambda p: (nodes[p][1], nodes[p][2]))
    slot = {(): 0} | {prefix: s for s, prefix in enumerate(ordered, start=1)}
    for prefix in ordered:
        assert prefix[:-1] in slot, "the oracle itself keeps parents"
    return [(prefix[-1], slot[prefix[:-1]], len(prefix)) for prefix in ordered]


def padded(rows, length, pad=0):
    """[(tokens, scores)] per candidate, per row, as three rectangles."""
    width = len(rows[0])
    tokens = np.full((len(rows), width, length), pad, dtype=np.int32)
    lengths = np.zeros((len(rows), width), dtype=np.int32)
    scores = np.zeros((len(rows), width, length), dtype=np.float32)
    for b, row in enumerate(rows):
        for i, (ids, values) in enumerate(row):
            tokens[b, i, : len(ids)] = ids
            scores[b, i, : len(ids)] = values
            lengths[b, i] = len(ids)
    return tokens, lengths, scores


def packed_rows(ops, rows, length, budget, pad=0):
    tokens, lengths, scores = padded(rows, length, pad)
    beam = Beam(ops.asarray(tokens), ops.asarray(lengths), ops.asarray(scores, "float32"))
    roots = ops.asarray([ROOT + b for b in range(len(rows))])
    packed = pack_beam(ops, roots, beam, budget)
    return {name: ops.to_numpy(getattr(packed, name)) for name in ("tokens", "parents", "depths", "mask", "sizes")}


def check(ops, rows, length, budget, pad=0):
    width = len(rows[0])
    got = packed_rows(ops, rows, length, budget, pad)
    slots = 1 + width * length if budget is None else min(budget, 1 + width * length)
    assert BeamShape(width, length, budget).slots() == slots
    assert got["tokens"].shape == (len(rows), slots)
    for name in ("tokens", "parents", "depths", "sizes"):
        assert got[name].dtype == np.int32
    assert got["mask"].dtype == np.bool_
    for b, row in enumerate(rows):
        expected = [(ROOT + b, 0, 0), *trie_pack([c for c, _ in row], [s for _, s in row], budget)]
        size = int(got["sizes"][b])
        assert size == len(expected)
        slot_rows = list(zip(*(got[n][b].tolist() for n in ("tokens", "parents", "depths")), strict=True))
        assert slot_rows[:size] == expected
        assert slot_rows[size:] == [(0, 0, 0)] * (slots - size)
        for slot in range(size):
            ancestors, at = {slot, 0}, slot
            while at:
                at = expected[at][1]
                ancestors.add(at)
            assert set(np.flatnonzero(got["mask"][b, slot]).tolist()) == ancestors


# Few different tokens, so that prefixes are shared; few different steps, so that scores are equal.
# Quarters are exact in float32, whatever their sums.
STEPS = st.sampled_from([0.0, 0.0, -0.25, -0.5, -1.0, -4.0, -math.inf])


@st.composite
def beams(draw, steps=STEPS, drop_nan=True):
    width, length, batch = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rows = []
    for _ in range(batch):
        row = []
        for _ in range(width):
            size = draw(st.integers(0, length))
            if row and draw(st.integers(0, 4)) == 0:
                row.append(draw(st.sampled_from(row)))  # a whole candidate twice
                continue
            ids = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
            values, total = [], 0.0
            for _ in ids:
                total += draw(steps)
                values.append(total)
            row.append((ids, values))
        rows.append(row)
    budget = draw(st.one_of(st.none(), st.integers(2, 2 + width * length)))
    return rows, length, budget, draw(st.sampled_from([0, 1, 2, -1]))


@settings(max_examples=150)
@given(case=beams())
def test_pack_beam_equals_the_trie(ops, case):
    check(ops, *case)


@settings(max_examples=60)
@given(case=beams(steps=st.just(0.0)))
def test_pack_beam_of_zero_log_probabilities(ops, case):
    check(ops, *case)


@settings(max_examples=100)
@given(case=beams(steps=st.sampled_from([math.nan, -math.inf, 0.0, 1.0, -1.0, math.inf])))
def test_pack_beam_of_scores_no_drafter_should_give(ops, case):
    """Rising, infinite or not numbers: the tree is still one, and the parents are there."""
    check(ops, *case)


@settings(max_examples=100)
@given(case=beams())
def test_dedup_prefix_equals_its_definition(ops, case):
    rows, length, _, pad = case
    tokens, lengths, _ = padded(rows, length, pad)
    owners = ops.to_numpy(dedup_prefix(ops, ops.asarray(tokens), ops.asarray(lengths)))
    assert owners.dtype == np.int32
    for b, row in enumerate(rows):
        for i, (ids, _) in enumerate(row):
            for step in range(length):
                same = [
                    j for j, (other, _) in enumerate(row) if len(other) > step and other[: step + 1] == ids[: step + 1]
                ]
                assert owners[b, i, step] == (same[0] if step < len(ids) else i)


def test_dedup_prefix_without_lengths(ops):
    tokens = np.asarray([[[1, 2], [1, 2], [1, 3], [2, 2]]], dtype=np.int32)
    owners = ops.to_numpy(dedup_prefix(ops, ops.asarray(tokens)))
    assert owners.tolist() == [[[0, 0], [0, 0], [0, 2], [3, 3]]]


def test_the_papers_example(ops):
    """Three sequences that share "morning sipping coffee": eight drafted tokens instead of fifteen."""
    words = {}

    def ids(text):
        return [words.setdefault(word, len(words)) for word in text.split()]

    candidates = [
        ids("morning sipping coffee and reading"),
        ids("morning sipping coffee with friends"),
        ids("morning sipping coffee and thinking"),
    ]
    rows = [[(c, [-0.5 * (d + 1) for d in range(5)]) for c in candidates]]
    tokens, lengths, _ = padded(rows, 5)
    owners = ops.to_numpy(dedup_prefix(ops, ops.asarray(tokens), ops.asarray(lengths)))
    assert owners[0].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 2]]
    got = packed_rows(ops, rows, 5, None)
    name = {i: word for word, i in words.items()}
    size = int(got["sizes"][0])
    assert size == 1 + 8
    assert [name[t] for t in got["tokens"][0, 1:size].tolist()] == (
        "morning sipping coffee and with reading friends thinking".split()
    )
    assert got["parents"][0, :size].tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 4]
    assert got["depths"][0, :size].tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 5]
    thinking = 8
    seen = [name[t] for t in got["tokens"][0][got["mask"][0, thinking]].tolist()[1:]]
    assert seen == "morning sipping coffee and thinking".split()


def test_a_shared_node_counts_with_its_best_score(ops):
    """Two drafters agree on a first token; the second one's opinion of it is the better."""
    rows = [[([1, 1], [-9.0, -9.5]), ([2, 2], [-3.0, -3.5]), ([1, 3], [-1.0, -2.0])]]
    check(ops, rows, 2, 3)
    got = packed_rows(ops, rows, 2, 3)
    assert got["tokens"][0].tolist() == [ROOT, 1, 3]


def test_padding_that_looks_like_a_token_is_no_node(ops):
    """The pad id is also a real token here, in another candidate and as the same continuation."""
    rows = [[([7], [-1.0]), ([7, 0], [-1.0, -1.5]), ([], [])]]
    check(ops, rows, 2, None, pad=0)
    assert int(packed_rows(ops, rows, 2, None)["sizes"][0]) == 3


def test_nothing_drafted_leaves_the_root(ops):
    got = packed_rows(ops, [[([], []), ([], [])]], 3, 4)
    assert got["sizes"].tolist() == [1]
    assert got["tokens"].tolist() == [[ROOT, 0, 0, 0]]


def test_minus_infinity_ranks_before_what_is_no_node(ops):
    """Duplicates stand earlier than the node of score -inf, and must not take its place."""
    rows = [[([1, 1], [0.0, -1.0]), ([1, 2], [0.0, -math.inf]), ([1, 1], [0.0, -1.0])]]
    check(ops, rows, 2, 4)
    assert packed_rows(ops, rows, 2, 4)["sizes"].tolist() == [4]


@pytest.mark.parametrize("nodes", [1, 0, -3])
def test_a_budget_without_room_to_draft_is_refused(ops, nodes):
    beam = Beam(ops.full((1, 1, 1), 1, "int32"), ops.full((1, 1), 1, "int32"), ops.full((1, 1, 1), 0, "float32"))
    with pytest.raises(InvalidArgument, match=f"nodes={nodes}: expected at least 2"):
        pack_beam(ops, ops.asarray([0]), beam, nodes)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 9])
def test_tree_mask_of_a_chain_and_of_random_trees(ops, depth):
    chain = [0, *range(depth)]
    generator = np.random.default_rng(depth)
    wild = [0] + [int(generator.integers(0, s)) for s in range(1, depth + 1)]  # no deeper than depth
    mask = ops.to_numpy(tree_mask(ops, ops.asarray([chain, wild]), depth))
    assert mask[0].tolist() == np.tril(np.ones((depth + 1, depth + 1), dtype=bool)).tolist()
    for slot in range(depth + 1):
        ancestors, at = {slot}, slot
        while at:
            at = wild[at]
            ancestors.add(at)
        assert set(np.flatnonzero(mask[1, slot]).tolist()) == ancestors


def test_root_only(ops):
    packed = root_only(ops, ops.asarray([5, 6]))
    assert ops.to_numpy(packed.tokens).tolist() == [[5], [6]]
    assert ops.to_numpy(packed.mask).tolist() == [[[True]], [[True]]]
    assert ops.to_numpy(packed.sizes).tolist() == [1, 1]
    assert packed.length == 0


def test_the_comparison_notices_a_lost_tie_break(ops):
    """A negative control: ranking equal scores by candidate before depth loses parents."""
    rows = [[([1, 1, 1], [0.0, 0.0, 0.0]), ([2, 2, 2], [0.0, 0.0, 0.0])]]
    check(ops, rows, 3, 4)
    got = packed_rows(ops, rows, 3, 4)
    assert got["tokens"][0].tolist() == [ROOT, 1, 2, 1]  # candidate-major would say 1, 1, 1
