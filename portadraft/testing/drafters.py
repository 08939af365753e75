"""What every `Drafter` must do: well-formed beams, dense rows, and unchanged output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from portadraft.core.decode import Request
from portadraft.core.drafter import Drafter
from portadraft.core.target import Target
from portadraft.core.tree import pack_beam
from portadraft.core.types import Beam, BeamShape
from portadraft.testing.helpers import decode

Answers: TypeAlias = Mapping[tuple[int, ...], Sequence[int]]
Make: TypeAlias = Callable[[Target, Answers], Drafter]

SHAPES = [BeamShape(1, 1), BeamShape(1, 4), BeamShape(4, 1), BeamShape(4, 4), BeamShape(3, 5, 7)]
TOKENS = 16


class DrafterConformance:
    """Needs the fixtures `target` (small, float32, no live rows) and `make`.

    make(target, answers) gives a fresh drafter; answers: prompt to what plain decoding says
    after it (for drafters that are told; others ignore it).
    """

    @pytest.fixture(autouse=True)
    def _released(self, target: Target) -> Any:
        yield
        while target.lengths:
            target.release(0)

    def prompts(self, target: Target) -> list[tuple[int, ...]]:
        """Ragged, and one of them repeats itself, so that lookup finds something."""
        generator = np.random.default_rng(5)
        vocabulary = target.facts.vocabulary_size
        once = tuple(int(t) for t in generator.integers(0, vocabulary, 6))
        return [once * 2, tuple(int(t) for t in generator.integers(0, vocabulary, 4)), (1 % vocabulary,)]

    def answers(self, target: Target) -> dict[tuple[int, ...], list[int]]:
        prompts = self.prompts(target)
        plain, _ = decode(target, None, [Request(p, TOKENS) for p in prompts])
        return dict(zip(prompts, plain, strict=True))

    def started(self, target: Target, drafter: Drafter, prompts: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
        """Roots and features after the prefill of these rows; the drafter knows the same."""
        ops = target.ops
        with ops.no_grad():
            verified = target.admit(prompts)
            roots = ops.argmax(verified.logits[:, 0], axis=1)
        for row, prompt in enumerate(prompts):
            drafter.admit(row, prompt)
        drafter.observe([[int(t)] for t in ops.to_numpy(roots)], None, None)
        return roots, verified.hidden[:, 0]

    def draft(self, target: Target, drafter: Drafter, roots: Any, features: Any, shape: BeamShape) -> Beam | None:
        with target.ops.no_grad():
            return drafter.draft(roots, features, shape)

    def host(self, target: Target, beam: Beam | None, row: int) -> list[list[int]]:
        """One row's candidates without padding and without empty ones; [] for None."""
        if beam is None:
            return []
        tokens, lengths = target.ops.to_numpy(beam.tokens)[row], target.ops.to_numpy(beam.lengths)[row]
        return [t[:n].tolist() for t, n in zip(tokens, lengths, strict=True) if n]

    # tests

    def test_protocol(self, target: Target, make: Make) -> None:
        drafter = make(target, self.answers(target))
        assert isinstance(drafter, Drafter)
        assert drafter.name
        assert drafter.wants in ("none", "last", "all")
        assert drafter.memory(2, 100) >= 0

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_draft_is_well_formed(self, target: Target, make: Make, shape: BeamShape) -> None:
        drafter = make(target, self.answers(target))
        prompts = self.prompts(target)
        roots, features = self.started(target, drafter, prompts)
        beam = self.draft(target, drafter, roots, features, shape)
        if beam is None:
            return
        ops = target.ops
        rows, width, length = beam.tokens.shape
        assert rows == len(prompts)
        assert 1 <= width <= drafter.candidates(shape)
        assert 1 <= length <= shape.length
        assert tuple(beam.lengths.shape) == (rows, width)
        assert tuple(beam.scores.shape) == (rows, width, length)
        assert ops.dtype(beam.tokens) == ops.dtype(beam.lengths) == "int32"
        assert ops.dtype(beam.scores) == "float32"
        tokens, lengths, scores = (ops.to_numpy(x) for x in (beam.tokens, beam.lengths, beam.scores))
        assert ((lengths >= 0) & (lengths <= length)).all()
        alive = np.arange(length)[None, None] < lengths[..., None]
        assert ((tokens >= 0) & (tokens < target.facts.vocabulary_size))[alive].all()
        assert not np.isnan(scores[alive]).any()
        assert (scores[..., 1:] <= scores[..., :-1])[alive[..., 1:]].all()
        packed = pack_beam(ops, roots, beam, shape.nodes)
        assert tuple(packed.tokens.shape) == (rows, min(shape.nodes or 10**6, 1 + width * length))

    def test_draft_rows_are_independent(self, target: Target, make: Make) -> None:
        """A row's candidates do not depend on the rows beside it, nor on its number."""
        answers, prompts, shape = self.answers(target), self.prompts(target), BeamShape(2, 3)
        drafter = make(target, answers)
        roots, features = self.started(target, drafter, prompts)
        beam = self.draft(target, drafter, roots, features, shape)
        for row, prompt in enumerate(prompts):
            lone = make(target, answers)
            lone.admit(0, prompt)
            lone.observe([[int(target.ops.to_numpy(roots)[row])]], None, None)
            one = self.draft(target, lone, roots[row : row + 1], features[row : row + 1], shape)
            assert self.host(target, one, 0) == self.host(target, beam, row)

    @pytest.mark.parametrize("row", [0, 1, 2])
    def test_release_moves_the_last_row(self, target: Target, make: Make, row: int) -> None:
        answers, prompts, shape = self.answers(target), self.prompts(target), BeamShape(2, 3)
        drafter = make(target, answers)
        roots, features = self.started(target, drafter, prompts)
        before = self.draft(target, drafter, roots, features, shape)
        expected = [self.host(target, before, i) for i in range(3)]
        drafter.release(row)
        order = [0, 1, 2]
        order[row] = order[-1]
        order.pop()
        index = target.ops.asarray(order)
        after = self.draft(target, drafter, target.ops.take(roots, index), target.ops.take(features, index), shape)
        assert [self.host(target, after, i) for i in range(2)] == [expected[i] for i in order]

    @pytest.mark.parametrize("shape", SHAPES[1::3], ids=str)
    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_output_is_unchanged(self, target: Target, make: Make, shape: BeamShape, temperature: float) -> None:
        requests = [Request(p, TOKENS, seed=i) for i, p in enumerate(self.prompts(target))]
        plain, _ = decode(target, None, requests, temperature=temperature)
        answers = dict(zip([r.ids for r in requests], plain, strict=True))
        drafted, _ = decode(target, make(target, answers), requests, shape, temperature=temperature)
        assert drafted == plain
