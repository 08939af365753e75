"""Speculative decoding gives what plain decoding gives, token for token, on the numpy target."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import portadraft.core.decode as decode_module
import portadraft.core.tree as tree_module
from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder, Request
from portadraft.core.types import BeamShape, Verdict
from portadraft.drafters import OracleDrafter, PromptLookup, Together
from portadraft.errors import InvalidArgument
from portadraft.testing import decode, random_redrafter

V = 64
SHAPES = [BeamShape(1, 1), BeamShape(1, 4), BeamShape(4, 4), BeamShape(4, 4, 8), BeamShape(8, 5)]
DRAFTERS = ["oracle-0", "oracle-0.5", "oracle-0.8", "oracle-1", "lookup", "redrafter", "together"]
PHRASE = (5, 9, 2, 44, 17, 30)
PROMPTS = [(7,), PHRASE * 3, (1, 2, 3, 4, 5), (60, 61), (*PHRASE, 8, *PHRASE[:4])]
MOST = [30, 17, 25, 1, 22]


@pytest.fixture
def target():
    return NumpyTarget.random(1, vocabulary_size=V)


def make(name, target, answers=None):
    kind, _, probability = name.partition("-")
    if kind == "oracle":
        return OracleDrafter(target.ops, answers, V, float(probability), seed=2)
    if kind == "lookup":
        return PromptLookup(target.ops, longest=3, shortest=1)
    if kind == "redrafter":
        return random_redrafter(target, 5)
    # A lookup that drafts further than the beam is long, as in `select`.
    deep = PromptLookup(target.ops, longest=3, shortest=1, length=7)
    parts = [make("redrafter", target), deep, make("oracle-0.6", target, answers)]
    return Together(target.ops, parts)


def requests(prompts=PROMPTS, most=MOST, seed=100):
    return [Request(p, m, seed=seed + i) for i, (p, m) in enumerate(zip(prompts, most, strict=True))]


def known(target, temperature=0.0, extra=12):
    """Plain decoding of every prompt, each alone, a little longer than asked for."""
    answers = {}
    for request in requests():
        longer = Request(request.ids, request.max_tokens + extra, request.seed)
        answers[request.ids] = decode(target, None, [longer], temperature=temperature)[0][0]
    return answers


@pytest.fixture(scope="module")
def truth():
    target = NumpyTarget.random(1, vocabulary_size=V)
    return {t: known(target, t) for t in (0.0, 0.7)}


# equality


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_in_a_plain_batch_equals_the_row_alone(target, truth, temperature):
    batch, _ = decode(target, None, requests(), temperature=temperature)
    assert batch == [truth[temperature][p][:m] for p, m in zip(PROMPTS, MOST, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculative_equals_plain(target, truth, name, shape, temperature):
    """A ragged batch whose rows finish at different times, prompts of one token among them."""
    answers = truth[temperature]
    expected = [answers[p][:m] for p, m in zip(PROMPTS, MOST, strict=True)]
    drafter = make(name, target, answers)
    got, reported = decode(target, drafter, requests(), shape, temperature=temperature)
    assert got == expected
    assert target.lengths == ()
    assert {p.finish for p in reported if p.finish} == {"length"}
    accepted = [p.accepted for p in reported if p.accepted is not None]
    if name == "oracle-1":
        assert set(accepted) == {shape.length}
    elif name == "oracle-0":
        assert set(accepted) == {0}
    else:
        assert all(0 <= a <= drafter.depth(shape) for a in accepted)


def test_a_drafted_row_alone_equals_the_row_in_a_batch(target, truth):
    for request, prompt, most in zip(requests(), PROMPTS, MOST, strict=True):
        drafter = make("oracle-0.8", target, truth[0.7])
        got, _ = decode(target, drafter, [request], BeamShape(4, 4), temperature=0.7)
        assert got == [truth[0.7][prompt][:most]]


def test_seeds_matter_only_when_sampling(target):
    def run(seed, temperature):
        return decode(target, None, requests(seed=seed), temperature=temperature)[0]

    assert run(1, 0.7) != run(50, 0.7)
    assert run(1, 0.0) == run(50, 0.0)


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(4, 4), BeamShape(4, 4, 8), BeamShape(8, 5)], ids=str)
def test_commits_of_every_length_occur(target, shape):
    prompts = [(i, i + 1) for i in range(6)]
    asked = [Request(p, 100) for p in prompts]
    plain, _ = decode(target, None, asked)
    oracle = OracleDrafter(target.ops, dict(zip(prompts, plain, strict=True)), V, 0.75, seed=3)
    got, reported = decode(target, oracle, asked, shape)
    assert got == plain
    histogram = Counter(p.accepted for p in reported if p.accepted is not None)
    assert set(histogram) == set(range(shape.length + 1)), histogram
    assert min(histogram.values()) >= 3, histogram


def test_the_accepted_path_is_not_always_a_run_of_slots(target, truth, monkeypatch):
    """What `commit` has to move: paths that skip slots, with other rows' paths beside them."""
    seen = []
    commit = NumpyTarget.commit

    def spy(self, verdict, counts, slots):
        seen.extend(tuple(row[:count]) for row, count in zip(slots, counts, strict=True))
        commit(self, verdict, counts, slots)

    monkeypatch.setattr(NumpyTarget, "commit", spy)
    drafter = make("oracle-0.8", target, truth[0.0])
    decode(target, drafter, requests(), BeamShape(4, 4))
    assert any(path != tuple(range(len(path))) for path in seen)


# negative controls: the equality above can fail


def drafted(target, truth):
    """Drafts that are often right, from a target whose attention matters."""
    got, _ = decode(target, make("oracle-0.8", target, truth[0.0]), requests(), BeamShape(4, 4))
    return got, [truth[0.0][p][:m] for p, m in zip(PROMPTS, MOST, strict=True)]


def test_control_nothing_broken(target, truth):
    got, expected = drafted(target, truth)
    assert got == expected


def test_control_wrong_mask(target, truth, monkeypatch):
    def all_earlier_slots(ops, parents, depth):
        batch, slots = parents.shape
        return np.broadcast_to(np.tril(np.ones((slots, slots), dtype=bool)), (batch, slots, slots))

    monkeypatch.setattr(tree_module, "tree_mask", all_earlier_slots)
    got, expected = drafted(target, truth)
    assert got != expected


def test_control_accepting_one_too_many(target, truth, monkeypatch):
    accept = decode_module.accept

    def generous(ops, packed, logits, *rest):
        verdict, history = accept(ops, packed, logits, *rest)
        counts = np.minimum(verdict.counts + 1, packed.length + 1)
        return Verdict(verdict.tokens, counts.astype(np.int32), verdict.slots), history

    monkeypatch.setattr(decode_module, "accept", generous)
    got, expected = drafted(target, truth)
    assert got != expected


def test_control_keys_not_moved(target, truth, monkeypatch):
    commit = NumpyTarget.commit

    def first_slots(self, verdict, counts, slots):
        commit(self, verdict, counts, [list(range(len(row))) for row in slots])

    monkeypatch.setattr(NumpyTarget, "commit", first_slots)
    got, expected = drafted(target, truth)
    assert got != expected


def test_control_positions_off_by_one(target, truth, monkeypatch):
    forward = NumpyTarget._forward

    def later(self, row, tokens, depths, mask):
        return forward(self, row, tokens, depths + (row.length > 0) * (depths > 0), mask)

    monkeypatch.setattr(NumpyTarget, "_forward", later)
    got, expected = drafted(target, truth)
    assert got != expected


def test_control_uniforms_not_keyed_by_position(target, truth, monkeypatch):
    uniforms = decode_module.uniforms
    monkeypatch.setattr(
        decode_module, "uniforms", lambda seeds, at, n, stream: uniforms(seeds, [0] * len(at), n, stream)
    )
    drafter = make("oracle-0.8", target, truth[0.7])
    got, _ = decode(target, drafter, requests(), BeamShape(4, 4), temperature=0.7)
    assert got != [truth[0.7][p][:m] for p, m in zip(PROMPTS, MOST, strict=True)]


# ends


@pytest.mark.parametrize("name", ["none", "oracle-1", "oracle-0.8", "together"])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 9])
def test_an_end_token_anywhere_in_a_block(target, truth, name, place):
    """The ids end with the end token, even where accepted tokens follow it in the block."""
    prompt = PROMPTS[0]
    plain = truth[0.0][prompt]
    end = plain[place]
    expected = plain[: plain.index(end) + 1]
    drafter = None if name == "none" else make(name, target, truth[0.0])
    got, reported = decode(target, drafter, [Request(prompt, 30)], BeamShape(4, 4), end_tokens=[end])
    assert got == [expected]
    assert reported[-1].finish == "end"
    assert reported[-1].tokens[-1] == end
    assert target.lengths == ()


@pytest.mark.parametrize("most", range(1, 13))
@pytest.mark.parametrize("name", ["none", "oracle-1", "redrafter"])
def test_max_tokens_at_every_place_of_a_block(target, truth, name, most):
    prompt = PROMPTS[2]
    drafter = None if name == "none" else make(name, target, truth[0.0])
    got, reported = decode(target, drafter, [Request(prompt, most)], BeamShape(2, 4))
    assert got == [truth[0.0][prompt][:most]]
    assert [p.finish for p in reported] == [None] * (len(reported) - 1) + ["length"]


def test_one_token_needs_no_step(target):
    decoder = Decoder(target)
    (progress,) = decoder.admit([Request((1, 2), 1)])
    assert (len(progress.tokens), progress.finish, progress.accepted, progress.drafted) == (1, "length", None, False)
    assert decoder.live == 0
    assert decoder.step() == []


@pytest.mark.parametrize("name", ["none", "oracle-1", "oracle-0.5", "together"])
@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(4, 4, 8), BeamShape(8, 5)], ids=str)
def test_the_context_limit(name, shape):
    """Rows fill the context to its last token, a shorter one beside them; the target refuses positions beyond."""
    target = NumpyTarget.random(1, vocabulary_size=V, context_limit=24)
    free = NumpyTarget.random(1, vocabulary_size=V)
    prompts = [(3, 1, 4), tuple(range(23)), tuple(range(18)), (9,)]
    asked = [Request(p, 100) for p in prompts]
    plain, _ = decode(free, None, [Request(p, 40) for p in prompts])
    answers = dict(zip(prompts, plain, strict=True))
    drafter = None if name == "none" else make(name, target, answers)
    got, reported = decode(target, drafter, asked, shape)
    assert got == [answers[p][: 24 - len(p)] for p in prompts]
    assert [p.finish for p in reported if p.finish] == ["context"] * 4
    if name == "oracle-1":
        drafted = {len(p.tokens) for p in reported if p.drafted}
        assert max(drafted) == shape.length + 1
        assert len(drafted) > 1  # close to the limit the tree is shallower


def test_max_tokens_comes_before_the_context_limit():
    target = NumpyTarget.random(1, vocabulary_size=V, context_limit=10)
    _, reported = decode(target, None, [Request((1, 2, 3), 7)])
    assert reported[-1].finish == "length"


# rows that come and go


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "oracle-0.8", "lookup", "together"])
def test_admission_while_others_are_live(target, truth, name, temperature):
    """One row now, more after some steps, into places that others have left."""
    answers = truth[temperature]
    drafter = None if name == "none" else make(name, target, answers)
    decoder = Decoder(target, drafter, BeamShape(4, 3), temperature=temperature)
    waiting, out, steps = requests(), {}, 0
    keys = {}
    while waiting or decoder.live:
        news = []
        if waiting and steps % 3 == 0:
            request = waiting.pop(0)
            (progress,) = decoder.admit([request])
            keys[progress.key] = request
            news.append(progress)
        news.extend(decoder.step())
        for progress in news:
            out.setdefault(progress.key, []).extend(progress.tokens)
        steps += 1
    assert len(set(keys)) == len(PROMPTS)
    for key, request in keys.items():
        assert out[key] == answers[request.ids][: request.max_tokens]
    assert target.lengths == ()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_stop_ends_one_row_and_leaves_the_others(target, truth, place):
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[4]]
    decoder = Decoder(target, make("together", target, truth[0.0]), BeamShape(3, 3))
    first = decoder.admit([Request(p, 20) for p in prompts])
    out = {p.key: list(p.tokens) for p in first}
    keys = [p.key for p in first]
    for progress in decoder.step():
        out[progress.key].extend(progress.tokens)
    decoder.stop(keys[place])
    decoder.stop(keys[place])  # a second time, and unknown keys: ignored
    decoder.stop(12345)
    assert decoder.live == 2
    while decoder.live:
        for progress in decoder.step():
            assert progress.key != keys[place]
            out[progress.key].extend(progress.tokens)
    for i, prompt in enumerate(prompts):
        expected = truth[0.0][prompt][:20]
        assert out[keys[i]] == expected[: len(out[keys[i]])]
        assert i == place or len(out[keys[i]]) == 20


def test_close_frees_the_target_for_the_next(target, truth):
    drafter = make("together", target, truth[0.0])
    decoder = Decoder(target, drafter, BeamShape(3, 3))
    decoder.admit([Request(p, 20) for p in PROMPTS[:3]])
    decoder.step()
    with pytest.raises(InvalidArgument, match="target: 3 of its rows are in use"):
        Decoder(target)
    decoder.close()
    assert decoder.live == 0
    assert target.lengths == ()
    decoder.close()
    got, _ = decode(target, drafter, requests(), BeamShape(3, 3))  # target and drafter are as new
    assert got == [truth[0.0][p][:m] for p, m in zip(PROMPTS, MOST, strict=True)]


def test_progress_counts_what_was_accepted(target, truth):
    """accepted + 1 tokens come out of a whole step; None for the prefill's token and for a cut step."""
    prompt = PROMPTS[2]
    drafter = make("oracle-1", target, truth[0.0])
    _, reported = decode(target, drafter, [Request(prompt, 13)], BeamShape(2, 4))
    assert [(len(p.tokens), p.accepted, p.drafted) for p in reported] == [
        (1, None, False),
        (5, 4, True),
        (5, 4, True),
        (2, None, True),
    ]
    _, reported = decode(target, drafter, [Request(prompt, 11)], BeamShape(2, 4))
    assert [p.accepted for p in reported] == [None, 4, 4]  # ends with a block: that step is whole
    _, reported = decode(target, None, [Request(prompt, 4)])
    assert [(p.accepted, p.drafted) for p in reported] == [(None, False), (0, False), (0, False), (0, False)]


def test_a_drafter_without_an_idea_gives_a_plain_step(target):
    (plain,), _ = decode(target, None, [Request((1, 2, 3), 10)])

    class Silent(PromptLookup):
        def draft(self, roots, features, shape):
            return None

    got, reported = decode(target, Silent(target.ops), [Request((1, 2, 3), 10)], BeamShape(2, 2))
    assert got == [plain]
    assert not any(p.drafted for p in reported)


def test_profile_times_every_stage(target, truth):
    decoder = Decoder(target, make("oracle-0.8", target, truth[0.0]), BeamShape(2, 2), profile=True)
    decoder.admit([Request(PROMPTS[2], 8)])
    steps = 0
    while decoder.live:
        decoder.step()
        steps += 1
    assert decoder.times.steps == steps
    assert set(decoder.times.seconds) == {"prefill", "draft", "pack", "verify", "accept", "commit", "observe"}
    assert min(decoder.times.seconds.values()) > 0
    assert Decoder(target).times is None


# errors


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "prompt: it has no tokens"),
        (Request((1,), 0), "max_tokens=0: expected an integer of at least 1"),
        (Request((1,), -3), "max_tokens=-3"),
        (Request(tuple([1] * 16), 5), "prompt: 16 tokens, but the model's context holds 16"),
        (Request(tuple([1] * 40), 5), "prompt: 40 tokens"),
        (Request((1, 64), 5), "token id 64 is outside the vocabulary"),
        (Request((-1, 2), 5), "token id -1 is outside the vocabulary"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_admitted(request_, message):
    target = NumpyTarget.random(1, vocabulary_size=V, context_limit=16)
    decoder = Decoder(target)
    with pytest.raises(InvalidArgument, match=message):
        decoder.admit([Request((1, 2), 3), request_])
    assert decoder.live == 0
    assert target.lengths == ()


def test_no_requests(target):
    assert Decoder(target).admit([]) == []


def test_a_drafter_that_refuses_a_prompt_leaves_nothing_behind(target, truth):
    """The oracle knows no answer to the second prompt: the first is not admitted either, and all can go on."""
    decoder = Decoder(target, make("oracle-1", target, truth[0.0]), BeamShape(2, 2))
    (live,) = decoder.admit([Request(PROMPTS[0], 9)])
    with pytest.raises(InvalidArgument, match="the oracle has no answer"):
        decoder.admit([Request(PROMPTS[2], 9), Request((50, 51, 52), 9)])
    assert decoder.live == 1
    assert len(target.lengths) == 1
    out = list(live.tokens)
    while decoder.live:
        for progress in decoder.step():
            out.extend(progress.tokens)
    assert out == truth[0.0][PROMPTS[0]][:9]
    assert target.lengths == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width=0: expected an integer of at least 1"),
        ({"length": 0}, "length=0"),
        ({"length": -1}, "length=-1"),
        ({"nodes": 1}, r"nodes=1: expected an integer of at least 2 \(slot 0 is the root"),
        ({"nodes": 0}, "nodes=0"),
        ({"width": True}, "width=True"),
        ({"length": 2.0}, "length=2.0"),
    ],
)
def test_a_bad_shape_is_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        BeamShape(**fields)


def test_a_beam_wider_than_the_draft_vocabulary_is_refused(target):
    drafter = random_redrafter(target, draft_vocabulary=[1, 2, 3])
    decoder = Decoder(target, drafter, BeamShape(4, 2))
    with pytest.raises(InvalidArgument, match="width=4: the drafter predicts only 3 tokens"):
        decoder.admit([Request((1, 2), 5)])  # before anything is computed or shown
    assert target.lengths == ()
    assert decoder.live == 0
