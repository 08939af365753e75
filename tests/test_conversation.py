"""Conversations and kept prefixes: what is reused, what is refused, and that no text changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import portadraft
from portadraft import InvalidArgument, Model
from portadraft.core.target import RowState
from portadraft.errors import ModelNotFound
from portadraft.prefix import PrefixCache, common_prefix
from tests.test_api import PROMPT, save_drafter, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path, max_position_embeddings=600)
    return portadraft.load(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random", model)


def state(ids: list[int], nbytes: int = 10) -> RowState:
    return RowState(tuple(ids), None, nbytes)


# the cache


def test_the_longest_common_prefix_is_found() -> None:
    cache = PrefixCache(100)
    for ids in ([1, 2, 3, 4], [1, 2, 5], [7, 8]):
        assert cache.keep(state(ids)) is None
    found = cache.find([1, 2, 3, 9])
    assert found is not None
    assert (found[0].ids, found[1]) == ((1, 2, 3, 4), 3)
    assert cache.find([9, 1]) is None
    assert cache.find([1]) is None, "one token is always left to compute"
    found = cache.find([7, 8])
    assert found is not None
    assert found[1] == 1


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(30)
    for ids in ([1, 1], [2, 2], [3, 3]):
        cache.keep(state(ids))
    cache.find([1, 1, 1])
    cache.keep(state([4, 4]))
    assert cache.nbytes == 30
    assert [cache.find([i, i, i]) is not None for i in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_longer_state_replaces_its_own_beginning() -> None:
    cache = PrefixCache(100)
    cache.keep(state([1, 2]))
    cache.keep(state([1, 2, 3]))
    assert len(cache) == 1
    cache.keep(state([1, 2]))
    assert len(cache) == 1
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_state_above_the_limit_is_not_kept_and_says_so() -> None:
    cache = PrefixCache(30)
    cache.keep(state([1, 2], 30))
    notice = cache.keep(state([3] * 4, 2048))
    assert notice is not None
    for words in ("4 tokens", "2.0 KiB", "30 bytes", "max_bytes"):
        assert words in notice
    assert cache.find([1, 2, 3]) is not None, "it drove nothing out"


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "1GB"])
def test_bad_limits(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_bytes="):
        PrefixCache(bad)


def test_common_prefix() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = ([int(x) for x in rng.integers(0, 2, rng.integers(0, 6))] for _ in range(2))
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert common_prefix(a, b) == expected


# reuse


def test_reuse_changes_no_text(model: Model, drafter: Path) -> None:
    rng = np.random.default_rng(1)
    base = [int(i) for i in rng.integers(5, 300, 60)]
    asked = [base, [*base[:40], *(int(i) for i in rng.integers(5, 300, 9))], base[:25], [*base, 9, 9]]
    for name in (None, "lookup", drafter):
        cache = PrefixCache()
        for number, ids in enumerate(asked):
            fresh = model.generate(ids, max_tokens=20, drafter=name)
            kept = model.generate(ids, max_tokens=20, drafter=name, reuse=cache)
            assert (kept.ids, kept.text) == (fresh.ids, fresh.text)
            assert kept.stats.reused_tokens == (0, 40, 24, 60)[number]
            assert fresh.stats.reused_tokens == 0


def test_a_kept_state_that_is_wrong_would_be_noticed(model: Model) -> None:
    """The negative control: keys and values of another text give another answer."""
    ids = [5 + (3 * i) % 200 for i in range(40)]
    other = [5 + (11 * i) % 200 for i in range(40)]
    cache = PrefixCache()
    model.generate(other, max_tokens=2, reuse=cache)
    (kept,) = cache._states
    cache._states = [RowState((*ids, *kept.ids[40:]), kept.native, kept.nbytes, kept.owner)]
    fresh = model.generate(ids, max_tokens=20)
    assert model.generate(ids, max_tokens=20, reuse=cache).ids != fresh.ids


def test_reuse_after_a_stop_inside_an_accepted_block(model: Model) -> None:
    from portadraft.drafters import OracleDrafter

    ids = tuple(model.codec.encode_prompt(PROMPT))
    whole = model.generate(list(ids), max_tokens=40, drafter=None)
    oracle = OracleDrafter(model.target.ops, {ids: whole.ids}, model.target.facts.vocabulary_size, 1.0)
    inside = 0
    for length in (3, 4, 6):
        for place in (8, 11, 13):
            cache = PrefixCache()
            stop = whole.text[place : place + 3]
            cut = model.generate(
                list(ids), max_tokens=40, stop=stop, drafter=oracle, width=1, length=length, reuse=cache
            )
            if cut.finish_reason != "stop":
                continue
            inside += len(cut.ids) % (length + 1) != 0
            follow = [*ids, *cut.ids, 9, 9, 9]
            again = model.generate(follow, max_tokens=20, reuse=cache)
            assert again.stats.reused_tokens >= len(ids) + len(cut.ids) - 1
            assert again.ids == model.generate(follow, max_tokens=20, drafter=None).ids
    assert inside


def test_a_timeout_and_the_end_of_a_batch_keep_states_too(model: Model) -> None:
    cache = PrefixCache()
    asked = [[5 + (k * i) % 200 for i in range(30)] for k in (3, 7, 11)]
    got = model.generate(asked, max_tokens=8, batch_size=2, reuse=cache)
    assert len(cache) == 3
    again = model.generate([[*p, *a.ids, 8] for p, a in zip(asked, got, strict=True)], max_tokens=8, reuse=cache)
    assert [a.stats.reused_tokens for a in again] == [30 + 7] * 3
    late = model.generate(asked[0], max_tokens=500, timeout_s=1e-9, reuse=True)
    assert late.finish_reason == "timeout"
    assert len(model.prefixes) == 1


def test_a_cache_of_another_model_is_refused(model: Model, tmp_path: Path) -> None:
    save_model(tmp_path, seed=3)
    other = portadraft.load(tmp_path, dtype="float32", device="cpu")
    cache = PrefixCache()
    model.generate(PROMPT, max_tokens=2, reuse=cache)
    with pytest.raises(InvalidArgument, match="another model"):
        other.generate(PROMPT, max_tokens=2, reuse=cache)
    with pytest.raises(InvalidArgument, match="reuse=3"):
        model.generate(PROMPT, reuse=3)


# chats


def answers(model: Model, turns: list[str], **options: Any) -> list[str]:
    """The same conversation without anything kept."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    out = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        out.append(model.generate(messages, **options).text)
        messages.append({"role": "assistant", "content": out[-1]})
    return out


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}, {"stop": ["e", "o"]}])
def test_a_chat_says_what_stateless_calls_say(model: Model, drafter: Path, options: dict[str, Any]) -> None:
    turns = ["Hello there", "And then?", "Why?"]
    expected = answers(model, turns, max_tokens=16, drafter=None, **options)
    for name in ("lookup", drafter):
        chat = model.chat("Be brief.", max_tokens=16, drafter=name, **options)
        got = [chat.send(text) for text in turns]
        assert [g.text for g in got] == expected
        assert got[0].stats.reused_tokens == 0
        for before, turn in itertools.pairwise(got):
            # What the model said in letters that are none is other tokens when it is read again.
            assert turn.stats.reused_tokens >= before.stats.prompt_tokens - 2
        assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]
    streamed = model.chat("Be brief.", max_tokens=16, **options)
    assert ["".join(p.text for p in streamed.stream(text)) for text in turns] == expected


def test_turns_can_be_taken_back_and_edited(model: Model) -> None:
    chat = model.chat("Be brief.", max_tokens=12)
    chat.send("Hello there")
    chat.send("And then?")
    assert chat.undo() == "And then?"
    assert len(chat.messages) == 3
    got = chat.send("Tell me more", temperature=0.9)
    assert got.text == model.generate(chat.messages[:-1], max_tokens=12, temperature=0.9).text
    assert got.stats.reused_tokens > 0
    chat.messages[1]["content"] = "Hello"
    got = chat.send("And now?")
    assert got.text == model.generate(chat.messages[:-1], max_tokens=12).text
    assert 0 < got.stats.reused_tokens < got.stats.prompt_tokens // 2
    chat.messages.clear()
    with pytest.raises(InvalidArgument, match="no user message"):
        chat.undo()


def test_an_error_or_an_early_close_leaves_the_messages_alone(model: Model) -> None:
    chat = model.chat(max_tokens=12)
    chat.send("Hello")
    before = [dict(m) for m in chat.messages]
    with pytest.raises(InvalidArgument, match="temperature=-1"):
        chat.send("More", temperature=-1)
    stream = chat.stream("More")
    next(stream)
    stream.close()
    assert chat.messages == before
    assert model.target.lengths == ()
    with pytest.raises(InvalidArgument, match="text=''"):
        chat.send("")
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        model.chat(max_token=3)
    for wrong in ((), None, "Hello"):
        chat.messages = wrong  # type: ignore[assignment]
        with pytest.raises(InvalidArgument, match="messages="):
            chat.send("More")
    chat.messages = before
    with pytest.raises(InvalidArgument, match="reuse"):
        model.chat(reuse=True)
    with pytest.raises(InvalidArgument, match="system=3"):
        model.chat(3)  # type: ignore[arg-type]
    bad: Any
    for bad in ("Hello", {"role": "user", "content": "Hello"}, ["Hello"], [{"role": "user"}]):
        with pytest.raises(InvalidArgument, match="messages"):
            model.chat(messages=bad)
    chat.messages.append("More")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"messages\[2\]='More'"):
        chat.send("Again")


def test_a_chat_above_its_memory_still_answers(model: Model) -> None:
    chat = model.chat(max_tokens=8, max_bytes=1000)
    expected = model.chat(max_tokens=8)
    for text in ("Hello", "More"):
        got = chat.send(text)
        assert got.text == expected.send(text).text
        assert got.stats.reused_tokens == 0
        assert "max_bytes" in got.notices[0]
    assert chat.prefixes.nbytes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"raw": True}, "raw: a chat decides"),
        ({"reuse": False}, "reuse: a chat decides"),
        ({"banned": [10**6]}, "1000000"),
        ({"end_tokens": [10**6]}, "1000000"),
        ({"width": 0}, "width=0"),
        ({"width": 5000}, "width=5000"),
        ({"drafter": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"seed": [1]}, "seed: a list of 1 for one prompt"),
        ({"profile": 1}, "profile=1"),
    ],
)
def test_bad_options_of_a_chat_are_found_when_it_begins(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidArgument, ModelNotFound), match=words):
        model.chat(**options)
    chat = model.chat(max_tokens=3)
    with pytest.raises((InvalidArgument, ModelNotFound), match=words):
        chat.send("hello", **options)
    with pytest.raises((InvalidArgument, ModelNotFound), match=words):
        chat.stream("hello", **options)
    assert chat.messages == []


def test_a_limit_may_be_numpys(model: Model) -> None:
    assert model.chat(max_bytes=np.int64(10**6)).prefixes.max_bytes == 10**6


def test_a_chat_needs_a_template(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.codec, "chat_template", None)
    with pytest.raises(InvalidArgument, match="no chat template"):
        model.chat()


def test_an_iterator_given_to_a_chat_is_there_in_every_turn(model: Model) -> None:
    free = model.chat(max_tokens=8, end_tokens=[]).send("one")
    chat = model.chat(max_tokens=8, end_tokens=iter(free.ids[:1]))
    assert [chat.send("one").finish_reason, (chat.undo(), chat.send("one").finish_reason)[1]] == ["end", "end"]
