"""The habits of transformers: tensors in, tensors out, streamers, models that are loaded already."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

import transformers

import portadraft
from portadraft import InvalidArgument, Model
from portadraft.compat.transformers import TransformersStyle, wrap
from tests.test_text import byte_level

PAD = 0


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(byte_level()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=200, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def model(theirs: Any) -> Model:
    return portadraft.load(theirs, tokenizer=byte_level())


@pytest.fixture(scope="module")
def ours(model: Model) -> TransformersStyle:
    return wrap(model)


def padded(lengths: tuple[int, ...], left: bool = True) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(max(lengths) - length, None) if left else slice(0, length)
        ids[row, place] = torch.randint(5, 300, (length,), generator=generator)
        mask[row, place] = 1
    return ids, mask


def test_a_loaded_model_is_taken_as_it_is(theirs: Any, model: Model) -> None:
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    ids = [5, 9, 17]
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert list(model.generate(ids, max_tokens=12).ids) == expected
    assert model.generate("Hello", max_tokens=4).stats.chosen["backend"].value == "torch"
    assert model.chosen["dtype"].value == "float32"
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "tokenizer=None"),
        ({"tokenizer": 1, "dtype": "float16"}, "dtype='float16'"),
        ({"tokenizer": 1, "device": "cpu"}, "device='cpu'"),
        ({"tokenizer": 1, "backend": "mlx"}, "backend='mlx'"),
    ],
)
def test_what_a_loaded_model_cannot_be_told(theirs: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        portadraft.load(theirs, **options)
    with pytest.raises(InvalidArgument, match="expected a name, a path, or"):
        portadraft.load(3.5)
    with pytest.raises(InvalidArgument, match="tokenizer"):
        portadraft.load("smollm2-135m", tokenizer=byte_level())


@pytest.mark.parametrize("left", [True, False])
def test_a_padded_batch_as_transformers_gives_it(theirs: Any, ours: TransformersStyle, left: bool) -> None:
    ids, mask = padded((9, 3, 14), left)
    got = ours.generate(ids, attention_mask=mask, max_new_tokens=15)
    assert got.dtype == ids.dtype
    assert tuple(got.shape) == (3, 14 + 15)
    assert torch.equal(got[:, :14], ids)
    if left:
        expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False)
        assert torch.equal(got, expected)
        wrong = ours.generate(ids, max_new_tokens=15)  # the padding taken for text
        assert not torch.equal(wrong, expected)
    for row, length in enumerate((9, 3, 14)):
        alone = ids[row, -length:] if left else ids[row, :length]
        assert torch.equal(ours.generate(alone[None], max_new_tokens=15)[0, length:], got[row, 14:])


def test_rows_that_end_are_padded(theirs: Any, ours: TransformersStyle) -> None:
    ids, mask = padded((5, 8, 4))
    free = theirs.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, 8:].tolist()
    ends = [free[0][3], free[1][9]]
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": ends, "pad_token_id": 3}
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(ours.generate(ids, mask, **options), expected)
    assert (expected[:, 8:] == 3).any()


def test_lengths_as_in_transformers(theirs: Any, ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    assert ours.generate(ids).shape[1] == 6 + 20
    assert ours.generate(ids, max_length=11).shape[1] == theirs.generate(ids, max_length=11).shape[1] == 11
    assert ours.generate(ids, max_new_tokens=3, use_cache=True, num_beams=1).shape[1] == 9
    with pytest.raises(InvalidArgument, match="max_length=6"):
        ours.generate(ids, max_length=6)


def test_penalties_as_in_transformers(theirs: Any, ours: TransformersStyle) -> None:
    ids, mask = padded((9, 5))
    options: dict[str, Any] = {"max_new_tokens": 25, "repetition_penalty": 1.7}
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(ours.generate(ids, mask, width=4, length=4, **options), expected)
    assert not torch.equal(ours.generate(ids, mask, max_new_tokens=25), expected)


def test_sampling_follows_torch_generators_seed(ours: TransformersStyle) -> None:
    ids, mask = padded((6, 4))

    def sample(start: int, **options: Any) -> Any:
        torch.manual_seed(start)
        return ours.generate(ids, mask, do_sample=True, max_new_tokens=12, **options)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    torch.manual_seed(1)
    first = ours.generate(ids, mask, do_sample=True, max_new_tokens=12)
    assert not torch.equal(first, ours.generate(ids, mask, do_sample=True, max_new_tokens=12))
    assert torch.equal(sample(1, seed=5), sample(2, seed=5))
    # Only the best token is left: as greedy.
    assert torch.equal(sample(1, top_k=1), ours.generate(ids, mask, max_new_tokens=12))
    three = sample(1, num_return_sequences=3)
    assert tuple(three.shape) == (6, 6 + 12)
    assert torch.equal(three[:3, :6], ids[:1].expand(3, -1))
    assert not torch.equal(three[0], three[1])


def test_a_generation_config_gives_the_defaults(theirs: Any, ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    config = transformers.GenerationConfig(max_new_tokens=7, repetition_penalty=1.7, pad_token_id=PAD)
    expected = theirs.generate(ids, generation_config=config)
    assert torch.equal(ours.generate(ids, generation_config=config), expected)


def test_what_a_generation_config_leaves_open_the_models_own_says(
    theirs: Any, ours: TransformersStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = padded((6, 4))
    free = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    monkeypatch.setattr(theirs.generation_config, "eos_token_id", int(free[0, 9]))
    config = transformers.GenerationConfig(max_new_tokens=12)
    expected = theirs.generate(ids, attention_mask=mask, generation_config=config)
    assert torch.equal(ours.generate(ids, mask, generation_config=config), expected)
    assert not torch.equal(expected, free)
    for options in ({"max_length": 15}, {"max_new_tokens": 14, "min_new_tokens": 9}):
        config = transformers.GenerationConfig(**options)
        expected = theirs.generate(ids, attention_mask=mask, generation_config=config)
        assert torch.equal(ours.generate(ids, mask, generation_config=config), expected)
    config = transformers.GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=3)
    assert ours.generate(ids, mask, generation_config=config).shape[0] == 4


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"num_beams": 4}, {"num_beams": 1}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 0}),
        ({"bad_words_ids": [[5]]}, {"bad_words_ids": None}),
    ],
)
def test_a_generation_config_with_what_is_not_served_is_refused(
    ours: TransformersStyle, options: dict[str, Any], idle: dict[str, Any]
) -> None:
    ids, _ = padded((6,))
    name = next(iter(options))
    with pytest.raises(InvalidArgument, match=rf"generation_config\.{name}="):
        ours.generate(ids, generation_config=transformers.GenerationConfig(**options))
    ours.generate(ids, generation_config=transformers.GenerationConfig(**idle, max_new_tokens=2))


def test_temperature_zero_is_refused_where_transformers_refuses_it(
    theirs: Any, ours: TransformersStyle, capfd: pytest.CaptureFixture[str]
) -> None:
    ids, _ = padded((6,))
    for zero in (0, 0.0):
        with pytest.raises(ValueError, match="temperature"):
            theirs.generate(ids, do_sample=True, temperature=float(zero), max_new_tokens=2)
        with pytest.raises(InvalidArgument, match=rf"temperature={zero} with do_sample=True.*do_sample=False"):
            ours.generate(ids, do_sample=True, temperature=zero, max_new_tokens=2)
    assert ours.generate(ids, do_sample=False, temperature=0.0, max_new_tokens=2).shape == (1, 8)


def test_what_is_empty_asks_for_nothing_and_time_is_time(ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    expected = ours.generate(ids, max_new_tokens=4)
    assert torch.equal(ours.generate(ids, max_new_tokens=4, logits_processor=[], stopping_criteria=[]), expected)
    assert ours.generate(ids, max_new_tokens=300, max_time=1e-6).shape[1] < 306
    with pytest.raises(InvalidArgument, match="timeout_s=-1"):
        ours.generate(ids, max_new_tokens=4, max_time=-1)


def test_tensors_of_one_number_are_numbers_as_in_transformers(theirs: Any, ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    options: dict[str, Any] = {"max_new_tokens": torch.tensor(9), "eos_token_id": torch.tensor([7, 8])}
    expected = theirs.generate(ids, do_sample=False, **options)
    assert torch.equal(ours.generate(ids, pad_token_id=torch.tensor(PAD), **options), expected)
    assert ours.generate(ids, max_length=torch.tensor(8)).shape == (1, 8)


def test_more_tokens_than_may_be_are_a_warning_as_in_transformers(theirs: Any, ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    end = int(theirs.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 9, "eos_token_id": end, "pad_token_id": PAD}
    with pytest.warns(UserWarning, match="Unfeasible length"):
        expected = theirs.generate(ids, do_sample=False, **options)
    with pytest.warns(UserWarning, match="min_new_tokens=9: more than may be generated, which is 5"):
        got = ours.generate(ids, **options)
    assert torch.equal(got, expected) and got.shape == (1, 11)


def test_masks_may_have_holes(theirs: Any, ours: TransformersStyle) -> None:
    ids, mask = padded((8, 5))
    mask[0, 3] = 0
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours.generate(ids, mask, max_new_tokens=12), expected)
    assert not torch.equal(ours.generate(ids, padded((8, 5))[1], max_new_tokens=12), expected)


def test_a_flag_is_a_flag(ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    for bad in ("no", 0, 1):
        with pytest.raises(InvalidArgument, match=f"do_sample={bad!r}"):
            ours.generate(ids, do_sample=bad, max_new_tokens=2)


def test_a_streamer_that_raises_leaves_the_model_free(model: Model, ours: TransformersStyle) -> None:
    class Full(Recorder):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.got) == 3:
                raise OSError("full")

    ids, _ = padded((6,))
    with pytest.raises(OSError, match="full") as held:  # the error holds the frames, as a console does
        ours.generate(ids, max_new_tokens=9, streamer=Full())
    assert model.target.lengths == ()
    assert model.generate([5, 6], max_tokens=2).ids
    assert held.value is not None
    with pytest.raises(InvalidArgument, match="streamer=5"):
        ours.generate(ids, streamer=5)


class Recorder:
    """What transformers' streamers are: an object with put and end."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.ended = False

    def put(self, value: Any) -> None:
        self.got.append(value)

    def end(self) -> None:
        self.ended = True


def test_streamers_get_what_transformers_gives_them(theirs: Any, ours: TransformersStyle) -> None:
    ids, _ = padded((6,))
    mine, other = Recorder(), Recorder()
    got = ours.generate(ids, max_new_tokens=10, streamer=mine)
    expected = theirs.generate(ids, max_new_tokens=10, do_sample=False, streamer=other)
    assert torch.equal(got, expected)
    assert mine.ended and other.ended
    assert [v.reshape(-1).tolist() for v in mine.got] == [v.reshape(-1).tolist() for v in other.got]
    text = transformers.TextIteratorStreamer(byte_level(), skip_prompt=True)
    ours.generate(ids, max_new_tokens=10, streamer=text)
    assert "".join(text) == byte_level().decode(got[0, 6:])
    with pytest.raises(InvalidArgument, match="one row"):
        ours.generate(ids.repeat(2, 1), streamer=Recorder())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 4}, "num_beams=4.*beam search"),
        ({"assistant_model": object()}, "assistant_model.*drafter="),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"num_return_sequences": 0}, "num_return_sequences=0"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: shape"),
        ({"attention_mask": torch.zeros(1, 6)}, "attention_mask: row 0"),
        ({"attention_mask": [[1] * 6]}, "attention_mask: list"),
        ({"attention_mask": torch.full((1, 6), float("-inf"))}, "attention_mask: it holds -inf"),
        ({"pad_token_id": "x"}, "pad_token_id='x'"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"eos_token_id": [-1]}, r"eos_token_id=\[-1\]"),
        ({"max_length": "x"}, "max_length='x'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config: dict"),
    ],
)
def test_what_is_not_served_is_refused_by_name(ours: TransformersStyle, options: dict[str, Any], words: str) -> None:
    ids, _ = padded((6,))
    with pytest.raises(InvalidArgument, match=words):
        ours.generate(ids, **options)
    shapes = (torch.zeros(3), torch.zeros((2, 3)), torch.zeros((0, 3), dtype=torch.long))
    for bad in (None, [1, 2], *shapes, ids.numpy(), ids > 0, ids.to("meta")):
        with pytest.raises(InvalidArgument, match="input_ids"):
            ours.generate(bad)
    with pytest.raises(InvalidArgument, match="model: str"):
        wrap("smollm2-135m")  # type: ignore[arg-type]
