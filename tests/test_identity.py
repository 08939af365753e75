"""Identities: equal for equal models, whoever loaded them; different for different ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portadraft import identity
from portadraft.identity import canonical_name, make_architecture_id, make_weights_id, same_weights, sample_positions

SHAPES = {
    f"layers.{i}.{name}.weight": shape for i in range(12) for name, shape in {"up": (24, 8), "norm": (8,)}.items()
}
SHAPES["embed_tokens.weight"] = (100, 8)


def samples(seed: int = 0, scale: float = 0.02) -> np.ndarray:
    count = sum(len(positions) for _, positions in sample_positions(SHAPES))
    return np.random.default_rng(seed).normal(0, scale, count).astype(np.float32)


def test_positions_are_deterministic_spread_and_within() -> None:
    positions = sample_positions(SHAPES)
    assert positions == sample_positions(dict(reversed(SHAPES.items())))
    assert 48 <= sum(len(p) for _, p in positions) <= 64
    assert len({name for name, _ in positions}) == len(positions) == 13
    for name, where in positions:
        assert len(SHAPES[name]) == 2
        assert all(0 <= p < np.prod(SHAPES[name]) for p in where)
    assert sample_positions({}) == sample_positions({"norm": (8,)}) == []


def test_many_tensors_give_64_samples_first_and_last_included() -> None:
    shapes = {f"{i:03d}": (50, 60) for i in range(100)}
    positions = sample_positions(shapes)
    assert sum(len(p) for _, p in positions) == 64
    assert (positions[0][0], positions[-1][0]) == ("000", "099")


def test_canonical_names() -> None:
    for name in ("model.layers.0.w", "transformer.layers.0.w", "language_model.model.layers.0.w", "layers.0.w"):
        assert canonical_name(name) == "layers.0.w"
    assert canonical_name("lm_head.weight") == "lm_head.weight"


def test_same_values_same_id() -> None:
    assert make_weights_id(SHAPES, samples()) == make_weights_id(dict(reversed(SHAPES.items())), samples())
    assert len(make_weights_id(SHAPES, samples())) < 200


def test_rounding_through_half_precision_is_the_same() -> None:
    values = samples()
    bf16 = identity.from_bf16(identity.to_bf16(values))
    whole = make_weights_id(SHAPES, values)
    assert make_weights_id(SHAPES, bf16) == whole
    assert same_weights(make_weights_id(SHAPES, values.astype(np.float16).astype(np.float32)), whole)
    assert same_weights(make_weights_id(SHAPES, bf16.astype(np.float16).astype(np.float32)), whole)
    tiny = samples(scale=1e-6)
    assert same_weights(
        make_weights_id(SHAPES, tiny), make_weights_id(SHAPES, identity.from_bf16(identity.to_bf16(tiny)))
    )


def test_other_weights_differ() -> None:
    whole = make_weights_id(SHAPES, samples())
    assert not same_weights(whole, make_weights_id(SHAPES, samples(1)))
    one = samples()
    one[7] *= 1.1
    assert not same_weights(whole, make_weights_id(SHAPES, one))
    assert not same_weights(whole, make_weights_id(SHAPES, -samples()))
    tuned = samples() * (1 + 0.004 * np.random.default_rng(2).choice([-1, 1], samples().shape)).astype(np.float32)
    assert not same_weights(whole, make_weights_id(SHAPES, tuned)), (
        "a light fine-tune moves most values by a rounding step"
    )


def test_other_shapes_or_names_differ() -> None:
    whole = make_weights_id(SHAPES, samples())
    for change in ({"layers.0.up.weight": (24, 9)}, {"extra": (8,)}):
        shapes = {**SHAPES, **change}
        assert not same_weights(whole, make_weights_id(shapes, samples()))


@pytest.mark.parametrize("text", ["", ".", "nonsense", "0123456789abcdef.!!!", "0123456789abcdef.AAA", "short.AAAA"])
def test_what_is_no_id_equals_nothing(text: str) -> None:
    assert not same_weights(text, make_weights_id(SHAPES, samples()))
    assert not same_weights(make_weights_id(SHAPES, samples()), text)
    assert not same_weights("", "")


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
        max_size=8,
    )
)
def test_bf16_rounds_to_nearest(values: list[float]) -> None:
    exact = np.asarray(values, dtype=np.float32)
    back = identity.from_bf16(identity.to_bf16(exact))
    assert np.all(np.abs(back - exact) <= np.maximum(np.abs(exact) * 2.0**-8, 1e-38))
    assert np.array_equal(identity.to_bf16(back), identity.to_bf16(exact))


def test_bf16_ties_go_to_even() -> None:
    assert identity.from_bf16(identity.to_bf16(np.float32([1 + 2**-8, 1 + 3 * 2**-8]))).tolist() == [1.0, 1 + 2**-6]


def test_architecture_id_tells_apart() -> None:
    def make(kind: str = "llama", shapes=SHAPES, dtype: str = "float32", quantization=None) -> str:  # type: ignore[no-untyped-def]
        return make_architecture_id(kind, shapes, dtype, quantization)

    different = {
        make(),
        make(kind="qwen2"),
        make(shapes={**SHAPES, "bias": (4,)}),
        make(dtype="bfloat16"),
        make(quantization={"quant_method": "awq", "bits": 4}),
        make(quantization={"quant_method": "awq", "bits": 8}),
    }
    assert len(different) == 6
    assert make() == make(quantization={}) == make(shapes=dict(reversed(SHAPES.items())))


class Vocabulary(dict):  # type: ignore[type-arg]
    def get_vocab(self) -> dict[str, int]:
        return dict(self)


def test_tokenizer_fingerprint() -> None:
    first = identity.tokenizer_fingerprint(Vocabulary(a=0, b=1, **{"\ud83d": 2}))
    assert first == identity.tokenizer_fingerprint(Vocabulary(**{"\ud83d": 2}, b=1, a=0))
    assert first != identity.tokenizer_fingerprint(Vocabulary(a=1, b=0, **{"\ud83d": 2}))
    assert first != identity.tokenizer_fingerprint(Vocabulary(a=0, b=1))
