"""Rows whose state is kept and restored, shapes that change between steps, and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder, Request
from portadraft.core.logprobs import TokenLogprob, gather_logprobs, read_logprobs
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter, PromptLookup
from portadraft.errors import InvalidArgument
from portadraft.testing import decode, random_redrafter

V = 64
PROMPT = (5, 9, 2, 44, 17, 30, 5, 9)


@pytest.fixture
def target():
    return NumpyTarget.random(1, vocabulary_size=V)


@pytest.fixture(scope="module")
def answer():
    return decode(NumpyTarget.random(1, vocabulary_size=V), None, [Request(PROMPT, 40)])[0][0]


def run(decoder, requests):
    """Texts, and the last progress of each."""
    out, last = {}, {}
    news = decoder.admit(requests)
    while True:
        for progress in news:
            out.setdefault(progress.key, []).extend(progress.tokens)
            last[progress.key] = progress
        if not decoder.live:
            return [out[k] for k in sorted(out)], [last[k] for k in sorted(last)]
        news = decoder.step()


def oracle(target, answer):
    return OracleDrafter(target.ops, {PROMPT: answer}, V, 1.0)


# states


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize("drafted", [False, True])
def test_a_kept_state_holds_prompt_and_answer(target, answer, most, drafted):
    """Whether the end falls on the last token of a block, which is not in the cache, or inside the block."""
    decoder = Decoder(target, oracle(target, answer) if drafted else None, BeamShape(2, 3))
    (text,), (progress,) = run(decoder, [Request(PROMPT, most, keep=True)])
    assert text == answer[:most]
    whole = (*PROMPT, *text)
    inside = drafted and most % 4 != 1  # blocks end after 1, 5, 9 … tokens
    assert progress.state.ids == (whole if inside else whole[:-1])
    assert target.lengths == ()


@pytest.mark.parametrize("most", [1, 3, 4, 5, 6])
def test_decoding_goes_on_from_a_state_as_without_one(target, answer, most, monkeypatch):
    decoder = Decoder(target, oracle(target, answer), BeamShape(2, 3))
    (text,), (progress,) = run(decoder, [Request(PROMPT, most, keep=True)])
    longer = (*PROMPT, *text, 33, 34, 35)
    expected = decode(target, None, [Request(longer, 12)])[0]
    computed = []
    forward = NumpyTarget._forward

    def counted(self, row, tokens, depths, mask):
        computed.append(len(tokens))
        return forward(self, row, tokens, depths, mask)

    monkeypatch.setattr(NumpyTarget, "_forward", counted)
    for length in (len(progress.state.ids), 4, 0):
        computed.clear()
        got, _ = run(Decoder(target), [Request(longer, 12, prefix=(progress.state, length))])
        assert got == expected
        assert computed[0] == len(longer) - length


def test_rows_with_and_without_a_state_mix(target, answer):
    _, (progress,) = run(Decoder(target), [Request(PROMPT, 5, keep=True)])
    requests = [Request((1, 2), 9), Request((*PROMPT, 3), 9, prefix=(progress.state, len(PROMPT)), keep=True)]
    got, last = run(Decoder(target), requests)
    assert got == decode(target, None, [Request(r.ids, 9) for r in requests])[0]
    assert [p.state is None for p in last] == [True, False]


def test_a_state_of_another_prompt_is_refused_and_nothing_is_admitted(target):
    _, (progress,) = run(Decoder(target), [Request(PROMPT, 5, keep=True)])
    decoder = Decoder(target)
    with pytest.raises(InvalidArgument):
        decoder.admit([Request((1, 2, 3), 5, prefix=(progress.state, 2))])
    assert decoder.live == 0
    assert target.lengths == ()


@pytest.mark.parametrize("keep", [True, False])
def test_stop_hands_out_the_state_where_it_is_kept(target, answer, keep):
    decoder = Decoder(target, oracle(target, answer), BeamShape(2, 3))
    (first,) = decoder.admit([Request(PROMPT, 40, keep=keep)])
    decoder.step()
    assert decoder.stop(12345) is None
    state = decoder.stop(first.key)
    assert (None if state is None else state.ids) == ((*PROMPT, *answer[:4]) if keep else None)
    assert decoder.live == 0


def test_an_answer_that_goes_on_keeps_its_penalties_and_its_least_length(target):
    """`answered` ids are answer: decoding on gives the rest of the same text; as prompt they would not."""
    sampling = Sampling(1.0, frequency_penalty=2.0, presence_penalty=1.0, min_tokens=9, logit_bias={7: 6.0})

    def go(request):
        return run(Decoder(target, sampling=sampling, end_tokens=[7]), [request])[0][0]

    whole = go(Request(PROMPT, 20, seed=5))
    assert len(whole) >= 9
    for cut in (1, 4, 8):
        ids = (*PROMPT, *whole[:cut])
        assert go(Request(ids, 20 - cut, seed=5, answered=cut)) == whole[cut:]
    assert go(Request((*PROMPT, *whole[:8]), 12, seed=5)) != whole[8:]
    with pytest.raises(InvalidArgument, match="answered=9: expected 0 to 8"):
        go(Request(PROMPT, 5, answered=9))


# shapes


def test_the_shape_may_change_between_steps(target, answer):
    drafter = random_redrafter(target, 3)
    decoder = Decoder(target, drafter, BeamShape(4, 4))
    out, drafted = [], []
    news = decoder.admit([Request(PROMPT, 30)])
    shapes = [BeamShape(2, 3), None, BeamShape(1, 5), None, None, BeamShape(6, 2, 5)] * 6
    for shape in shapes:
        out.extend(t for p in news for t in p.tokens)
        if not decoder.live:
            break
        decoder.shape = shape
        news = decoder.step()
        drafted.append((shape is not None, news[0].drafted))
    assert out == answer[:30]
    assert all(a == b for a, b in drafted)
    assert len(set(drafted)) == 2


def test_a_drafter_observes_plain_steps(target, answer):
    decoder = Decoder(target, PromptLookup(target.ops, longest=2, shortest=1), BeamShape(1, 3))
    decoder.admit([Request(PROMPT, 30)])
    decoder.shape = None
    for _ in range(6):
        decoder.step()
    assert decoder.drafter._rows[0].ids == [*PROMPT, *answer[:7]]


def test_plain_from_the_start_needs_no_room_for_trees(target):
    decoder = Decoder(target, PromptLookup(target.ops), BeamShape(1, 3))
    decoder.shape = None
    assert run(decoder, [Request(PROMPT, 6)])[0] == decode(target, None, [Request(PROMPT, 6)])[0]


# log-probabilities


def expected_logprobs(target, prompt, text):
    """The model's own, teacher-forced in float64: (tokens, V)."""
    out = []
    for i in range(len(text)):
        logits = target.admit([(*prompt, *text[:i])]).logits[0, 0].astype(np.float64)
        target.release(0)
        out.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return np.asarray(out)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_are_the_models_own(target, drafted, top):
    """Before temperature, filters and penalties; one for each token; the best ones beside it, best first."""
    sampling = Sampling(0.8, top_k=5, repetition_penalty=1.5, banned=[3])
    prompts = [PROMPT, (1, 2)]
    requests = [Request(p, 11, seed=i) for i, p in enumerate(prompts)]
    drafter = random_redrafter(target, 3) if drafted else None
    decoder = Decoder(target, drafter, BeamShape(4, 3), sampling=sampling, logprobs=top)
    texts, found = {}, {}
    news = decoder.admit(requests)
    while news:
        for progress in news:
            assert len(progress.logprobs) == len(progress.tokens)
            texts.setdefault(progress.key, []).extend(progress.tokens)
            found.setdefault(progress.key, []).extend(progress.logprobs)
        news = decoder.step()
    assert list(texts.values()) == decode_with(target, sampling, requests)
    for key, prompt in enumerate(prompts):
        own = expected_logprobs(target, prompt, texts[key])
        for row, token, one in zip(own, texts[key], found[key], strict=True):
            assert one.token == token
            assert one.logprob == pytest.approx(row[token], abs=1e-5)
            best = np.argsort(-row)[:top].tolist()
            assert [i for i, _ in one.top] == best
            np.testing.assert_allclose([v for _, v in one.top], row[best], atol=1e-5)


def decode_with(target, sampling, requests):
    return run(Decoder(target, sampling=sampling), requests)[0]


def test_no_logprobs_unless_asked_for(target):
    _, (progress,) = run(Decoder(target), [Request(PROMPT, 3)])
    assert progress.logprobs is None


@pytest.mark.parametrize("bad", [-1, V + 1, True, 1.0, "3"])
def test_bad_logprobs(target, bad):
    with pytest.raises(InvalidArgument, match=f"^logprobs={bad!r}: expected how many alternatives to report, 0 to {V}"):
        Decoder(target, logprobs=bad)


def test_ids_beyond_float32s_whole_numbers_survive_the_read():
    ids, values = np.asarray([2**24 + 1, 2**31 - 1], dtype=np.int32), np.asarray([-0.1, -7.3], dtype=np.float32)
    packed = np.concatenate([values[:1].view(np.int32), ids, values.view(np.int32)])[None]
    (one,) = read_logprobs(packed, [5])
    pairs = ((2**24 + 1, pytest.approx(-0.1)), (2**31 - 1, pytest.approx(-7.3)))
    assert (one.token, one.logprob, one.top) == (5, pytest.approx(-0.1), pairs)


def test_packing_and_reading_are_inverse(target):
    ops = target.ops
    logits = np.random.default_rng(0).normal(0, 3, (4, 9)).astype(np.float32)
    tokens = [3, 0, 8, 8]
    packed = ops.to_numpy(gather_logprobs(ops, logits, ops.asarray(tokens), 2))
    assert packed.dtype == np.int32
    for row, token, one in zip(logits.astype(np.float64), tokens, read_logprobs(packed, tokens), strict=True):
        assert isinstance(one, TokenLogprob)
        assert one.logprob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-5)
        assert one.top[0][0] == row.argmax()
