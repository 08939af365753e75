"""asyncio, cancelling, time limits, threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

import portadraft
from portadraft import InvalidArgument, Model
from portadraft.core.decode import Decoder
from portadraft.turns import Turn
from tests.test_api import PROMPT, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path, max_position_embeddings=2000)
    return portadraft.load(path, dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def _free(model: Model) -> Iterator[None]:
    yield
    assert model.target.lengths == ()


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


# asyncio


def test_async_answers_are_the_answers(model: Model) -> None:
    asked = ["one", "two", "three"]
    expected = [model.generate(p, max_tokens=12) for p in asked]

    async def main() -> None:
        got = await asyncio.gather(*(model.agenerate(p, max_tokens=12) for p in asked))
        assert [g.ids for g in got] == [e.ids for e in expected]
        assert [g.ids for g in await model.agenerate(asked, max_tokens=12)] == [e.ids for e in expected]
        for prompt, whole in zip(asked, expected, strict=True):
            pieces = [piece async for piece in model.astream(prompt, max_tokens=12)]
            assert "".join(p.text for p in pieces) == whole.text
            assert tuple(i for p in pieces for i in p.ids) == whole.ids
            assert pieces[-1].generation is not None
        chat = model.chat(max_tokens=12)
        assert (await chat.asend("one")).text == expected[0].text
        assert len(chat.messages) == 2

    asyncio.run(main())
    names = [t.name for t in threading.enumerate() if t.name.startswith(f"portadraft {model.name}")]
    assert len(names) == 1, "one worker"


def test_async_errors_arrive(model: Model) -> None:
    async def main() -> None:
        with pytest.raises(InvalidArgument, match="max_tokens=0"):
            await model.agenerate(PROMPT, max_tokens=0)
        with pytest.raises(InvalidArgument, match="one prompt"):
            async for _ in model.astream(["a", "b"]):
                pass
        with pytest.raises(TypeError, match="did you mean 'temperature'"):
            await model.agenerate(PROMPT, temperatur=1)

    asyncio.run(main())


def test_cancelling_a_task_frees_the_model(model: Model) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(model.agenerate(PROMPT, max_tokens=1900))
        await loop.run_in_executor(None, until, lambda: model.target.lengths != ())
        waiting = asyncio.create_task(model.agenerate(PROMPT, max_tokens=1900))
        await asyncio.sleep(0)
        waiting.cancel()  # before it began
        task.cancel()
        for one in (waiting, task):
            with pytest.raises(asyncio.CancelledError):
                await one
        assert model.target.lengths == ()
        assert (await model.agenerate(PROMPT, max_tokens=2)).finish_reason == "length"

    asyncio.run(main())


def test_leaving_an_async_stream_frees_the_model(model: Model) -> None:
    async def main() -> None:
        pieces = model.astream(PROMPT, max_tokens=1900)
        async for _ in pieces:
            break
        await pieces.aclose()  # type: ignore[attr-defined]
        assert model.target.lengths == ()

        async def read() -> None:
            async for _ in model.astream(PROMPT, max_tokens=1900):
                pass

        task = asyncio.create_task(read())
        await asyncio.get_running_loop().run_in_executor(None, until, lambda: model.target.lengths != ())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.target.lengths == ()

    asyncio.run(main())


def test_a_cancelled_call_does_not_wait_for_a_stream_of_another_thread(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=40)
    opened, finish = threading.Event(), threading.Event()

    def read() -> None:
        next(stream)
        opened.set()
        finish.wait(20)
        stream.close()

    reader = threading.Thread(target=read)
    reader.start()
    opened.wait(20)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(model.agenerate(PROMPT, max_tokens=4), 0.1)

    asyncio.run(main())
    finish.set()
    reader.join()


def test_an_async_call_inside_an_open_stream_is_refused(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=20)
    next(stream)

    async def main() -> None:
        with pytest.raises(InvalidArgument, match="still open in this thread"):
            await model.agenerate(PROMPT, max_tokens=2)

    asyncio.run(main())
    stream.close()


# time limits


def test_a_time_limit_ends_the_answer_as_it_stands(model: Model) -> None:
    whole = model.generate(PROMPT, max_tokens=400, drafter=None)
    got = model.generate(PROMPT, max_tokens=400, timeout_s=0.02, drafter=None)
    assert got.finish_reason == "timeout"
    assert 0 < len(got.ids) < 400
    assert got.ids == whole.ids[: len(got.ids)]
    assert got.text == model.codec.decode(got.ids)
    assert model.generate(PROMPT, max_tokens=4, timeout_s=60).finish_reason == "length"
    pieces = list(model.stream(PROMPT, max_tokens=400, timeout_s=0.02, stop="\u2603"))
    assert pieces[-1].generation is not None
    assert pieces[-1].generation.finish_reason == "timeout"
    assert "".join(p.text for p in pieces) == pieces[-1].generation.text
    assert tuple(i for p in pieces for i in p.ids) == pieces[-1].generation.ids


def test_a_time_limit_counts_for_each_prompt_of_a_batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoder.step

    def slow(self: Decoder) -> Any:
        time.sleep(0.02)
        return step(self)

    monkeypatch.setattr(Decoder, "step", slow)
    got = model.generate([PROMPT] * 4, max_tokens=12, batch_size=1, timeout_s=0.4, drafter=None)
    assert [g.finish_reason for g in got] == ["length"] * 4, "the last began after more than the limit"
    late = model.generate([PROMPT, PROMPT], max_tokens=500, timeout_s=0.1, drafter=None)
    assert [g.finish_reason for g in late] == ["timeout"] * 2


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "1", True])
def test_bad_time_limits(model: Model, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s="):
        model.generate(PROMPT, timeout_s=bad)


# threads


def test_turns_are_fair() -> None:
    turn, order = Turn(), []
    assert turn.take()

    def wait(number: int) -> None:
        assert turn.take()
        order.append(number)
        turn.give_back()

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda n=number: len(turn._waiting) == n + 1)
    turn.give_back()
    for thread in threads:
        thread.join()
    assert order == list(range(6))
    assert turn.take()
    turn.give_back()


def test_a_thread_that_has_ended_does_not_lend_its_number(model: Model) -> None:
    """Python gives the number of a thread that has ended to the next one."""
    box: list[Any] = []

    def begin() -> None:
        stream = model.stream(PROMPT, max_tokens=8)
        next(stream)
        box.append(stream)

    first = threading.Thread(target=begin)
    first.start()
    first.join()
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(model.generate(PROMPT, max_tokens=2).finish_reason)
        except InvalidArgument as error:
            results.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(model._turn._waiting) == 3 or bool(results))
    assert results == []
    list(box[0])
    for thread in threads:
        thread.join()
    assert results == ["length"] * 3


def test_a_stream_is_of_the_thread_that_reads_it(model: Model) -> None:
    """Which is refused a call in the middle, rather than waiting for itself; the one that began it waits."""
    stream = model.stream(PROMPT, max_tokens=30)
    next(stream)
    results: list[Any] = []

    def read() -> None:
        next(stream)
        with pytest.raises(InvalidArgument, match="still open in this thread"):
            model.generate(PROMPT, max_tokens=2)
        results.append("refused")
        until(lambda: len(model._turn._waiting) == 1)
        list(stream)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: bool(results))
    assert model.generate(PROMPT, max_tokens=2).finish_reason == "length"
    thread.join()


def leave_a_stream_open(model: Model) -> None:
    with model.turn():
        stream = model.stream(PROMPT, max_tokens=6)
        next(stream)
    # The block has ended, but the stream goes on, and with it the turn.
    with pytest.raises(InvalidArgument, match="stream of it is still open"):
        model.generate(PROMPT, max_tokens=2)
    stream.close()


def test_calls_of_its_own_thread_run_within_a_turn(model: Model) -> None:
    results: list[str] = []

    def other() -> None:
        model.generate(PROMPT, max_tokens=2)
        results.append("other")

    thread = threading.Thread(target=other)
    with model.turn():
        thread.start()
        until(lambda: len(model._turn._waiting) == 1)
        for _ in range(2):
            assert model.generate(PROMPT, max_tokens=2).finish_reason == "length"
            results.append("own")
        leave_a_stream_open(model)

        async def main() -> None:
            with pytest.raises(InvalidArgument, match=r"with model.turn\(\)"):
                await model.agenerate(PROMPT, max_tokens=2)

        asyncio.run(main())
        results.append("own")
    thread.join()
    assert results == ["own", "own", "own", "other"]
    leave_a_stream_open(model)
    assert model.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_a_stream_that_several_threads_read(model: Model) -> None:
    """As a web server does it, which reads each piece in whatever thread is free."""
    expected = model.generate(PROMPT, max_tokens=20).text
    stream = model.stream(PROMPT, max_tokens=20)
    text = next(stream).text
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(next(stream).text))
    thread.start()
    thread.join()
    text += other[0]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(model.generate(PROMPT, max_tokens=20).text))
    thread.start()
    until(lambda: len(model._turn._waiting) == 1)
    text += "".join(piece.text for piece in stream)
    thread.join()
    assert text == expected == answers[0]


def test_two_threads_and_plain_transformers_beside_them(model: Model) -> None:
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 9)[None]

    def theirs() -> list[int]:
        out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        return [int(i) for i in out[0]]

    def ours(seed: int) -> list[Any]:
        return [model.generate(f"{PROMPT} {n}", max_tokens=40, temperature=0.7, seed=seed).ids for n in range(3)]

    jobs: dict[str, Any] = {"theirs": theirs, "first": lambda: ours(1), "second": lambda: ours(2)}
    alone = {name: job() for name, job in jobs.items()}
    assert alone["first"] != alone["second"]
    together: dict[str, list[Any]] = {name: [] for name in jobs}

    def repeat(name: str) -> None:
        together[name] += [jobs[name]() for _ in range(3)]

    threads = [threading.Thread(target=repeat, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in jobs:
        assert together[name] == [alone[name]] * 3


# conversations, and loops that end


def test_a_chat_streams_for_asyncio_too(model: Model) -> None:
    expected = model.chat(max_tokens=12).send("one")

    async def main() -> None:
        chat = model.chat(max_tokens=12)
        pieces = chat.astream("one")
        assert (await anext(pieces)).generation is None
        await pieces.aclose()
        assert model.target.lengths == () and chat.messages == []
        assert "".join([piece.text async for piece in chat.astream("one")]) == expected.text
        assert [message["content"] for message in chat.messages] == ["one", expected.text]
        assert (await chat.asend("two")).stats.reused_tokens > 0

    asyncio.run(main())


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_left_open_when_its_loop_ends_is_closed_quietly(
    model: Model, chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> Any:
        source: Any = model.chat() if chat else model
        pieces = source.astream(PROMPT, max_tokens=1500, end_tokens=[])
        await anext(pieces)
        return pieces  # a reference that outlives the loop

    kept = asyncio.run(main())
    assert caplog.messages == []  # asyncio logs what fails while it closes generators
    assert model.target.lengths == ()
    assert kept is not None and model.generate(PROMPT, max_tokens=2).finish_reason == "length"
