"""What every `Target` must do. A pass over a tree is compared with running each path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from portadraft.core.target import RowState, Target
from portadraft.core.tree import root_only
from portadraft.core.types import PackedBeam
from portadraft.errors import InvalidArgument
from portadraft.testing.helpers import Tree, pack_tree, random_tree, verdict_for

Host = np.ndarray[Any, Any]


class TargetConformance:
    """Needs the fixture `target`: a small model in float32 with no live rows, whose context holds 64 tokens.

    Its weights should be large enough that attention decides: otherwise a wrong mask is not seen.
    """

    tolerance = 2e-4
    """Greatest difference of two passes' logits, as a part of the logits' spread."""

    @pytest.fixture(autouse=True)
    def _released(self, target: Target) -> Any:
        assert not target.lengths
        yield
        while target.lengths:
            target.release(0)

    # helpers

    def prompt(self, target: Target, length: int, seed: int = 0) -> list[int]:
        generator = np.random.default_rng(1000 + seed)
        return [int(t) for t in generator.integers(0, target.facts.vocabulary_size, length)]

    def alone(self, target: Target, ids: Sequence[int]) -> tuple[Host, Host]:
        """Logits and features of the last position of ids, run by themselves behind the live rows."""
        with target.ops.no_grad():
            verified = target.admit([ids])
            out = target.ops.to_numpy(verified.logits)[0, 0], target.ops.to_numpy(verified.hidden)[0, 0]
        target.release(len(target.lengths) - 1)
        return out

    def verify(self, target: Target, packed: PackedBeam) -> tuple[Host, Host]:
        with target.ops.no_grad():
            verified = target.verify(packed)
        return target.ops.to_numpy(verified.logits), target.ops.to_numpy(verified.hidden)

    def admit(self, target: Target, prompts: Sequence[Sequence[int]], reserve: int = 0) -> Host:
        with target.ops.no_grad():
            return target.ops.to_numpy(target.admit(prompts, reserve).logits)

    def differs(self, got: Host, expected: Host) -> float:
        """The greatest difference, as a part of the expected logits' spread."""
        assert got.shape == expected.shape
        return float(np.abs(got - expected).max() / expected.std())

    def assert_slots(
        self, target: Target, packed: PackedBeam, trees: Sequence[Tree], contexts: Sequence[Sequence[int]]
    ) -> None:
        """Each living slot's logits and features equal those of its path run alone."""
        logits, hidden = self.verify(target, packed)
        expected = {
            (b, slot): self.alone(target, [*contexts[b], *tree.path_tokens(slot)])
            for b, tree in enumerate(trees)
            for slot in range(len(tree.tokens))
        }
        for (b, slot), (alone_logits, alone_hidden) in expected.items():
            assert self.differs(logits[b, slot], alone_logits) < self.tolerance, f"row {b}, slot {slot}"
            assert self.differs(hidden[b, slot], alone_hidden) < self.tolerance, f"row {b}, slot {slot}"

    # facts

    def test_protocol_and_facts(self, target: Target) -> None:
        assert isinstance(target, Target)
        facts = target.facts
        assert facts.dtype == "float32"
        assert facts.vocabulary_size > 1
        assert facts.cache_bytes_per_token > 0
        assert facts.context_limit is None or facts.context_limit >= 64

    def test_tables_for_the_drafter(self, target: Target) -> None:
        ops, facts = target.ops, target.facts
        table, rows, bias = target.embeddings(), target.head_rows(), target.head_bias()
        assert int(table.shape[0]) >= facts.vocabulary_size
        assert tuple(rows.shape) == (facts.vocabulary_size, facts.hidden_size)
        assert ops.dtype(table) == ops.dtype(rows) == "float32"
        with ops.no_grad():
            verified = target.admit([self.prompt(target, 5)])
            logits = ops.to_numpy(ops.linear(verified.hidden, rows, bias))
        # A model may cap or scale what the head says, but the order is the head's.
        expected = ops.to_numpy(verified.logits)
        assert (np.argsort(-logits)[..., :5] == np.argsort(-expected)[..., :5]).all()

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

    # verification and commit

    @pytest.mark.parametrize("seed", range(4))
    def test_verify_each_slot_is_its_path(self, target: Target, seed: int) -> None:
        generator = np.random.default_rng(seed)
        vocabulary = target.facts.vocabulary_size
        contexts = [self.prompt(target, 3, seed), self.prompt(target, 11, seed + 50)]
        self.admit(target, contexts)
        trees = [random_tree(generator, 9, vocabulary), random_tree(generator, 6, vocabulary)]
        self.assert_slots(target, pack_tree(target.ops, trees), trees, contexts)

    @pytest.mark.parametrize("seed", range(4))
    def test_commit_moves_the_path(self, target: Target, seed: int) -> None:
        """Three steps with paths of different lengths; after each, a new tree is right slot by slot."""
        generator = np.random.default_rng(100 + seed)
        ops, vocabulary = target.ops, target.facts.vocabulary_size
        contexts = [self.prompt(target, 6, seed), self.prompt(target, 2, seed + 50)]
        self.admit(target, contexts)
        for _ in range(3):
            trees = [random_tree(generator, 9, vocabulary) for _ in contexts]
            packed = pack_tree(ops, trees, slots=10)
            self.assert_slots(target, packed, trees, contexts)
            self.verify(target, packed)
            paths = [tree.path(int(generator.integers(0, 9))) for tree in trees]
            paths[0] = trees[0].path(8)  # the deepest, which is not a run of neighbouring slots
            verdict, counts, slots = verdict_for(ops, packed, paths)
            target.commit(verdict, counts, slots)
            for b, path in enumerate(paths):
                contexts[b] = contexts[b] + [trees[b].tokens[s] for s in path]
            assert target.lengths == tuple(len(c) for c in contexts)
        trees = [random_tree(generator, 5, vocabulary) for _ in contexts]
        self.assert_slots(target, pack_tree(ops, trees), trees, contexts)

    def test_verify_commits_nothing(self, target: Target) -> None:
        context = self.prompt(target, 4)
        self.admit(target, [context])
        vocabulary = target.facts.vocabulary_size
        first, second = (random_tree(np.random.default_rng(s), 7, vocabulary) for s in (1, 2))
        self.verify(target, pack_tree(target.ops, [first]))
        assert target.lengths == (4,)
        self.assert_slots(target, pack_tree(target.ops, [second]), [second], [context])

    def test_verify_outgrows_the_reserve(self, target: Target) -> None:
        ops, context = target.ops, self.prompt(target, 3)
        self.admit(target, [context], reserve=0)
        chain = Tree(tuple(self.prompt(target, 9, 7)), (0, 0, 1, 2, 3, 4, 5, 6, 7))
        for _ in range(4):
            packed = pack_tree(ops, [chain])
            self.verify(target, packed)
            verdict, counts, slots = verdict_for(ops, packed, [chain.path(8)])
            target.commit(verdict, counts, slots)
            context = context + list(chain.tokens)
        assert target.lengths == (39,)
        self.assert_slots(target, pack_tree(ops, [chain]), [chain], [context])

    def test_dead_slots_do_not_matter(self, target: Target) -> None:
        contexts = [self.prompt(target, 4)]
        self.admit(target, contexts)
        tree = random_tree(np.random.default_rng(3), 5, target.facts.vocabulary_size)
        self.assert_slots(target, pack_tree(target.ops, [tree], slots=12), [tree], contexts)

    @pytest.mark.parametrize("broken", ["mask", "depths", "commit"])
    def test_the_comparison_notices(self, target: Target, broken: str) -> None:
        """Negative controls: a wrong mask, wrong positions, an accepted entry that stays where it was."""
        ops, context = target.ops, self.prompt(target, 5)
        self.admit(target, [context])
        vocabulary = target.facts.vocabulary_size
        tokens = [t % vocabulary for t in (3, 5, 8, 13, 21, 34, 55)]
        tree = Tree(tuple(tokens), (0, 0, 0, 0, 1, 2, 4))
        packed = pack_tree(ops, [tree])
        if broken == "mask":
            packed = replace(packed, mask=ops.asarray(np.tril(np.ones((1, 7, 7), dtype=bool)), "bool"))
        elif broken == "depths":
            packed = replace(packed, depths=ops.asarray([[0, 1, 2, 3, 4, 5, 6]]), length=6)
        else:
            path = tree.path(5)
            self.verify(target, packed)
            verdict, counts, slots = verdict_for(ops, packed, [[0, 1, 2]])
            assert path != [0, 1, 2]
            target.commit(verdict, counts, slots)
            context = context + [tree.tokens[s] for s in path]
        with pytest.raises(AssertionError, match="row 0, slot"):
            self.assert_slots(target, packed, [tree], [context])

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

    # arguments

    def test_what_cannot_be_served_is_refused(self, target: Target) -> None:
        """Each error names the argument, and leaves the rows as they are."""
        contexts = [self.prompt(target, 5, 1), self.prompt(target, 3, 2)]
        vocabulary = target.facts.vocabulary_size
        tree = random_tree(np.random.default_rng(1), 5, vocabulary)
        beam = pack_tree(target.ops, [tree, tree])
        step = verdict_for(target.ops, beam, [[0], [0]])
        self.admit(target, contexts)
        with pytest.raises(InvalidArgument, match="verify first"):
            target.commit(*step)
        target.verify(beam)
        with pytest.raises(InvalidArgument, match="counts has 1 rows: expected 2"):
            target.commit(step[0], step[1][:1], step[2])
        for row in (-1, 2):
            with pytest.raises(InvalidArgument, match=f"row={row}"):
                target.release(row)
            with pytest.raises(InvalidArgument, match=f"row={row}"):
                target.truncate(row, 1)
        for length in (0, 6):
            with pytest.raises(InvalidArgument, match=f"length={length}"):
                target.truncate(0, length)
        with pytest.raises(InvalidArgument, match="packed has 1 rows: expected one for each of the 2 live rows"):
            target.verify(pack_tree(target.ops, [tree]))
        with pytest.raises(InvalidArgument, match=r"prompts\[1\] is empty"):
            target.admit([contexts[0], []])
        with pytest.raises(InvalidArgument, match=rf"prompts\[0\] holds the id {vocabulary}"):
            target.admit([[vocabulary]])
        assert list(target.lengths) == [5, 3]
        self.assert_slots(target, beam, [tree, tree], contexts)
