"""Joint distributions of three tokens against the exact ones: a toy target, 200,000 samples, chi-square.

The toy's next token depends on the last two. Everything between its logits and the text is
portadraft's own: packing, the walk (or rejection), filters, penalties, the draw.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from portadraft.backends.numpy import NumpyOps, NumpyTarget
from portadraft.bench import reference
from portadraft.bench.goodness import chi_square, total_variation
from portadraft.core.accept import accept
from portadraft.core.choice import Chooser, Situation
from portadraft.core.decode import Decoder, Request
from portadraft.core.draw import draw
from portadraft.core.penalties import History
from portadraft.core.rejection import Chain, accept_chain
from portadraft.core.sampling import Sampling
from portadraft.core.tree import pack_beam
from portadraft.core.types import Beam, BeamShape
from portadraft.core.uniforms import CHOICE, COIN, DRAFT, uniforms
from portadraft.testing import random_redrafter

V, SAMPLES, CHUNK = 8, 200_000, 50_000
PROMPT = (3, 5)
OPS = NumpyOps()
TARGET = np.random.default_rng(1).normal(0, 1.3, (V, V, V)).astype(np.float32)  # logits after (before, last)
DRAFTER = TARGET + np.random.default_rng(2).normal(0, 1.0, TARGET.shape).astype(np.float32)

SAMPLINGS = {
    "1.0": Sampling(1.0),
    "0.5": Sampling(0.5),
    "1.6, top-p": Sampling(1.6, top_p=0.8),
    "0.8, top-k, min-p": Sampling(0.8, top_k=5, min_p=0.1),
    "penalties": Sampling(1.0, top_p=0.9, repetition_penalty=1.5, frequency_penalty=0.7, logit_bias={2: 0.8}),
}


def exact(sampling):
    """The probability of every three tokens after the prompt, (V, V, V)."""
    joint = np.zeros((V, V, V))

    def after(answer):
        before, last = (*PROMPT, *answer)[-2:]
        return reference.distribution(TARGET[before, last], sampling, prompt=PROMPT, answer=answer)

    first = after([])
    for a in range(V):
        second = after([a])
        for b in range(V):
            joint[a, b] = first[a] * second[b] * after([a, b])
    return joint


class Simulation:
    """Many rows at once through draft, pack, verify and accept, as the decoder does it; each has its own seed."""

    def __init__(self, sampling, seeds):
        self.sampling, self.seeds = sampling, seeds
        self.chooser = Chooser(OPS, sampling, V)
        rows = len(seeds)
        self.out = np.zeros((rows, 3), dtype=np.int64)
        self.filled = np.zeros(rows, dtype=np.int64)
        self.before, self.root = np.full(rows, PROMPT[0]), np.full(rows, PROMPT[1])
        self.history = History.of(OPS, sampling, [(PROMPT, ())] * rows, V)

    def numbers(self, count, stream=CHOICE):
        return uniforms(self.seeds, len(PROMPT) + self.filled, count, stream)

    def run(self, step):
        logits = TARGET[self.before, self.root]
        token = self.chooser.choose(logits, Situation(self.numbers(1), None, self.history), 0, self.history)
        if self.history is not None:
            self.history = self.history.after(OPS, token, np.ones(len(token), dtype=bool))
        self.give(token[:, None], np.ones(len(token), dtype=np.int32))
        while self.filled.min() < 3:
            verdict, self.history = step(self)
            self.give(verdict.tokens, verdict.counts)
        return self.out

    def give(self, tokens, counts):
        for depth in range(tokens.shape[1]):
            rows = np.flatnonzero(depth < counts)
            wanted = rows[self.filled[rows] < 3]
            self.out[wanted, self.filled[wanted]] = tokens[wanted, depth]
            self.before[rows], self.root[rows] = self.root[rows], tokens[rows, depth]
            self.filled[rows] += 1


def walk(s):
    """A tree of three candidates that share prefixes, from whatever the context says."""
    rows, width, length = len(s.seeds), 3, 2
    mix = s.before[:, None, None] * 3 + s.root[:, None, None] * 5
    tokens = (mix + np.asarray([[0, 1], [0, 4], [6, 2]])[None]) % V
    scores = np.broadcast_to(-np.arange(1, length + 1, dtype=np.float32), (rows, width, length))
    beam = Beam(tokens.astype(np.int32), np.full((rows, width), length, dtype=np.int32), scores)
    packed = pack_beam(OPS, s.root.astype(np.int32), beam, 5)
    parents = np.take_along_axis(packed.tokens, packed.parents, axis=1)
    parents[:, 0] = s.before
    situation = Situation(s.numbers(length + 1), None, s.history)
    return accept(OPS, packed, TARGET[parents, packed.tokens], s.chooser, situation)


def rejection(s, temper=lambda q: q):
    """A chain of two sampled from another table, accepted by the classical rule."""
    length = 2
    numbers = s.numbers(length, DRAFT)
    before, last = s.before, s.root
    tokens, probabilities, logits = [], [], [TARGET[before, last]]
    for depth in range(length):
        q = DRAFTER[before, last] / s.sampling.temperature
        q = np.exp((q - q.max(axis=1, keepdims=True)).astype(np.float64))
        q /= q.sum(axis=1, keepdims=True)
        token = draw(OPS, q, numbers[:, depth])
        tokens.append(token)
        probabilities.append(temper(q))
        before, last = last, token
        logits.append(TARGET[before, last])
    chain = Chain(np.stack(tokens, axis=1), np.stack(probabilities, axis=1))
    situation = Situation(s.numbers(length + 1), None, s.history)
    return accept_chain(OPS, chain, np.stack(logits, axis=1), s.numbers(length, COIN), s.chooser, situation)


def counts_of(sampling, step, first_seed=0):
    counts = np.zeros((V, V, V), dtype=np.int64)
    for start in range(first_seed, first_seed + SAMPLES, CHUNK):
        out = Simulation(sampling, np.arange(start, start + CHUNK)).run(step)
        np.add.at(counts, tuple(out.T), 1)
    assert counts.sum() == SAMPLES
    return counts


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("step", [walk, rejection])
def test_three_tokens_have_the_exact_joint_distribution(step, name):
    sampling = SAMPLINGS[name]
    expected = exact(sampling)
    assert abs(expected.sum() - 1) < 1e-9
    counts = counts_of(sampling, step)
    statistic, degrees, p = chi_square(counts, expected)
    assert p > 0.001, (statistic, degrees, p)
    assert total_variation(counts, expected) < 0.03
    assert degrees > 20


# the test has power


@pytest.mark.parametrize("step", [walk, rejection])
def test_a_bias_of_two_percent_is_found(step):
    """In two of a hundred steps the first choice is token 0."""

    def biased(s):
        verdict, history = step(s)
        coin = np.random.default_rng(int(s.seeds[0])).random(len(s.seeds)) < 0.02
        tokens = np.where((np.arange(verdict.tokens.shape[1]) == 0) & coin[:, None], 0, verdict.tokens)
        return type(verdict)(tokens, np.where(coin, 1, verdict.counts), verdict.slots), history

    assert chi_square(counts_of(Sampling(1.0), biased), exact(Sampling(1.0)))[2] < 1e-6


def test_one_uniform_at_successive_positions_is_found(monkeypatch):
    monkeypatch.setattr(
        Simulation, "numbers", lambda s, count, stream=CHOICE: np.repeat(
            uniforms(s.seeds, np.full(len(s.seeds), 2), 1, stream), count, axis=1
        )
    )  # fmt: skip
    assert chi_square(counts_of(Sampling(1.0), walk), exact(Sampling(1.0)))[2] < 1e-6


def test_wrong_draft_probabilities_are_found():
    """Rejection by probabilities that the drafts were not drawn from."""

    def flatter(q):
        root = np.sqrt(q)
        return root / root.sum(axis=1, keepdims=True)

    counts = counts_of(Sampling(1.0), lambda s: rejection(s, flatter))
    assert chi_square(counts, exact(Sampling(1.0)))[2] < 1e-6


def test_rejection_of_beam_candidates_is_not_exact():
    """Why the walk exists: a drafter's best token is no sample of its distribution."""

    def best(s):
        drafted = DRAFTER[s.before, s.root].argmax(axis=1).astype(np.int32)
        q = np.exp(DRAFTER[s.before, s.root])
        q /= q.sum(axis=1, keepdims=True)
        logits = np.stack([TARGET[s.before, s.root], TARGET[s.root, drafted]], axis=1)
        chain = Chain(drafted[:, None], q[:, None])
        return accept_chain(OPS, chain, logits, s.numbers(1, COIN), s.chooser, Situation(s.numbers(2)))

    assert chi_square(counts_of(Sampling(1.0), best), exact(Sampling(1.0)))[2] < 1e-6


# through the decoder, with a real drafter


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_the_decoder_samples_two_tokens_after_the_first_as_the_target_says(acceptance):
    target = NumpyTarget.random(4, vocabulary_size=6, hidden_size=16, layers=1)
    drafter = random_redrafter(target, 1, blocks=1, draft_vocabulary=[0, 2, 3, 5])
    sampling = Sampling(1.3, top_p=0.95)
    rows = 3000
    decoder = Decoder(target, drafter, BeamShape(1, 2), sampling=sampling, acceptance=acceptance)
    progress = decoder.admit([Request(PROMPT, 3, seed=i) for i in range(rows)])
    texts = {p.key: list(p.tokens) for p in progress}
    accepted = 0
    while decoder.live:
        for p in decoder.step():
            texts[p.key].extend(p.tokens)
            accepted += len(p.tokens) > 1
    assert accepted > 100
    counts = np.zeros((6, 6, 6))
    np.add.at(counts, tuple(np.asarray(list(texts.values())).T), 1)
    assert chi_square(counts, joint(target, sampling, 6))[2] > 0.001


def joint(target, sampling, vocabulary):
    def after(answer):
        logits = target.admit([(*PROMPT, *answer)]).logits[0, 0]
        target.release(0)
        return reference.distribution(logits, sampling, prompt=PROMPT, answer=answer)

    out = np.zeros((vocabulary,) * 3)
    for a, b in itertools.product(range(vocabulary), repeat=2):
        out[a, b] = after([])[a] * after([a])[b] * after([a, b])
    return out


def test_chi_square_against_known_values():
    """Tables: the 0.05 and 0.001 points of 10 and 100 degrees of freedom."""
    for degrees, point, p in ((10, 18.307, 0.05), (10, 29.588, 0.001), (100, 124.342, 0.05), (100, 149.449, 0.001)):
        cells = degrees + 1
        shift = np.sqrt(point * 1000 / 2)
        counts = np.full(cells, 1000.0)
        counts[0] += shift
        counts[1] -= shift
        statistic, found, probability = chi_square(counts, np.full(cells, 1 / cells))
        assert found == degrees
        assert statistic == pytest.approx(point)
        assert probability == pytest.approx(p, rel=0.1)


def test_chi_square_pools_small_cells_and_sees_the_impossible():
    assert chi_square([10, 0, 90], [0.1, 0.001, 0.899])[1] == 1
    assert chi_square([1, 99], [0.0, 1.0])[2] == 0.0
    assert chi_square([100], [1.0])[2] == 1.0
