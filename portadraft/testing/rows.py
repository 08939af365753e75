"""What every `Target` must do with its rows: admit, copy out, restore, truncate, release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from portadraft.core.target import RowState, Target
from portadraft.core.tree import root_only
from portadraft.errors import InvalidArgument
from portadraft.testing.helpers import pack_tree, random_tree, verdict_for
from portadraft.testing.passes import Passes


class RowConformance(Passes):
    """Needs the fixture `target`."""

    # admission

    def test_admit(self, target: Target) -> None:
        prompts = [self.prompt(target, n, n) for n in (1, 7, 4)]
        logits = self.admit(target, prompts)
        assert logits.shape == (3, 1, target.facts.vocabulary_size)
        assert target.lengths == (1, 7, 4)
        for i, prompt in enumerate(prompts):
            assert self.differs(logits[i, 0], self.alone(target, prompt)[0]) < self.tolerance

    def test_admit_equals_one_token_after_another(self, target: Target) -> None:
        prompt = self.prompt(target, 9)
        self.admit(target, [prompt[:1]])
        ops = target.ops
        for i, token in enumerate(prompt[1:], start=1):
            packed = root_only(ops, ops.asarray([token]))
            logits, _ = self.verify(target, packed)
            verdict, counts, slots = verdict_for(ops, packed, [[0]])
            target.commit(verdict, counts, slots)
            assert target.lengths == (i + 1,)
            assert self.differs(logits[0, 0], self.alone(target, prompt[: i + 1])[0]) < self.tolerance

    def test_admit_behind_live_rows_leaves_them_alone(self, target: Target) -> None:
        contexts = [self.prompt(target, 5, 1), self.prompt(target, 12, 2)]
        self.admit(target, contexts[:1])
        self.admit(target, contexts[1:], reserve=20)
        tree = random_tree(np.random.default_rng(0), 5, target.facts.vocabulary_size)
        self.assert_slots(target, pack_tree(target.ops, [tree, tree]), [tree, tree], contexts)

    def test_admit_the_order_of_tokens_matters(self, target: Target) -> None:
        """A negative control: positions and attention reach the logits."""
        prompt = self.prompt(target, 8)
        first, _ = self.alone(target, prompt)
        swapped = [prompt[1], prompt[0], *prompt[2:]]
        assert prompt[0] != prompt[1]
        assert self.differs(self.alone(target, swapped)[0], first) > 10 * self.tolerance

    # rows copied out and restored

    def export(self, target: Target, ids: Sequence[int]) -> RowState:
        """The state of a row that is gone again."""
        with target.ops.no_grad():
            target.admit([ids])
        state = target.export(len(target.lengths) - 1, ids)
        target.release(len(target.lengths) - 1)
        return state

    @pytest.mark.parametrize("length", [0, 1, 9, 14, 15])
    def test_restored_equals_prefilled(self, target: Target, length: int) -> None:
        """Whole and truncated, with other rows in between; and what is decoded behind it is right too."""
        ids = self.prompt(target, 15)
        state = self.export(target, ids)
        assert state.ids == tuple(ids)
        assert state.nbytes > 0
        other = self.prompt(target, 20, 5)
        prompt = ids[:length] + self.prompt(target, 4, 6)
        logits = self.admit(target, [other])
        with target.ops.no_grad():
            verified = target.admit([prompt], known=[(state, length)])
        assert target.lengths == (20, len(prompt))
        for got, expected in ((verified.logits, 0), (verified.hidden, 1)):
            got = target.ops.to_numpy(got)[0, 0]
            assert self.differs(got, self.alone(target, prompt)[expected]) < self.tolerance
        assert self.differs(logits[0, 0], self.alone(target, other)[0]) < self.tolerance
        trees = [random_tree(np.random.default_rng(s), 6, target.facts.vocabulary_size) for s in (8, 9)]
        self.assert_slots(target, pack_tree(target.ops, trees), trees, [other, prompt])

    def test_restored_rows_mix_with_new_ones(self, target: Target) -> None:
        first, second = self.prompt(target, 12, 1), self.prompt(target, 7, 2)
        states = [self.export(target, first), self.export(target, second)]
        prompts = [self.prompt(target, 5, 3), [*first[:8], 1, 2, 3], [*second, 4], self.prompt(target, 2, 4)]
        with target.ops.no_grad():
            verified = target.admit(prompts, known=[None, (states[0], 8), (states[1], 7), None], reserve=5)
        logits = target.ops.to_numpy(verified.logits)
        assert target.lengths == (5, 11, 8, 2)
        for i, prompt in enumerate(prompts):
            assert self.differs(logits[i, 0], self.alone(target, prompt)[0]) < self.tolerance
        trees = [random_tree(np.random.default_rng(s), 5, target.facts.vocabulary_size) for s in range(4)]
        self.assert_slots(target, pack_tree(target.ops, trees), trees, prompts)

    def test_a_state_is_a_copy_of_what_was_committed(self, target: Target) -> None:
        """Decoding goes on behind the exported row, is cut back and goes elsewhere: the state stays as it was."""
        ops, context = target.ops, self.prompt(target, 6)
        self.admit(target, [context])
        tree = random_tree(np.random.default_rng(0), 8, target.facts.vocabulary_size)
        packed = pack_tree(ops, [tree])
        self.verify(target, packed)
        path = tree.path(7)
        verdict, counts, slots = verdict_for(ops, packed, [path])
        target.commit(verdict, counts, slots)
        context += [tree.tokens[s] for s in path]
        state = target.export(0, context)
        target.truncate(0, 3)
        self.verify(target, packed)
        verdict, counts, slots = verdict_for(ops, packed, [tree.path(1)])
        target.commit(verdict, counts, slots)
        target.release(0)
        prompt = [*context, 3]
        with ops.no_grad():
            got = ops.to_numpy(target.admit([prompt], known=[(state, len(context))]).logits)[0, 0]
        assert self.differs(got, self.alone(target, prompt)[0]) < self.tolerance

    def test_restoring_is_not_computing(self, target: Target) -> None:
        """A negative control: a state of other tokens under these ids gives other logits."""
        ids, others = self.prompt(target, 9, 1), self.prompt(target, 9, 2)
        state = replace(self.export(target, others), ids=tuple(ids))
        prompt = [*ids, 5]
        with target.ops.no_grad():
            got = target.ops.to_numpy(target.admit([prompt], known=[(state, 9)]).logits)[0, 0]
        assert self.differs(got, self.alone(target, prompt)[0]) > 10 * self.tolerance

    def test_states_that_do_not_fit(self, target: Target) -> None:
        ids = self.prompt(target, 6)
        state = self.export(target, ids)
        wrong = [*ids[:3], (ids[3] + 1) % target.facts.vocabulary_size, *ids[4:], 1]
        for prompt, known, message in (
            (ids, (state, 6), r"known\[0\]: length=6; expected 0…5"),
            (ids, (state, -1), r"known\[0\]: length=-1"),
            ([*ids, 1, 2], (state, 7), r"known\[0\]: length=7; expected 0…6"),
            (wrong, (state, 4), r"known\[0\]: its token 3 is"),
            ([*ids, 1], (replace(state, owner=object()), 2), "another target"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                target.admit([prompt], known=[known])
        with pytest.raises(InvalidArgument, match="known has 2 entries: expected 1"):
            target.admit([ids], known=[None, None])
        assert target.lengths == ()
        self.admit(target, [ids])
        with pytest.raises(InvalidArgument, match="ids has 5 tokens: expected 6"):
            target.export(0, ids[:5])
        with pytest.raises(InvalidArgument, match="row=1"):
            target.export(1, ids)

    # truncation, release, room

    def test_truncate(self, target: Target) -> None:
        contexts = [self.prompt(target, 9, 1), self.prompt(target, 6, 2)]
        self.admit(target, contexts)
        target.truncate(0, 4)
        assert target.lengths == (4, 6)
        contexts[0] = contexts[0][:4]
        trees = [random_tree(np.random.default_rng(s), 6, target.facts.vocabulary_size) for s in (5, 6)]
        self.assert_slots(target, pack_tree(target.ops, trees), trees, contexts)

    @pytest.mark.parametrize("row", [0, 1, 2])
    def test_release_moves_the_last_row(self, target: Target, row: int) -> None:
        contexts = [self.prompt(target, n, n) for n in (5, 8, 3)]
        self.admit(target, contexts)
        target.release(row)
        contexts[row] = contexts[-1]
        contexts.pop()
        assert target.lengths == tuple(len(c) for c in contexts)
        trees = [random_tree(np.random.default_rng(s), 6, target.facts.vocabulary_size) for s in (7, 8)]
        self.assert_slots(target, pack_tree(target.ops, trees), trees, contexts)

    def test_release_all_and_use_again(self, target: Target) -> None:
        for n in (6, 3):
            context = self.prompt(target, n, n)
            logits = self.admit(target, [context])
            assert list(target.lengths) == [n]
            target.release(0)
            assert not target.lengths
            assert self.differs(logits[0, 0], self.alone(target, context)[0]) < self.tolerance

    def test_room(self, target: Target) -> None:
        self.admit(target, [self.prompt(target, 5), self.prompt(target, 9)])
        limit = target.facts.context_limit
        if limit is None:
            assert min(target.room(0), target.room(1)) >= 2**20
        else:
            assert target.room(0) <= limit - 1 - 5
            assert target.room(1) <= limit - 1 - 9
            assert target.room(0) >= target.room(1) >= 0
