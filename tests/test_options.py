"""The options of generating: what they do, what is refused, log-probabilities, what stops leave of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

import portadraft
from portadraft import InvalidArgument, Model
from portadraft.core.decode import Decoder
from tests.test_api import PROMPT, save_model


def logits(model: Model, ids: list[int]) -> Any:
    with model.target.ops.no_grad():
        out = model.target.ops.to_numpy(model.target.admit([ids]).logits)[0, 0].astype(np.float64)
    model.target.release(0)
    return out


# sampling


EVERYTHING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "logit_bias": {9: 2.0}, "banned": [11], "min_tokens": 4, "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("left_out", [None, *EVERYTHING])
def test_options_reach_the_sampler_and_drafting_changes_nothing(
    model: Model, drafter: Path, left_out: str | None
) -> None:
    options = {name: value for name, value in EVERYTHING.items() if name != left_out}
    plain = model.generate(PROMPT, max_tokens=30, drafter=None, **options)
    drafted = model.generate(PROMPT, max_tokens=30, drafter=drafter, **options)
    assert plain.ids == drafted.ids
    assert 11 not in plain.ids or left_out == "banned"


def test_each_option_does_something(model: Model) -> None:
    base: dict[str, Any] = {"max_tokens": 40, "temperature": 1.2, "drafter": None, "end_tokens": []}
    free = model.generate(PROMPT, **base).ids
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = {"top_k": 3, "top_p": 0.3, "min_p": 0.3, "repetition_penalty": 1.5}.get(name, 3.0)
        assert model.generate(PROMPT, **base, **{name: value}).ids != free, name
    assert set(model.generate(PROMPT, **base, logit_bias={9: 1000.0}).ids) == {9}
    assert model.generate(PROMPT, **base, banned=list(set(free))).ids != free
    word = model.codec.decode([free[0]])
    assert free[0] not in model.generate(PROMPT, **base, banned=word).ids


def test_the_models_own_sampling_on_request_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
    monkeypatch.setattr(model.codec, "generation_config", config)
    named = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    own = model.generate(PROMPT, max_tokens=30, sampling="model").ids
    assert own == model.generate(PROMPT, max_tokens=30, **named).ids
    assert own != model.generate(PROMPT, max_tokens=30).ids
    cool = model.generate(PROMPT, max_tokens=30, sampling="model", temperature=0).ids
    assert cool == model.generate(PROMPT, max_tokens=30, **{**named, "temperature": 0}).ids
    config.do_sample = False
    assert model.generate(PROMPT, max_tokens=30, sampling="model").ids == (
        model.generate(PROMPT, max_tokens=30, repetition_penalty=1.1).ids
    )


def test_rejection_drafts_one_chain_unless_told_otherwise(model: Model, drafter: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "drafter": drafter, "end_tokens": []}
    default = model.generate(PROMPT, acceptance="rejection", **options)
    assert default.stats.chosen["shape"].value == "1x4"
    assert "rejection" in default.stats.chosen["shape"].reason
    assert default.stats.plain_steps == 0
    assert default.ids == model.generate(PROMPT, acceptance="rejection", width=1, length=4, **options).ids
    shorter = model.generate(PROMPT, acceptance="rejection", length=2, **options)
    assert shorter.stats.chosen["shape"].value == "1x2" and max(shorter.stats.accepted) <= 2
    with pytest.raises(InvalidArgument, match="width=2"):
        model.generate(PROMPT, acceptance="rejection", width=2, **options)
    assert model.generate(PROMPT, **options).stats.chosen["shape"].value != "1x4"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {10**6: 1}}, "1000000"),
        ({"banned": [10**6]}, "1000000"),
        ({"banned": "a whole sentence"}, "banned: 'a whole sentence' is .* tokens"),
        ({"banned": [1.5]}, "banned: 1.5"),
        ({"banned": 1.5}, "banned=1.5"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"sampling": "mine"}, "sampling='mine'"),
        ({"acceptance": "maybe"}, "acceptance='maybe'"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logprobs": 10**6}, "logprobs=1000000"),
        ({"end_tokens": "x"}, "end_tokens='x'"),
        ({"end_tokens": 1.5}, "end_tokens=1.5"),
        ({"end_tokens": [True]}, r"end_tokens=\[True\]"),
        ({"end_tokens": [3, 10**6]}, "end_tokens: token id 1000000 is outside"),
        ({"raw": "no"}, "raw='no'"),
        ({"raw": 1}, "raw=1"),
        ({"profile": "yes"}, "profile='yes'"),
        ({"reuse": "yes"}, "reuse='yes'"),
        ({"max_tokens": np.float32(3)}, "max_tokens="),
        ({"temperature": np.float32("nan")}, "temperature="),
        ({"temperature": np.bool_(True)}, "temperature="),
        ({"logprobs": np.int64(-1)}, "logprobs="),
        ({"width": 2.0}, "width=2.0"),
    ],
)
def test_bad_options_are_found_before_any_work(
    model: Model, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(Decoder, "admit", lambda *_: pytest.fail("work was done"))
    with pytest.raises(InvalidArgument, match=words):
        model.stream(PROMPT, **options)


def test_numbers_of_numpy_are_numbers(model: Model, drafter: Path) -> None:
    plain = {
        "max_tokens": 12, "temperature": 0.75, "top_k": 40, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.25,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 3, "seed": 5, "width": 2, "length": 2,
        "nodes": 4, "logprobs": 2, "timeout_s": 100.0, "raw": True, "profile": False,
    }  # fmt: skip
    kinds = {int: np.int64, float: np.float32, bool: np.bool_}
    theirs = {name: kinds[type(value)](value) for name, value in plain.items()}
    theirs |= {"logit_bias": {np.int32(9): np.float16(2)}, "banned": [np.uint8(11)], "end_tokens": np.int64(7)}
    expected = model.generate(PROMPT, drafter=drafter, **plain, logit_bias={9: 2.0}, banned=[11], end_tokens=7)
    assert model.generate(PROMPT, drafter=drafter, **theirs).ids == expected.ids
    assert model.generate(PROMPT, drafter=drafter, **{**plain, "seed": 6}).ids != expected.ids
    seeds = [np.int64(1), np.uint64(2**64 - 1)]
    several = model.generate([PROMPT] * 2, max_tokens=5, temperature=1.0, seed=seeds, batch_size=np.int16(2))
    assert [a.ids for a in several] == [
        a.ids for a in model.generate([PROMPT] * 2, max_tokens=5, temperature=1.0, seed=[1, 2**64 - 1])
    ]


def test_whether_to_check_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="check='no'"):
        portadraft.load(tmp_path, check="no")  # type: ignore[arg-type]


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    where = tmp_path / "none.json"
    save_model(tmp_path / "tiny")
    with pytest.raises(FileNotFoundError, match=r"profiles='.*none\.json': no such file; expected"):
        portadraft.load(tmp_path / "tiny", device="cpu", profiles=where)


def test_the_nearest_name_is_suggested(model: Model) -> None:
    for wrong, right in (("topk", "top_k"), ("stop_string", "stop"), ("repeat_penalty", "repetition_penalty")):
        with pytest.raises(TypeError, match=f"unknown option '{wrong}'.*'?{right}'?"):
            model.generate(PROMPT, **{wrong: 1})
    with pytest.raises(TypeError, match=r"unknown option 'zzz'; expected one of acceptance, banned"):
        model.generate(PROMPT, zzz=1)
    with pytest.raises(portadraft.PortadraftError, match="zzz"):  # whoever catches ours, catches this
        model.generate(PROMPT, zzz=1)


def test_numbers_beyond_float64_are_infinite(model: Model) -> None:
    for value in (10**400, -(10**400)):
        with pytest.raises(InvalidArgument, match="temperature="):
            model.generate(PROMPT, temperature=value)
        with pytest.raises(InvalidArgument, match="repetition_penalty="):
            model.generate(PROMPT, repetition_penalty=value)


def test_end_tokens_may_be_named(model: Model) -> None:
    free = model.generate(PROMPT, max_tokens=30, drafter=None)
    last = next(i for i in range(5, 30) if free.ids[i] not in free.ids[:i])
    got = model.generate(PROMPT, max_tokens=30, end_tokens=free.ids[last])
    assert (got.ids, got.finish_reason) == (free.ids[: last + 1], "end")
    for same in (iter(got.ids[-1:]), np.asarray(got.ids[-1:]), torch.tensor(got.ids[-1:])):
        assert model.generate(PROMPT, max_tokens=30, end_tokens=same).ids == got.ids
    assert model.generate(PROMPT, max_tokens=30, end_tokens=[]).ids == free.ids


# log-probabilities


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3}])
def test_log_probabilities_are_the_models_own(model: Model, drafter: Path, options: dict[str, Any]) -> None:
    prompt = model.codec.encode_prompt(PROMPT)
    for name in (None, drafter, "lookup"):
        got = model.generate(PROMPT, max_tokens=14, drafter=name, logprobs=3, **options)
        assert got.logprobs is not None
        assert tuple(one.token for one in got.logprobs) == got.ids
        for place, one in enumerate(got.logprobs):
            values = logits(model, [*prompt, *got.ids[:place]])
            values -= values.max() + np.log(np.exp(values - values.max()).sum())
            assert one.logprob == pytest.approx(values[one.token], abs=2e-4)
            best = np.argsort(-values)[:3]
            assert [i for i, _ in one.top] == best.tolist()
            assert [v for _, v in one.top] == pytest.approx(values[best].tolist(), abs=2e-4)
    assert model.generate(PROMPT, max_tokens=3).logprobs is None
    only = model.generate(PROMPT, max_tokens=3, logprobs=True).logprobs
    assert only is not None
    assert [one.top for one in only] == [()] * 3


def test_log_probabilities_of_batches_and_streams(model: Model, drafter: Path) -> None:
    prompts = [[5, 6, 7], [9] * 30, [8, 8], [100, 3]]
    alone = [model.generate(p, max_tokens=12, logprobs=2) for p in prompts]
    for answer, one in zip(model.generate(prompts, max_tokens=12, logprobs=2, batch_size=3), alone, strict=True):
        assert answer.ids == one.ids
        assert one.logprobs is not None and answer.logprobs is not None
        assert [x.logprob for x in answer.logprobs] == pytest.approx([x.logprob for x in one.logprobs], abs=1e-4)
    for stop in (None, alone[0].text[4:6]):
        pieces = list(model.stream(prompts[0], max_tokens=12, logprobs=2, stop=stop, drafter=drafter))
        whole = pieces[-1].generation
        assert whole is not None
        for piece in pieces:
            assert piece.logprobs is not None
            assert tuple(one.token for one in piece.logprobs) == piece.ids
        assert whole.logprobs == tuple(one for piece in pieces for one in piece.logprobs or ())
        assert "logprobs" in whole.as_dict()


# stop strings, with everything that they cut


def cuts(text: str) -> list[list[str]]:
    """Stop strings that fall across tokens, inside tokens, and several at once."""
    return [[text[a : a + n]] for a in range(4, min(len(text), 40) - 6, 9) for n in (1, 2, 5)] + [
        [text[9:13], text[20:22]]
    ]


@pytest.mark.parametrize("seed", range(2))
def test_a_stop_cuts_text_ids_log_probabilities_and_counters_alike(model: Model, drafter: Path, seed: int) -> None:
    from portadraft.drafters import OracleDrafter

    options: dict[str, Any] = {"max_tokens": 36, "temperature": 1.0, "seed": seed, "logprobs": 1, "end_tokens": []}
    prompt = tuple(model.codec.encode_prompt(PROMPT))
    whole = model.generate(list(prompt), drafter=None, **options)
    assert whole.logprobs is not None
    oracle = OracleDrafter(model.target.ops, {prompt: whole.ids}, model.target.facts.vocabulary_size, 0.9)
    inside = stopped = 0
    for stop in cuts(whole.text):
        plain = model.generate(list(prompt), stop=stop, drafter=None, **options)
        place = min(whole.text.index(s) for s in stop if s in whole.text)
        stopped += plain.finish_reason == "stop"
        if len(stop) == 1:
            assert plain.text == whole.text[:place]
        assert plain.ids == whole.ids[: len(plain.ids)]
        for length in (3, 5):
            got = model.generate(list(prompt), stop=stop, drafter=oracle, width=2, length=length, **options)
            assert (got.text, got.ids, got.finish_reason) == (plain.text, plain.ids, plain.finish_reason)
            assert got.logprobs is not None
            assert tuple(one.token for one in got.logprobs) == got.ids
            assert [one.logprob for one in got.logprobs] == pytest.approx(
                [one.logprob for one in whole.logprobs[: len(got.ids)]], abs=1e-4
            )
            assert got.stats.generated_tokens == len(got.ids)
            given = 1 + sum((n + 1) * count for n, count in got.stats.accepted.items())
            inside += given > len(got.ids) + 1
            if length == 3:
                continue
            pieces = list(model.stream(list(prompt), stop=stop, drafter=oracle, width=2, length=length, **options))
            assert "".join(p.text for p in pieces) == got.text
            assert tuple(i for p in pieces for i in p.ids) == got.ids
            shown = ""
            for piece in pieces:
                shown += piece.text
                assert plain.text.startswith(shown)
                assert not any(s in shown for s in stop)
    assert stopped > 5
    assert inside, "some stop fell inside an accepted block"


def test_a_stop_inside_a_character_of_several_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to say one emoji between letters; the stop is the emoji, or what follows it."""
    said = model.codec.tokenizer.encode("ab\U0001f680cd\U0001f680", add_special_tokens=False)
    assert len(said) > 8
    prompt = [5, 6, 7]
    forced = _Forced(model, len(prompt), said)
    monkeypatch.setattr(model, "target", forced)
    try:
        for stop, text in (
            ("\U0001f680", "ab"),
            ("\U0001f680c", "ab"),
            ("c", "ab\U0001f680"),
            (["d\U0001f680", "x"], "ab\U0001f680c"),
        ):
            pieces = list(model.stream(prompt, max_tokens=len(said), stop=stop, drafter=None, logprobs=1))
            whole = pieces[-1].generation
            assert whole is not None
            assert (whole.text, whole.finish_reason) == (text, "stop")
            kept = len(model.codec.tokenizer.encode(text, add_special_tokens=False))
            assert whole.ids == tuple(said[:kept])
            assert whole.logprobs is not None and len(whole.logprobs) == kept
            assert all("\ufffd" not in p.text for p in pieces)
            assert "".join(p.text for p in pieces) == text
        assert model.generate(prompt, max_tokens=len(said), drafter=None).text == "ab\U0001f680cd\U0001f680"
    finally:
        while forced.lengths:
            forced.release(0)


class _Forced:
    """A target that says given ids after the prompt."""

    def __init__(self, model: Model, start: int, said: list[int]) -> None:
        self._target, self._start, self._said = model.target, start, said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def _force(self, verified: Any, length: int) -> Any:
        place = length - self._start
        token = self._said[place] if place < len(self._said) else 0
        bias = torch.zeros(verified.logits.shape[-1])
        bias[token] = 1000.0
        return replace(verified, logits=verified.logits + bias)

    def admit(self, *arguments: Any, **options: Any) -> Any:
        verified = self._target.admit(*arguments, **options)
        return self._force(verified, self._target.lengths[0])  # the token after the prompt is the first

    def verify(self, packed: Any) -> Any:
        length = self._target.lengths[0] + 1
        return self._force(self._target.verify(packed), length)


def test_an_answer_cannot_be_longer_than_the_longest(model: Model) -> None:
    with pytest.raises(InvalidArgument, match=r"^min_tokens=9: expected at most max_tokens, which is 8; raise that"):
        model.generate(PROMPT, max_tokens=8, min_tokens=9)
    with pytest.raises(InvalidArgument, match=r"^min_tokens=300: .* which is 256, as nothing else was asked for"):
        model.generate(PROMPT, min_tokens=300)
    assert len(model.generate(PROMPT, max_tokens=8, min_tokens=8).ids) == 8
