"""Lists of prompts through the slots of a batch: order, independence, refilling, what is left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import portadraft
from portadraft import InvalidArgument, Model
from portadraft.call import Call
from portadraft.core.decode import Decoder
from portadraft.core.sampling import row_seed
from tests.test_api import LIMIT


def prompts(count: int) -> list[list[int]]:
    """Of very different lengths, in no order."""
    return [[5 + (7 * i + j * (1 + i % 3)) % 300 for j in range(1 + (37 * i) % 90)] for i in range(count)]


@pytest.mark.parametrize(("temperature", "count", "sizes"), [(0.8, 40, (4, 64)), (0.0, 10, (1, 3))])
def test_prompts_through_slots_are_each_as_alone(
    model: Model, drafter: Path, temperature: float, count: int, sizes: tuple[int, ...]
) -> None:
    asked = prompts(count)
    seeds = [row_seed(5, i) for i in range(count)]
    options: dict[str, Any] = {"max_tokens": 9, "temperature": temperature, "drafter": drafter}
    alone = [model.generate(p, seed=s, **{**options, "drafter": None}).ids for p, s in zip(asked, seeds, strict=True)]
    for size in sizes:
        together = model.generate(asked, seed=5, batch_size=size, **options)
        assert [answer.ids for answer in together] == alone
    listed = model.generate(asked[:6], seed=seeds[:6], batch_size=2, **options)
    assert [answer.ids for answer in listed] == alone[:6]
    if temperature:  # the comparison can fail: another seed, other answers
        other = model.generate(asked[:4], seed=6, **options)
        assert [answer.ids for answer in other] != alone[:4]


def test_no_more_rows_than_slots_and_none_idle(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = Decoder.step

    def watched(self: Decoder) -> Any:
        seen.append(self.live)
        return step(self)

    monkeypatch.setattr(Decoder, "step", watched)
    asked = prompts(11)
    model.generate(asked, max_tokens=9, drafter=None, batch_size=3, end_tokens=[])
    # Every answer takes 8 steps: three full rounds of three rows, and two rows that are left.
    assert seen == [3] * 24 + [2] * 8
    seen.clear()
    model.generate(asked, max_tokens=3, drafter=None, end_tokens=[])
    assert max(seen) == portadraft.options.DEFAULT_BATCH_SIZE


def test_a_slot_is_refilled_beside_rows_that_go_on(model: Model) -> None:
    """Answers of different lengths: a row that ends early is followed at once, while its neighbour goes on."""
    long, short = [7] * 5, [9] * (LIMIT - 3)
    alone = [model.generate(p, max_tokens=30, drafter=None) for p in (long, short, long, short)]
    assert [a.finish_reason for a in alone] == ["length", "context"] * 2
    order = [i for i, _ in model.as_completed([long, short, long, short], max_tokens=30, batch_size=2)]
    assert order[0] == 1
    got = model.generate([long, short, long, short], max_tokens=30, batch_size=2, drafter="lookup")
    assert [a.ids for a in got] == [a.ids for a in alone]


def test_as_completed_gives_every_answer_once(model: Model) -> None:
    asked = prompts(9)
    whole = model.generate(asked, max_tokens=12)
    got = dict(model.as_completed(asked, max_tokens=12, batch_size=4))
    assert [got[i].ids for i in range(9)] == [a.ids for a in whole]
    assert [got[i].text for i in range(9)] == [a.text for a in whole]
    early = model.as_completed(asked, max_tokens=12, batch_size=2)
    next(early)
    early.close()
    assert model.target.lengths == ()
    with pytest.raises(InvalidArgument, match="one prompt"):
        model.as_completed("one")


def test_stops_and_ends_free_slots_too(model: Model) -> None:
    asked = prompts(8)
    whole = model.generate(asked, max_tokens=16, drafter=None)
    stop = [a.text[5:7] for a in whole[:4] if len(a.text) > 7]
    alone = [model.generate(p, max_tokens=16, stop=stop, drafter=None) for p in asked]
    assert {a.finish_reason for a in alone} >= {"stop"}
    together = model.generate(asked, max_tokens=16, stop=stop, batch_size=3)
    assert [(a.text, a.ids, a.finish_reason) for a in together] == [(a.text, a.ids, a.finish_reason) for a in alone]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([[3], [5, 10**6]], "prompt #1 .*1000000"),
        ([[3], [3] * LIMIT], "prompt #1 .*context"),
        (["fine", ""], "prompt #1"),
        (["fine", [{"role": "user", "content": 5}]], "prompt #1 .*content is int"),
    ],
)
def test_a_fault_in_one_prompt_is_found_before_any_work(
    model: Model, monkeypatch: pytest.MonkeyPatch, bad: list[Any], words: str
) -> None:
    monkeypatch.setattr(Decoder, "admit", lambda *_: pytest.fail("work was done"))
    with pytest.raises(InvalidArgument, match=words):
        model.generate(bad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": [1]}, "seed: a list of 1 for 2 prompts"),
        ({"seed": [1, -1]}, "seed=-1"),
    ],
)
def test_bad_batch_options(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        model.generate(["a", "b"], **options)
    with pytest.raises(InvalidArgument, match="for one prompt"):
        model.generate("a", seed=[1])


def test_stats_of_a_batch(model: Model) -> None:
    answers = model.generate(prompts(5), max_tokens=6, batch_size=2, drafter=None, end_tokens=[])
    assert answers[0].stats.chosen["batch_size"].value == "2"
    for answer in answers:
        assert answer.stats.steps == 5
        assert answer.stats.decode_s > 0
        assert answer.stats.prefill_s > 0


def test_five_hundred_prompts_leave_nothing_behind(model: Model) -> None:
    """Rows, buffers and answers that were handed out are let go of while the call goes on."""
    asked = [[5 + i % 50] * (1 + i % 7) for i in range(500)]
    sizes, kept = [], []
    for count, (_, _answer) in enumerate(model.as_completed(asked, max_tokens=3, batch_size=4, drafter="lookup")):
        if count in (100, 490):
            gc.collect()
            sizes.append(_reachable(model))
            kept.append(sum(type(o) is portadraft.Generation for o in gc.get_objects()))
    assert model.target.lengths == ()
    assert kept[1] <= kept[0] + 4
    assert sizes[1] <= sizes[0]


def _reachable(model: Model) -> int:
    """Bytes of the target's cache and of all live calls' prompts."""
    calls = [o for o in gc.get_objects() if type(o) is Call]
    cache = sum(
        buffer.numel() * buffer.element_size() for store in model.target.cache.stores for buffer in store.buffers
    )
    return int(cache) + sum(len(ids) for call in calls for ids in call._prompts)
