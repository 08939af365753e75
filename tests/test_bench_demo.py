"""What the demonstration says of repeats that drafted differently much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from portadraft.bench.demo import PromptResult, _total_tokens_per_step


def run(accepted: dict[int, int]) -> Any:
    steps = sum(accepted.values())
    rate = sum((n + 1) * count for n, count in accepted.items()) / steps if steps else None
    return SimpleNamespace(stats=SimpleNamespace(accepted=accepted, tokens_per_step=rate))


def test_tokens_per_step_are_those_of_all_repeats() -> None:
    one = PromptResult("one", {"d": [run({0: 10}), run({1: 10}), run({2: 10})]})
    other = PromptResult("other", {"d": [run({}), run({}), run({})]})
    assert one.tokens_per_step("d") == 2.0
    assert other.tokens_per_step("d") is None
    assert _total_tokens_per_step([one, other], "d") == pytest.approx(60 / 30)
