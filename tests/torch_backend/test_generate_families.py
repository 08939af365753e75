"""Every family, float32, greedy: ours equals transformers' own `generate`, token for token."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from portadraft.backends.torch import make_target
from portadraft.core.decode import Decoder, Request
from portadraft.core.drafter import Drafter
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.target import Target
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter, PromptLookup, ReDrafter, Together
from tests.torch_backend.families import FAMILIES, VOCABULARY

COUNT = 40
LENGTHS = (3, 19, 11)
SHAPES = [BeamShape(1, 4), BeamShape(4, 4), BeamShape(4, 4, 8), BeamShape(8, 5)]


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    return [tuple(int(x) for x in rng.integers(3, VOCABULARY, n)) for n in LENGTHS]


def stock(model: Any, ids: tuple[int, ...]) -> list[int]:
    """transformers' own greedy answer; nothing ends it, so that every text outgrows the window."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=COUNT, eos_token_id=None, pad_token_id=0)
    model.generation_config.eos_token_id = None  # what a config leaves out is filled in from here
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(torch.tensor([ids]), generation_config=config)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def ours(target: Target, drafter: Drafter | None, shape: BeamShape, rows: list[tuple[int, ...]]) -> list[list[int]]:
    decoder = Decoder(target, drafter, shape)
    try:
        answers: list[list[int]] = [[] for _ in rows]
        progress = decoder.admit([Request(ids, COUNT) for ids in rows])
        while progress:
            for one in progress:
                answers[one.key].extend(one.tokens)
            progress = decoder.step()
        return answers
    finally:
        decoder.close()


def random_redrafter(target: Target) -> ReDrafter:
    size = target.facts.hidden_size
    config = RecurrentConfig(size, target.embeddings().shape[1], 2 * size, 1, target.facts.vocabulary_size)
    rng = np.random.default_rng(3)
    params = {k: rng.normal(size=s).astype(np.float32) / np.sqrt(size) for k, s in config.shapes().items()}
    return ReDrafter(target, config, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    rows = prompts()
    expected = [stock(FAMILIES[family](), ids) for ids in rows]
    target = make_target(FAMILIES[family](), check=False)
    answers = dict(zip(rows, expected, strict=True))
    vocabulary = target.facts.vocabulary_size
    trained, lookup = random_redrafter(target), PromptLookup(target.ops, longest=2, shortest=1)
    drafters: list[Drafter | None] = [
        None,
        OracleDrafter(target.ops, answers, vocabulary, 0.7),
        Together(target.ops, [trained, lookup]),
    ]
    for shape in SHAPES:
        for drafter in drafters if shape == SHAPES[0] else drafters[1:]:
            where = f"{family}, {shape}, {drafter.name if drafter else 'plain'}"
            assert ours(target, drafter, shape, rows) == expected, f"batch: {where}"
            if shape == SHAPES[2]:
                assert ours(target, drafter, shape, rows[:1]) == expected[:1], f"alone: {where}"


def test_a_wrong_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys that stay where the pass wrote them change the text."""
    rows = prompts()
    expected = [stock(FAMILIES["llama"](), ids) for ids in rows]
    target = make_target(FAMILIES["llama"](), check=False)
    oracle = OracleDrafter(target.ops, dict(zip(rows, expected, strict=True)), VOCABULARY, 0.7)
    from portadraft.backends.torch.cache import RowCache

    monkeypatch.setattr(RowCache, "move", lambda *args, **kwargs: None)
    assert ours(target, oracle, SHAPES[1], rows) != expected
