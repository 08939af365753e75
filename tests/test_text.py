"""Text in and out: prompts, end tokens, streaming, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from portadraft.errors import InvalidArgument
from portadraft.models.templates import VICUNA
from portadraft.text import AnswerText, StopStrings, TextCodec, TextStream

pytest.importorskip("tokenizers", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the torch extra")

LINES = [
    "The quick brown fox jumps over the lazy dog. Stop here, please.",
    "Größe, naïve café, 日本語のテキスト, привет мир, 👍🏽 emoji 😀😁",
    "def f(x):\n    return x + 1\n\n###\nEND STOP stop",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wrap(tokenizer: Any, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@cache
def byte_level(template: str | None = CHATML) -> Any:
    """GPT-2's kind: a byte alphabet, characters split over tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<think>", "ünïcode"])
    wrapped = wrap(
        tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    wrapped.chat_template = template
    return wrapped


def _pieces(metaspace: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [
        "▁",
        "▁▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "ab",
        "▁ab",
        "é",
        "\n",
        ".",
        "▁STOP",
        "ST",
        "OP",
        "O",
        "P",
        "S",
        "T",
        "end",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def sentencepiece() -> Any:
    """Llama 2's kind: byte fallback, and the first token's space dropped."""
    return _pieces(metaspace=False)


@cache
def metaspace() -> Any:
    return _pieces(metaspace=True)


@cache
def words() -> Any:
    """A tokenizer without a decoder: words joined by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", "STOP", "a", "b", "é", "😀"])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(tokenizer, unk_token="<unk>")


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "words": words,
}
kinds = pytest.mark.parametrize("kind", KINDS)
numbers = st.lists(st.integers(0, 10**6), max_size=40)


def ids_of(kind: str, picks: Sequence[int]) -> list[int]:
    return [pick % len(KINDS[kind]()) for pick in picks]


# streams


@kinds
@given(numbers, st.data())
def test_deltas_joined_are_the_decoding_of_the_whole(kind: str, picks: list[int], data: st.DataObject) -> None:
    ids = ids_of(kind, picks)
    codec = TextCodec(KINDS[kind]())
    stream = codec.stream()
    text, rest = "", ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        text += stream.push(rest[:count])
        rest = rest[count:]
        assert stream.length == len(text)
    text += stream.finish()
    assert text == codec.decode(ids)
    assert len(stream.reach) == len(ids)
    assert stream.reach == sorted(stream.reach)
    assert stream.finish() == ""


@kinds
@given(st.lists(st.integers(0, 255), max_size=12), st.booleans())
@example([0xF0, 0x9F, 0x98, 0x80, 0xF0, 0x9F], False)
@example([0xE0, 0x80, 0xED, 0xA0, 0x80, 0xF4, 0x90, 0xC0, 0xAF], True)
def test_any_bytes_even_invalid(kind: str, values: list[int], ending: bool) -> None:
    tokenizer = KINDS[kind]()
    if kind == "byte_level":
        from portadraft.detokenize import _byte_of_character

        spelling = {byte: character for character, byte in _byte_of_character().items()}
        assert sorted(spelling) == list(range(256))
        ids = tokenizer.convert_tokens_to_ids([spelling[v] for v in values])
    elif kind == "words":
        return
    else:
        ids = tokenizer.convert_tokens_to_ids([f"<0x{v:02X}>" for v in values])
    ids = list(ids) + ([1, len(tokenizer) - 1] if ending else [])
    codec = TextCodec(tokenizer)
    stream = codec.stream()
    assert "".join([stream.push(i) for i in ids]) + stream.finish() == codec.decode(ids)


@given(st.text(max_size=30))
@example("😀👍🏽 日本")
def test_any_text_survives_the_stream(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    codec = TextCodec(byte_level())
    ids = codec.tokenizer.encode(text, add_special_tokens=False)
    stream = codec.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == codec.decode(ids)
    if "<" not in text:
        assert codec.decode(ids) == text


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in tokenizer.encode("ab")] == ["a", "b"]
    thumb = [stream.push(i) for i in tokenizer.encode("\U0001f680", add_special_tokens=False)]
    assert "".join(thumb[:-1]) == ""
    assert thumb[-1] == "\U0001f680"


def test_first_space_is_dropped_once() -> None:
    tokenizer = sentencepiece()
    stream = TextStream(tokenizer)
    first, second = tokenizer.convert_tokens_to_ids(["▁a", "▁b"])
    assert [stream.push(i) for i in (1, first, 2, second)] == ["", "a", "", " b"]


def test_special_tokens_are_kept_on_request() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.convert_tokens_to_ids("<|im_end|>"), *tokenizer.encode("a")]
    assert TextStream(tokenizer).push(ids) == "a"
    assert TextStream(tokenizer, skip_special_tokens=False).push(ids) == "<|im_end|>a"


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("byte_level", lambda i: 7 * i % 300),
        ("sentencepiece", lambda i: 3 + 7 * i % 270),
        ("sentencepiece", lambda i: 3 + 0xF0),  # a run of bytes that never ends
        ("words", lambda i: 1 + i % 5),
    ],
)
def test_cost_is_linear(kind: str, token: Callable[[int], int]) -> None:
    """Sixteen times the tokens take about sixteen times the decoded ids; decoding all each time takes 256 times."""
    tokenizer = KINDS[kind]()

    class Counting:
        backend_tokenizer = tokenizer.backend_tokenizer
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)
        decoded = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            Counting.decoded += len(ids)
            return str(tokenizer.decode(ids, **options))

    def cost(count: int) -> int:
        Counting.decoded = count
        stream = TextStream(Counting())
        for i in range(count):
            stream.push(token(i))
        stream.finish()
        return Counting.decoded

    assert cost(1600) <= 20 * cost(100)


# stop strings


def reference(codec: TextCodec, ids: list[int], stops: list[str]) -> tuple[str, int | None]:
    """Text and kept ids by decoding every prefix; for tokenizers whose text only grows."""
    text = codec.decode(ids)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        return text, None
    start = min(ends)[1]
    for count in range(1, len(ids) + 1):
        settled = codec.decode(ids[:count])
        common = 0
        while common < min(len(settled), len(text)) and settled[common] == text[common]:
            common += 1
        touched = common + (settled[common:] != "")  # an unfinished character shows as a replacement
        if touched > start:
            return text[:start], count - 1
    raise AssertionError


stop_lists = st.lists(st.text("aSTOP \n", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(st.lists(st.sampled_from("abSTOP \n."), max_size=25), stop_lists, st.data())
def test_stop_strings_cut_text_and_ids(kind: str, letters: list[str], stops: list[str], data: st.DataObject) -> None:
    codec = TextCodec(KINDS[kind]())
    ids = codec.tokenizer.encode("".join(letters), add_special_tokens=False)
    text, keep = reference(codec, ids, stops)
    scanner, answer = codec.scanner(stops), AnswerText(codec, stops)
    shown, given_ids, rest, found = "", [], list(ids), None
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        scan = scanner.push(rest[:count])
        piece = answer.push(rest[:count])
        assert piece.text == scan.delta
        shown += scan.delta
        given_ids += piece.ids
        assert text.startswith(shown), "a part of a stop string was streamed"
        assert given_ids == ids[: len(given_ids)]
        assert keep is None or len(given_ids) <= keep, "ids of a stop string were streamed"
        rest = rest[count:]
        found = found or scan.keep
    scan, piece = scanner.finish(), answer.push([], last=True)
    shown += scan.delta
    given_ids += piece.ids
    assert (shown, answer.text) == (text, text)
    assert scan.keep == keep
    assert len(given_ids) == (len(ids) if keep is None else keep)
    assert (scan.stop is None) == (piece.stop is None) == (keep is None)


def test_token_that_holds_text_and_a_stop() -> None:
    """The text keeps the token's leading characters, the ids do not keep the token."""
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["a", "ab", "b", "end"])
    scan = StopStrings(TextStream(tokenizer), "bb").push(ids)
    assert (scan.delta, scan.stop, scan.keep) == ("aa", "bb", 1)


def test_first_to_end_wins_however_tokens_are_grouped() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["S", "T", "O", "P", "a"])
    for grouped in ([ids], [[i] for i in ids], [ids[:3], ids[3:]]):
        scanner = StopStrings(TextStream(tokenizer), ["STOP", "TO", "O"])
        scans = [scanner.push(group) for group in grouped]
        assert "".join(s.delta for s in scans) == "S"
        assert (scans[-1].stop, scans[-1].keep) == ("TO", 1)
        assert scanner.finish().delta == ""


def test_stop_string_that_overlaps_itself() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["b", "a", "b", "a", "b", "b"])
    scanner = StopStrings(TextStream(tokenizer), ["ababb", "bc"])
    assert [scanner.push(i).delta for i in ids] == ["", "b", "", "", "", ""]
    assert scanner.push([]).keep == 1


def test_within_one_token_too_the_first_to_end_wins() -> None:
    """As it would if the same characters came one by one."""
    tokenizer = sentencepiece()
    scan = StopStrings(TextStream(tokenizer), ["end", "n"]).push(tokenizer.convert_tokens_to_ids(["a", "end"]))
    assert (scan.delta, scan.stop, scan.keep) == ("ae", "n", 1)


def test_invalid_bytes_are_one_character_each() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["a", "<0xF0>", "<0x80>", "b"])
    assert tokenizer.decode(ids) == "a\ufffd\ufffdb"
    scan = StopStrings(TextStream(tokenizer), "\ufffdb").push(ids)
    assert (scan.delta, scan.keep) == ("a\ufffd", 2)


def test_stop_string_of_bytes_in_a_held_run() -> None:
    """Byte-fallback tokens settle late; the ids still end at the right byte token."""
    tokenizer = sentencepiece()
    spell = [f"<0x{b:02X}>" for b in "é😀é".encode()]
    ids = tokenizer.convert_tokens_to_ids(["a", *spell, "b"])
    scanner = StopStrings(TextStream(tokenizer), "😀")
    scans = [scanner.push(i) for i in ids]
    assert "".join(s.delta for s in scans) == "aé"
    assert scans[-1].keep == 3
    scanner = StopStrings(TextStream(tokenizer), "😀")
    assert scanner.push(ids[:-1]).stop is None
    scan = scanner.finish()
    assert (scan.delta, scan.stop, scan.keep) == ("é", "😀", 3)


def test_stop_inside_a_split_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab\U0001f680", add_special_tokens=False)
    scanner = StopStrings(TextStream(tokenizer), "\U0001f680")
    assert "".join(scanner.push(i).delta for i in ids) == "ab"
    assert scanner.push(ids).keep == len(tokenizer.encode("ab", add_special_tokens=False))


def test_answer_counts_the_end_token_and_hides_it() -> None:
    codec = TextCodec(byte_level())
    ids = codec.tokenizer.encode("ab<think>", add_special_tokens=False)
    piece = AnswerText(codec).push(ids, ended=True)  # <think> is no special token: it would show
    assert (piece.text, piece.ids, piece.stop) == ("ab", tuple(ids), None)
    answer = AnswerText(codec, "bc")
    piece = answer.push(ids, ended=True)
    assert (piece.text, piece.ids, answer.text) == ("ab", tuple(ids), "ab")
    stopped = AnswerText(codec, "b").push(ids, ended=True)
    assert (stopped.text, stopped.ids, stopped.stop) == ("a", tuple(ids[:1]), "b")


@pytest.mark.parametrize("stop", ["", ["a", ""], [None], [3]])
def test_bad_stop(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"stop=.*at least one character"):
        TextCodec(byte_level()).scanner(stop)


# prompts


def test_string_is_one_user_message() -> None:
    codec = TextCodec(byte_level())
    ids = codec.encode_prompt("Hi")
    assert ids == codec.encode_prompt([{"role": "user", "content": "Hi"}])
    assert codec.tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert codec.notices == []


def with_bos(template: str | None) -> Any:
    import copy

    from tokenizers import processors

    tokenizer = copy.deepcopy(byte_level())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.chat_template = template
    return tokenizer


def test_special_tokens_are_not_added_twice() -> None:
    codec = TextCodec(with_bos("{{ bos_token }}{{ messages[0]['content'] }}"))
    assert codec.encode_prompt("a").count(0) == 1
    assert codec.encode_prompt("a", raw=True).count(0) == 1
    without = TextCodec(with_bos("{{ messages[0]['content'] }}"))
    assert without.encode_prompt("a").count(0) == 0


def test_raw_goes_past_the_template() -> None:
    codec = TextCodec(byte_level())
    assert codec.encode_prompt("Hi", raw=True) == codec.tokenizer.encode("Hi")
    assert codec.notices == []
    with pytest.raises(InvalidArgument, match="raw=True with a list of messages"):
        codec.encode_prompt([{"role": "user", "content": "Hi"}], raw=True)


def test_model_without_a_template_is_prompted_raw_with_one_notice() -> None:
    codec = TextCodec(with_bos(None))
    assert codec.encode_prompt("Hi") == codec.encode_prompt("Hi", raw=True)
    assert codec.encode_prompt([{"role": "user", "content": "Hi"}]) == codec.encode_prompt("Hi")
    assert len(codec.notices) == 1
    assert "no chat template" in codec.notices[0]
    with pytest.raises(InvalidArgument, match="2 messages, but the model has no chat template"):
        codec.encode_prompt([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])


def test_template_of_the_source_is_a_fallback() -> None:
    bare = TextCodec(byte_level(None), template=VICUNA)
    text = bare.tokenizer.decode(bare.encode_prompt("Hi"))
    assert text.startswith("<s>A chat between a curious user")
    assert text.endswith(" USER: Hi ASSISTANT:")
    own = TextCodec(byte_level(), template=VICUNA)
    assert own.tokenizer.decode(own.encode_prompt("Hi")).startswith("<|im_start|>user")


def test_conversation_that_ends_with_the_assistant_is_continued() -> None:
    codec = TextCodec(byte_level())
    ids = codec.encode_prompt([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}])
    assert codec.tokenizer.decode(ids).endswith("<|im_start|>assistant\nSure, ")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "expected at least one character"),
        ([], "at least one message"),
        ([{"role": "user", "content": ""}], "every message is empty"),
        (3, "a string or a list of messages"),
        (b"Hi", "a string or a list of messages"),
        ([{"content": "Hi"}], r"prompt\[0\]=.*'role'"),
        (["Hi"], r"prompt\[0\]='Hi'"),
    ],
)
def test_bad_prompts(prompt: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        TextCodec(byte_level()).encode_prompt(prompt)


def test_empty_raw_prompt() -> None:
    with pytest.raises(InvalidArgument, match="prompt=''"):
        TextCodec(byte_level()).encode_prompt("", raw=True)


def test_prompt_of_no_tokens() -> None:
    with pytest.raises(InvalidArgument, match="makes no token of it"):
        TextCodec(words()).encode_prompt(" ", raw=True)


def test_template_that_refuses() -> None:
    codec = TextCodec(byte_level("{{ raise_exception('no system role') }}"))
    with pytest.raises(InvalidArgument, match=r"roles \['system'\].*no system role.*raw=True"):
        codec.encode_prompt([{"role": "system", "content": "Hi"}])
    assert codec.end_token_sources == {"tokenizer": (1,)}


# end tokens


def test_end_tokens_are_the_union_of_three_sources() -> None:
    tokenizer = byte_level()
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    codec = TextCodec(tokenizer, SimpleNamespace(eos_token_id=[7, 8]))
    assert codec.end_token_sources == {"generation config": (7, 8), "tokenizer": (1,), "chat template": (turn,)}
    assert codec.end_tokens == {7, 8, 1, turn}
    assert TextCodec(tokenizer, SimpleNamespace(eos_token_id=9)).end_tokens == {9, 1, turn}
    assert TextCodec(tokenizer, SimpleNamespace(eos_token_id=None)).end_tokens == {1, turn}


def test_plain_text_after_a_turn_is_no_end_token() -> None:
    codec = TextCodec(byte_level("{% for m in messages %}{{ m['content'] }}\nNext:{% endfor %}"))
    assert "chat template" not in codec.end_token_sources
    assert TextCodec(words()).end_tokens == frozenset()
    assert TextCodec(byte_level(None), template=VICUNA).end_token_sources["chat template"] == (1,)
