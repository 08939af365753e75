"""The walk against a walk in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portadraft import backends
from portadraft.core import draw
from portadraft.core.accept import accept
from portadraft.core.choice import Chooser, Situation
from portadraft.core.sampling import Sampling
from portadraft.core.tree import root_only
from portadraft.testing import Tree, pack_tree, random_tree

V = 5


class Counting(Chooser):
    """Counts the choices that it makes."""

    made = 0

    def choose(self, logits, situation, depth, history):
        self.made += 1
        return super().choose(logits, situation, depth, history)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_no_choice_is_computed_once_all_rows_have_stopped(ops, stop):
    """On devices that would have to be waited for the walk goes on; what it says is the same."""
    chain = Tree((0, 1, 2, 3), (0, 0, 1, 2))
    packed = pack_tree(ops, [chain, Tree((0, 1), (0, 0))], slots=4)
    logits = np.zeros((2, 4, V), dtype=np.float32)
    logits[0, np.arange(stop), np.arange(stop) + 1] = 1  # agrees so often
    logits[0, stop:, 4] = logits[1, :, 4] = 1
    seen = []
    for look in (True, False):
        copy = type(ops)() if look else type("Blind", (type(ops),), {"surely_none": lambda self, x: False})()
        chooser = Counting(copy, Sampling(), V)
        verdict, _ = accept(copy, packed, ops.asarray(logits, "float32"), chooser, Situation())
        counts = ops.to_numpy(verdict.counts)
        assert counts.tolist() == [stop + 1, 1]
        tokens, slots = ops.to_numpy(verdict.tokens), ops.to_numpy(verdict.slots)
        assert tokens.shape == slots.shape == (2, 4)
        seen.append((tokens[0, : stop + 1].tolist(), slots.tolist()))
        assert chooser.made == (stop + 1 if look and ops.name != "mlx" else 4)
    assert seen[0] == seen[1]


@pytest.fixture(scope="module", params=sorted(backends.REGISTRY))
def ops(request):
    missing = backends.REGISTRY[request.param].missing()
    if missing:
        pytest.skip(f"{request.param}: {', '.join(missing)} not installed")
    return backends.make_ops(request.param)


def verdict_of(ops, packed, logits, temperature=0.0, numbers=None):
    numbers = None if numbers is None else draw.numbers(ops, numbers)
    chooser = Chooser(ops, Sampling(temperature), V)
    verdict, history = accept(ops, packed, ops.asarray(logits, "float32"), chooser, Situation(numbers))
    assert history is None
    return verdict


def plain_walk(tree, choices):
    """(tokens, slots) of the accepted path; choices: the target's token at (slot, depth)."""
    slot, tokens, slots = 0, [], []
    while True:
        slots.append(slot)
        tokens.append(choices(slot, len(tokens)))
        children = [s for s in range(1, len(tree.tokens)) if tree.parents[s] == slot and tree.tokens[s] == tokens[-1]]
        if not children:
            return tokens, slots
        (slot,) = children


@settings(max_examples=80)
@given(seed=st.integers(0, 10**9), rows=st.integers(1, 4), most=st.integers(2, 14), sampled=st.booleans())
def test_accept_equals_the_plain_walk(ops, seed, rows, most, sampled):
    generator = np.random.default_rng(seed)
    trees = [random_tree(generator, int(generator.integers(1, most + 1)), V) for _ in range(rows)]
    packed = pack_tree(ops, trees, slots=most)
    logits = generator.normal(0, 2, (rows, most, V)).astype(np.float32)
    for b, tree in enumerate(trees):  # let the target agree with some child often, so that walks are long
        for slot in range(1, len(tree.tokens)):
            if generator.random() < 0.6:
                logits[b, tree.parents[slot], tree.tokens[slot]] = 9.0 + generator.random()
    numbers = generator.random((rows, packed.length + 1)) if sampled else None
    temperature = 0.9 if sampled else 0.0
    verdict = verdict_of(ops, packed, logits, temperature, numbers)
    tokens, counts, slots = (ops.to_numpy(x) for x in (verdict.tokens, verdict.counts, verdict.slots))
    assert tokens.shape == slots.shape == (rows, packed.length + 1)
    assert tokens.dtype == counts.dtype == slots.dtype == np.int32

    for b, tree in enumerate(trees):

        def choice(slot, depth, b=b):
            number = None if numbers is None else draw.numbers(ops, numbers[b : b + 1])
            at = ops.asarray(logits[b : b + 1, slot], "float32")
            chooser = Chooser(ops, Sampling(temperature), V)
            return int(ops.to_numpy(chooser.choose(at, Situation(number), depth, None))[0])

        path_tokens, path_slots = plain_walk(tree, choice)
        count = len(path_tokens)
        assert counts[b] == count
        assert tokens[b, :count].tolist() == path_tokens
        assert slots[b, :count].tolist() == path_slots
        assert (slots[b, count:] == path_slots[-1]).all()


def test_every_count_occurs(ops):
    chain = Tree((1, 2, 3, 4), (0, 0, 1, 2))
    packed = pack_tree(ops, [chain] * 4)
    logits = np.zeros((4, 4, V), dtype=np.float32)
    for b in range(4):
        for slot in range(4):
            agrees = slot < b and slot < 3
            logits[b, slot, chain.tokens[slot + 1] if agrees else 0] = 1.0
    verdict = verdict_of(ops, packed, logits)
    assert ops.to_numpy(verdict.counts).tolist() == [1, 2, 3, 4]


def test_a_dead_slot_is_no_child(ops):
    """Dead slots carry token 0 and parent 0; the target's choice of token 0 at the root must not find them."""
    packed = pack_tree(ops, [Tree((1, 2), (0, 0))], slots=5)
    logits = np.zeros((1, 5, V), dtype=np.float32)
    logits[0, :, 0] = 1.0
    verdict = verdict_of(ops, packed, logits)
    assert ops.to_numpy(verdict.counts).tolist() == [1]
    assert ops.to_numpy(verdict.tokens)[0, 0] == 0


def test_the_root_alone(ops):
    logits = np.asarray([[[0, 3, 1, 0, 0]], [[0, 0, 0, 0, 2]]], dtype=np.float32)
    verdict = verdict_of(ops, root_only(ops, ops.asarray([1, 2])), logits)
    assert ops.to_numpy(verdict.tokens).tolist() == [[1], [4]]
    assert ops.to_numpy(verdict.counts).tolist() == [1, 1]
    assert ops.to_numpy(verdict.slots).tolist() == [[0], [0]]


def test_ties_go_to_the_lowest_id(ops):
    packed = pack_tree(ops, [Tree((0, 3, 1), (0, 0, 0))])
    logits = np.zeros((1, 3, V), dtype=np.float32)
    logits[0, 0, [1, 3]] = 1.0
    verdict = verdict_of(ops, packed, logits)
    assert ops.to_numpy(verdict.slots)[0, 1] == 2
