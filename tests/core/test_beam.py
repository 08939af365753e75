"""Beam search against a search in plain Python over the same weights, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from portadraft import backends
from portadraft.core.beam import beam_search
from portadraft.core.recurrent import RecurrentConfig

V, D = 23, 12


@pytest.fixture(scope="module", params=sorted(backends.REGISTRY))
def ops(request):
    missing = backends.REGISTRY[request.param].missing()
    if missing:
        pytest.skip(f"{request.param}: {', '.join(missing)} not installed")
    return backends.make_ops(request.param)


def silu(x):
    return x / (1 + np.exp(-x))


class Plain:
    """One row's drafter, one token at a time, by the formulas of the design."""

    def __init__(self, config, params, table, vocabulary):
        self.c, self.table, self.vocabulary = config, table.astype(np.float64), vocabulary
        self.p = {k: v.astype(np.float64) for k, v in params.items()}

    def first(self, root):
        e = self.table[root]
        if self.c.first_state == "embedding":
            return e
        return silu(self.p["rnn_w.weight"] @ e + self.p["rnn_u.bias"])

    def following(self, state, token):
        return silu(self.p["rnn_u.weight"] @ state + self.p["rnn_u.bias"] + self.p["rnn_w.weight"] @ self.table[token])

    def log_probabilities(self, state, hidden):
        x = np.concatenate([state, hidden])
        if self.c.inner_size != 2 * self.c.hidden_size:
            x = self.p["input_proj.weight"] @ x + self.p["input_proj.bias"]
        for i in range(self.c.blocks):
            x = x + silu(self.p[f"lm_head.{i}.linear.weight"] @ x + self.p[f"lm_head.{i}.linear.bias"])
        if self.c.tied_head:
            logits = self.p["head.weight"] @ (self.p["project.weight"] @ x)
            if "head.bias" in self.p:
                logits = logits + self.p["head.bias"]
        else:
            logits = self.p[f"lm_head.{self.c.blocks}.weight"] @ x
        logits = logits - logits.max()
        return logits - np.log(np.exp(logits).sum())

    def search(self, root, hidden, width, length):
        """[(tokens, scores)] of the `width` best sequences, best first."""
        beams = [([], [], self.first(root))]
        for step in range(length):
            extended = []
            for tokens, scores, state in beams:
                now = state if step == 0 else self.following(state, tokens[-1])
                for i, value in enumerate(self.log_probabilities(now, hidden)):
                    token = i if self.vocabulary is None else int(self.vocabulary[i])
                    extended.append(([*tokens, token], [*scores, (scores[-1] if scores else 0.0) + value], now))
            extended.sort(key=lambda beam: -beam[1][-1])
            beams = extended[:width]
        return [(tokens, scores) for tokens, scores, _ in beams]


CONFIGS = {
    "tied": {},
    "tied-bias": {"bias": True},
    "tied-draft-vocabulary": {"vocabulary": True, "bias": True},
    "tied-projected": {"inner_size": 16, "blocks": 1},
    "untied": {"tied_head": False},
    "untied-draft-vocabulary": {"tied_head": False, "vocabulary": True, "inner_size": 10, "blocks": 3},
    "embedding-first": {"first_state": "embedding"},
    "no-blocks": {"blocks": 0},
}


def build(bias=False, vocabulary=False, seed=0, **changes):
    generator = np.random.default_rng(seed)
    ids = np.asarray([3, 1, 22, 8, 9, 14, 0, 17, 5], dtype=np.int32) if vocabulary else None
    fields = {"hidden_size": D, "embedding_size": D, "inner_size": 2 * D, "blocks": 2, **changes}
    config = RecurrentConfig(**fields, vocabulary_size=len(ids) if vocabulary else V)
    shapes = dict(config.shapes())
    if config.tied_head:
        shapes["head.weight"] = (config.vocabulary_size, D)
        if bias:
            shapes["head.bias"] = (config.vocabulary_size,)
    params = {n: (generator.normal(size=s) * 1.3 / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    table = generator.normal(size=(V, D)).astype(np.float32)
    roots = np.asarray([4, 19, 0], dtype=np.int32)
    hidden = generator.normal(size=(3, D)).astype(np.float32)
    return config, params, table, ids, roots, hidden


def search(ops, case, width, length):
    config, params, table, ids, roots, hidden = case
    beam = beam_search(
        ops,
        config,
        {n: ops.asarray(v, "float32") for n, v in params.items()},
        ops.asarray(table, "float32"),
        ops.asarray(roots),
        ops.asarray(hidden, "float32"),
        width,
        length,
        None if ids is None else ops.asarray(ids),
    )
    assert ops.dtype(beam.tokens) == ops.dtype(beam.lengths) == "int32"
    assert ops.dtype(beam.scores) == "float32"
    assert (ops.to_numpy(beam.lengths) == length).all()
    return ops.to_numpy(beam.tokens), ops.to_numpy(beam.scores)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(("width", "length"), [(1, 1), (1, 5), (4, 1), (2, 3), (4, 4), (9, 3)])
def test_beam_search_equals_the_plain_one(ops, name, width, length):
    case = build(**CONFIGS[name])
    config, params, table, ids, roots, hidden = case
    tokens, scores = search(ops, case, width, length)
    assert tokens.shape == scores.shape == (3, width, length)
    plain = Plain(config, params, table, ids)
    for b in range(3):
        expected = plain.search(int(roots[b]), hidden[b].astype(np.float64), width, length)
        assert tokens[b].tolist() == [t for t, _ in expected]
        np.testing.assert_allclose(scores[b], [s for _, s in expected], rtol=1e-4, atol=1e-4)


def test_width_one_is_the_greedy_chain(ops):
    case = build(seed=4)
    config, params, table, ids, roots, hidden = case
    tokens, _ = search(ops, case, 1, 6)
    plain = Plain(config, params, table, ids)
    for b in range(3):
        state, chain = plain.first(int(roots[b])), []
        for _ in range(6):
            chain.append(int(np.argmax(plain.log_probabilities(state, hidden[b]))))
            state = plain.following(state, chain[-1])
        assert tokens[b, 0].tolist() == chain


def test_backends_agree():
    found = [name for name in sorted(backends.REGISTRY) if not backends.REGISTRY[name].missing()]
    for seed in range(5):
        case = build(seed=seed)
        results = [search(backends.make_ops(name), case, 5, 5)[0].tolist() for name in found]
        assert all(r == results[0] for r in results)


def test_the_hidden_state_and_the_root_matter(ops):
    """A negative control: other features or another root give another beam."""
    case = build()
    config, params, table, ids, roots, hidden = case
    tokens, _ = search(ops, case, 4, 4)
    assert (search(ops, (config, params, table, ids, roots, -hidden), 4, 4)[0] != tokens).any()
    assert (search(ops, (config, params, table, ids, roots[::-1].copy(), hidden), 4, 4)[0] != tokens).any()


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_scores_never_rise_along_a_candidate(ops, scale):
    """Not even by a rounding: the node budget would lose parents. Large logits and sure tokens are the hard case."""
    for seed in range(6):
        config, params, table, ids, roots, hidden = build(seed=seed)
        params = params | {"head.weight": params["head.weight"] * np.float32(scale)}
        _, scores = search(ops, (config, params, table, ids, roots, hidden), 5, 8)
        assert (scores <= 0).all()
        assert (scores[..., 1:] <= scores[..., :-1]).all()
