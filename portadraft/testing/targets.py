"""What every `Target` must do. A pass over a tree is compared with running each path alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from portadraft.core.target import Target
from portadraft.errors import InvalidArgument
from portadraft.testing.helpers import Tree, pack_tree, random_tree, verdict_for
from portadraft.testing.rows import RowConformance


class TargetConformance(RowConformance):
    """Needs the fixture `target`: a small model in float32 with no live rows, whose context holds 64 tokens.

    Its weights should be large enough that attention decides: otherwise a wrong mask is not seen.
    """

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
