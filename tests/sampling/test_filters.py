"""Filters and penalties against transformers' own processors, and by the rules that portadraft adds to them."""

from __future__ import annotations

import numpy as np
import pytest

from portadraft import backends
from portadraft.core.choice import Chooser, Situation
from portadraft.core.filters import weights
from portadraft.core.penalties import History
from portadraft.core.sampling import Sampling

V = 211


@pytest.fixture(scope="module", params=sorted(backends.REGISTRY))
def ops(request):
    missing = backends.REGISTRY[request.param].missing()
    if missing:
        pytest.skip(f"{request.param}: {', '.join(missing)} not installed")
    return backends.make_ops(request.param)


def random_logits(seed, rows=40, vocabulary=V):
    """Rows from flat to sharp."""
    generator = np.random.default_rng(seed)
    scales = np.geomspace(0.05, 12, rows)[:, None]
    return (generator.normal(0, 1, (rows, vocabulary)) * scales).astype(np.float32)


def ours(ops, logits, sampling, prompts=None, answers=None):
    """Probabilities after everything that `sampling` asks for, normalised, float64."""
    chooser = Chooser(ops, sampling, logits.shape[1])
    history = History.of(ops, sampling, [(prompt, []) for prompt in prompts or [[0]] * len(logits)], logits.shape[1])
    for step in range(len(answers[0]) if answers else 0):
        tokens = ops.asarray([answer[step] for answer in answers])
        if history is not None:
            history = history.after(ops, tokens, ops.full((len(answers),), 1, "bool"))
    x = chooser.processed(ops.asarray(logits, "float32"), Situation(), 0, history)
    p = ops.to_numpy(weights(ops, x, sampling)).astype(np.float64)
    return p / p.sum(axis=1, keepdims=True)


def theirs(logits, processors, ids):
    import torch

    x = torch.tensor(logits).double()
    for processor in processors:
        x = processor(torch.tensor(ids), x)
    return x.softmax(-1).numpy()


CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k above V": {"temperature": 1.0, "top_k": 5000},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p small": {"temperature": 1.0, "top_p": 0.01},
    "top_p large": {"temperature": 1.3, "top_p": 0.999},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "top_k, top_p": {"temperature": 1.0, "top_k": 30, "top_p": 0.8},
    "all filters": {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4},
    "repetition below 1": {"temperature": 1.0, "repetition_penalty": 0.7},
    "all": {"temperature": 0.7, "top_k": 80, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
            "logit_bias": {3: 2.5, 17: -4.0}, "banned": [5, 9]},
}  # fmt: skip


def transformers_processors(options):
    generation = pytest.importorskip("transformers.generation", reason="the torch extra is not installed")
    names = generation.logits_process
    made = []
    if "repetition_penalty" in options:
        made.append(names.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "logit_bias" in options:
        made.append(names.SequenceBiasLogitsProcessor({(k,): v for k, v in options["logit_bias"].items()}))
    if "banned" in options:
        made.append(names.SuppressTokensLogitsProcessor(options["banned"]))
    made.append(names.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        made.append(names.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        made.append(names.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        made.append(names.MinPLogitsWarper(options["min_p"]))
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_transformers(ops, name):
    options = CASES[name]
    logits = random_logits(len(name))
    generator = np.random.default_rng(1)
    ids = generator.integers(0, V, (len(logits), 12)).tolist()
    got = ours(ops, logits, Sampling(**options), [x[:5] for x in ids], [x[5:] for x in ids])
    expected = theirs(logits, transformers_processors(options), ids)
    np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-4)
    clear = (expected == 0) | (expected > 1e-30)
    assert ((got > 0) == (expected > 0))[clear].all()
    dropped = (expected == 0).mean()
    assert (dropped > 0.05) == any(k in options for k in ("top_k", "top_p", "min_p")) or name == "top_k above V"


def test_control_another_order_of_filters_is_noticed(ops):
    """top-p before top-k keeps other tokens: the equality above would see it."""
    options = CASES["top_k, top_p"]
    logits = random_logits(3)
    *others, top_k, top_p = transformers_processors(options)
    expected = theirs(logits, [*others, top_p, top_k], [[0]] * len(logits))
    got = ours(ops, logits, Sampling(**options))
    assert ((got > 0) != (expected > 0)).any()


def test_presence_and_frequency_look_at_the_answer_alone(ops):
    logits = random_logits(5, rows=3)
    prompts, answers = [[1, 2, 2], [3], [4]], [[7, 7, 8], [9, 9, 9], [1, 2, 3]]
    sampling = Sampling(1.0, presence_penalty=0.4, frequency_penalty=0.3)
    changed = logits.astype(np.float64)
    for row, answer in enumerate(answers):
        for token in set(answer):
            changed[row, token] -= 0.4 + 0.3 * answer.count(token)
    expected = np.exp(changed) / np.exp(changed).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ours(ops, logits, sampling, prompts, answers), expected, rtol=1e-5)


def test_the_order_of_penalties_and_bias(ops):
    """The repetition penalty's sign rule applies to the model's logit, not to what others made of it."""
    logits = np.asarray([[1.0, -1.0, 0.5, 0.0]], dtype=np.float32)
    sampling = Sampling(1.0, repetition_penalty=2.0, presence_penalty=1.5, logit_bias={1: 3.0})
    got = np.log(ours(ops, logits, sampling, [[1]], [[0]]))
    expected = np.asarray([[1.0 / 2 - 1.5, -1.0 * 2 + 3.0, 0.5, 0.0]])
    np.testing.assert_allclose(got - got[0, 3], expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.26}])
def test_equals_are_kept_or_dropped_together(ops, options):
    logits = np.asarray([[0.0, 2.0, 2.0, 2.0, -1.0, -1.0]], dtype=np.float32)
    kept = ours(ops, logits, Sampling(1.0, **options))[0] > 0
    assert kept.tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_likeliest_token_is_always_kept(ops, options):
    logits = random_logits(8, rows=60)
    p = ours(ops, logits, Sampling(0.7, **options))
    assert (p[np.arange(60), logits.argmax(axis=1)] > 0).all()
    assert ((p > 0).sum(axis=1) == 1).all()


def test_half_precision_logits_with_hundreds_of_equals(ops):
    logits = np.round(random_logits(9, rows=6, vocabulary=5000) * 8) / 8
    for options in ({"top_k": 50}, {"top_p": 0.9}):
        kept = ours(ops, logits, Sampling(1.0, **options)) > 0
        for row, mask in zip(logits, kept, strict=True):
            assert row[mask].min() > row[~mask].max()
            p = np.exp(row.astype(np.float64))
            p /= p.sum()
            if "top_p" in options:
                assert p[mask].sum() > 0.9 - 1e-5
                assert p[mask & (row > row[mask].min())].sum() < 0.9 + 1e-5
            else:
                assert mask.sum() >= 50 > (mask & (row > row[mask].min())).sum()


def test_a_row_does_not_depend_on_its_neighbours(ops):
    logits = random_logits(10, rows=8)
    sampling = Sampling(0.8, top_k=40, top_p=0.9, min_p=0.01)
    together = ours(ops, logits, sampling) > 0
    assert (together == np.concatenate([ours(ops, x[None], sampling) > 0 for x in logits])).all()


def test_history_of_a_row_that_does_not_go_on(ops):
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.1)
    history = History.of(ops, sampling, [([1], []), ([2], [])], 5)
    moved = history.after(ops, ops.asarray([3, 3]), ops.asarray([1, 0], "bool"))
    assert ops.to_numpy(moved.seen).tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]]
    assert ops.to_numpy(moved.counts).tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert ops.to_numpy(history.seen).tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]  # functional: the old one stays
    twice = moved.after(ops, ops.asarray([3, 0]), ops.asarray([1, 1], "bool")).rows(ops, ops.asarray([1, 0]))
    assert ops.to_numpy(twice.counts).tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 2, 0]]


def test_no_penalty_keeps_no_history(ops):
    assert History.of(ops, Sampling(0.7, top_p=0.9, banned=[1], min_tokens=2), [([1], [])], 5) is None
    only_counts = History.of(ops, Sampling(presence_penalty=1.0), [([1], [3, 3])], 5)
    assert only_counts.seen is None
    assert ops.to_numpy(only_counts.counts).tolist() == [[0, 0, 0, 2, 0]]


def test_devices_find_the_same_threshold_as_the_host():
    """The form that torch uses on GPUs, run here: it sorts, and sums whole numbers."""
    torch_ops = pytest.importorskip("portadraft.backends.torch.ops", reason="the torch extra is not installed")

    class Device(torch_ops.TorchOps):
        host = False

    logits = random_logits(11, rows=200, vocabulary=997)
    for share in (0.1, 0.5, 0.9, 0.99):
        sampling = Sampling(1.0, top_p=share)
        here, there = ours(torch_ops.TorchOps(), logits, sampling), ours(Device(), logits, sampling)
        assert ((here > 0) == (there > 0)).all(axis=1).mean() > 0.98  # rounding moves a threshold now and then
        np.testing.assert_allclose(here, there, atol=2e-3)
