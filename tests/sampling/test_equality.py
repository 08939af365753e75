"""Sampled with the same seed, drafted decoding gives plain decoding's text: the whole cross product on tiny models.

Rounding may let a choice fall the other way at the very edge of a token's probability (a tie);
such places are judged, counted over all tests of this file, and may be one in a thousand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import portadraft.core.accept as accept_module
import portadraft.core.decode as decode_module
from portadraft import backends
from portadraft.backends.numpy import NumpyTarget
from portadraft.bench.agreement import compare
from portadraft.core.decode import Decoder, Request
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter, PromptLookup
from portadraft.testing import random_redrafter

PHRASE = (5, 9, 2, 14, 7, 3)
PROMPTS = [(7,), PHRASE * 2, (1, 2, 3, 4, 5), (20, 21), (*PHRASE, 8, *PHRASE[:3]), (11, 5, 9)]
MOST = [5, 7, 6, 1, 4, 5]
ALONE = slice(1, 2)  # what runs through one slot; the batch of four holds it as well
SHAPES = [
    BeamShape(1, 1), BeamShape(1, 4), BeamShape(2, 2), BeamShape(3, 3), BeamShape(4, 4, 8), BeamShape(6, 2, 7),
]  # fmt: skip
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {3: 1.0},
             "banned": [2], "min_tokens": 3}  # fmt: skip
SAMPLINGS = [
    Sampling(temperature, top_p=top_p, **penalties)
    for temperature, top_p, penalties in itertools.product((0.7, 1.0), (1.0, 0.9), ({}, PENALTIES))
]
ENDS = [6, 30]
counted: Counter[str] = Counter()


def numpy_target():
    return NumpyTarget.random(1, vocabulary_size=40, hidden_size=16, layers=1)


def torch_target():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.6,
    )  # fmt: skip
    torch.manual_seed(0)
    return backends.get("torch").load().make_target(transformers.LlamaForCausalLM(config).eval())


def mlx_target():
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    from tests.mlx_backend import tiny

    return (
        backends.get("mlx").load().make_target(tiny.build("llama", num_hidden_layers=1, layer_types=["full_attention"]))
    )


@pytest.fixture(scope="module", params=["numpy", "torch", "mlx"])
def target(request):
    return {"numpy": numpy_target, "torch": torch_target, "mlx": mlx_target}[request.param]()


def run(target, drafter, shape, sampling, slots, some=slice(None), most=MOST):
    """All prompts through so many slots: a row that ends makes room for the next. Returns the texts."""
    decoder = Decoder(target, drafter, shape, sampling=sampling, end_tokens=ENDS)
    waiting = [Request(p, m, seed=300 + i) for i, (p, m) in enumerate(zip(PROMPTS, most, strict=True))][some]
    out: dict[int, list[int]] = {}
    while waiting or decoder.live:
        take = min(slots - decoder.live, len(waiting))
        news = decoder.admit([waiting.pop(0) for _ in range(take)])
        for progress in [*news, *decoder.step()]:
            out.setdefault(progress.key, []).extend(progress.tokens)
    return [out[key] for key in sorted(out)]


@pytest.fixture(scope="module")
def truth(target):
    """Plain decoding of each prompt alone, for each sampling."""
    return {s: run(target, None, None, s, 1) for s in SAMPLINGS}


def make(name, target, texts):
    if name == "lookup":
        return PromptLookup(target.ops, longest=3, shortest=1)
    if name == "random":
        return random_redrafter(target, 5, blocks=1)
    padded = {p: [*text, *[0] * 8] for p, text in zip(PROMPTS, texts, strict=True)}
    return OracleDrafter(target.ops, padded, target.facts.vocabulary_size, 0.75, seed=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["random", "oracle", "lookup"])
def test_drafted_equals_plain(target, truth, name, shape):
    for sampling, slots in itertools.product(SAMPLINGS, (1, 4)):
        some = ALONE if slots == 1 else slice(None)
        expected = truth[sampling][some]
        drafter = make(name, target, truth[sampling])
        got = run(target, drafter, shape, sampling, slots, some)
        counted["tokens"] += sum(map(len, expected))
        for i, (a, b) in enumerate(zip(got, expected, strict=True), start=some.start or 0):
            if a != b:
                judge(target, name, shape, sampling, i, f"{slots} slots")


def judge(target, name, shape, sampling, i, where):
    """A difference must be a tie, in a decoding of the prompt alone as well."""
    drafter = PromptLookup(target.ops, longest=3, shortest=1) if name == "oracle" else make(name, target, [])
    found = compare(
        target,
        drafter,
        PROMPTS[i],
        shape,
        sampling=replace(sampling, seed=300 + i),
        max_tokens=MOST[i],
        end_tokens=ENDS,
    )
    assert found.divergences, f"{name}, {shape}, {sampling}, {where}: differs only in a batch"
    assert not found.bugs, (name, shape, sampling, where, found.divergences)
    counted["ties"] += len(found.divergences)


def test_ties_are_rare():
    """Runs last in this file, over what the tests above have counted."""
    assert counted["ties"] <= counted["tokens"] / 1000


def test_plain_does_not_depend_on_the_batch(target, truth):
    for sampling in SAMPLINGS:
        assert run(target, None, None, sampling, 4) == truth[sampling]


def test_what_is_asked_for_matters(truth):
    """Each temperature, filter and penalty gives another text: the equality is not that of a constant."""
    texts = [str(x) for x in truth.values()]
    assert len(set(texts)) == len(texts)
    for sampling, answers in truth.items():
        if sampling.banned:
            assert all(2 not in text for text in answers)
            assert all(not set(ENDS) & set(text[:3]) for text in answers)


# negative controls

CONTROL = Sampling(1.0, top_p=0.9, repetition_penalty=2.5, frequency_penalty=1.5)
LONGER = [20] * len(PROMPTS)


def drafted(target):
    expected = run(target, None, None, CONTROL, 4, most=LONGER)
    return run(target, make("oracle", target, expected), BeamShape(4, 4, 8), CONTROL, 4, most=LONGER), expected


def test_control_nothing_broken():
    got, expected = drafted(numpy_target())
    assert got == expected


def test_control_a_history_without_the_walk(monkeypatch):
    """Every choice of a walk sees the history of its root only."""
    walk = accept_module.accept

    def blind(ops, packed, logits, chooser, situation):
        class Root:
            sampling, processors = chooser.sampling, chooser.processors

            def choose(self, logits, situation, depth, history):
                return chooser.choose(logits, situation, depth, situation.history)

        return walk(ops, packed, logits, Root(), situation)

    monkeypatch.setattr(decode_module, "accept", blind)
    got, expected = drafted(numpy_target())
    assert got != expected


def test_control_a_history_that_forgets_what_was_accepted(monkeypatch):
    walk = accept_module.accept

    def forgetful(ops, packed, logits, chooser, situation):
        verdict, _ = walk(ops, packed, logits, chooser, situation)
        return verdict, situation.history.after(ops, verdict.tokens[:, 0], np.ones(len(verdict.tokens), dtype=bool))

    monkeypatch.setattr(decode_module, "accept", forgetful)
    got, expected = drafted(numpy_target())
    assert got != expected


def test_control_one_uniform_for_a_whole_walk(monkeypatch):
    draw = decode_module.uniforms

    def reused(seeds, at, count, stream):
        return np.repeat(draw(seeds, at, 1, stream), count, axis=1)

    monkeypatch.setattr(decode_module, "uniforms", reused)
    got, expected = drafted(numpy_target())
    assert got != expected


def test_control_end_tokens_banned_by_the_roots_length(monkeypatch):
    """min_tokens counted at the root for the whole walk: an end comes too late, or not at all."""
    sampling = Sampling(1.0, min_tokens=3, logit_bias={6: 4.0})
    target = numpy_target()
    expected = run(target, None, None, sampling, 4)
    drafter = make("oracle", target, expected)
    assert run(target, drafter, BeamShape(2, 4), sampling, 4) == expected
    monkeypatch.setattr(
        decode_module.Situation, "ending", lambda self, depth: None if self.may_end is None else self.may_end[:, 0]
    )
    assert run(target, make("oracle", target, expected), BeamShape(2, 4), sampling, 4) != expected
