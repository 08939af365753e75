"""Passes of a target over prompts and trees, and how two passes are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from portadraft.core.target import Target
from portadraft.core.types import PackedBeam
from portadraft.testing.helpers import Tree

Host = np.ndarray[Any, Any]


class Passes:
    """Needs the fixture `target`, and its weights large enough that attention decides."""

    tolerance = 2e-4
    """Greatest difference of two passes' logits, as a part of the logits' spread."""

    @pytest.fixture(autouse=True)
    def _released(self, target: Target) -> Any:
        assert not target.lengths
        yield
        while target.lengths:
            target.release(0)

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
