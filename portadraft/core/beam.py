"""Beam search over the recurrent drafter (paper section 3.1)."""

from __future__ import annotations

from portadraft.core import recurrent
from portadraft.core.ops import Ops
from portadraft.core.recurrent import Parameters, RecurrentConfig
from portadraft.core.types import Array, Beam


def beam_search(
    ops: Ops,
    config: RecurrentConfig,
    params: Parameters,
    embeddings: Array,
    roots: Array,
    hidden: Array,
    width: int,
    length: int,
    draft_vocabulary: Array | None = None,
) -> Beam:
    """The W best continuations of L tokens that the search finds.

    embeddings: (V, E), the target's table. roots: (B,) int32. hidden: (B, D), the target's
    state that chose the roots. width must not exceed the drafter's vocabulary.
    draft_vocabulary: (V',) int32, the target's id of each drafter id; None when they are equal.
    Scores are float32 sums of log-probabilities over the drafter's vocabulary. Every
    candidate is `length` long. Makes no host read.
    """
    *_, last = _search(ops, config, params, embeddings, roots, hidden, width, length, draft_vocabulary)
    return _beam(ops, *last)


def beam_search_lengths(
    ops: Ops,
    config: RecurrentConfig,
    params: Parameters,
    embeddings: Array,
    roots: Array,
    hidden: Array,
    width: int,
    length: int,
    draft_vocabulary: Array | None = None,
) -> list[Beam]:
    """What `beam_search` returns for 1, 2, … `length` tokens, all from one search.

    Each shorter result is a state that the longer search passes through. It is not a cut of the
    longest: that one has dropped candidates which were among the best when they were shorter.
    """
    states = _search(ops, config, params, embeddings, roots, hidden, width, length, draft_vocabulary)
    return [_beam(ops, *state) for state in states]


def _search(
    ops: Ops,
    config: RecurrentConfig,
    params: Parameters,
    embeddings: Array,
    roots: Array,
    hidden: Array,
    width: int,
    length: int,
    draft_vocabulary: Array | None,
) -> list[tuple[list[Array], list[Array]]]:
    """Tokens and scores by step, each (B, W) in the order of the candidates, after each step of the search."""
    batch = roots.shape[0]
    root_state = recurrent.first_state(ops, params, config, ops.take(embeddings, roots))
    scores, picks = _best(ops, _scores(ops, params, config, root_state[:, None], hidden[:, None]), width)
    tokens = picks if draft_vocabulary is None else ops.take(draft_vocabulary, picks)
    states = ops.broadcast_to(root_state[:, None], (batch, width, root_state.shape[-1]))
    wide_hidden = ops.broadcast_to(hidden[:, None], (batch, width, hidden.shape[-1]))
    history, history_scores = [tokens], [scores]
    passed = [(history, history_scores)]

    for _ in range(1, length):
        states = recurrent.next_state(ops, params, states, ops.take(embeddings, history[-1]))
        step = _scores(ops, params, config, states, wide_hidden)
        scores, parents, picks = _extend(ops, scores, step, width)
        tokens = picks if draft_vocabulary is None else ops.take(draft_vocabulary, picks)
        if width > 1:
            states = _rows(ops, states, parents)
            history = [ops.gather(x, parents, axis=1) for x in history]
            history_scores = [ops.gather(x, parents, axis=1) for x in history_scores]
        history, history_scores = [*history, tokens], [*history_scores, scores]
        passed.append((history, history_scores))
    return passed


def _beam(ops: Ops, history: list[Array], scores: list[Array]) -> Beam:
    batch, width = history[0].shape
    return Beam(
        tokens=ops.stack(history, axis=2),
        lengths=ops.full((batch, width), len(history), "int32"),
        scores=ops.stack(scores, axis=2),
    )


def _scores(ops: Ops, params: Parameters, config: RecurrentConfig, states: Array, hidden: Array) -> Array:
    """Float32 logits (B, W, V') for states (B, W, D)."""
    logits = recurrent.head(ops, params, config, recurrent.trunk(ops, params, config, states, hidden))
    return ops.cast(logits, "float32")


def _best(ops: Ops, logits: Array, width: int) -> tuple[Array, Array]:
    """The `width` likeliest of one distribution (B, 1, V'): log-probabilities and ids, (B, W) each."""
    values, picks = ops.top_k(logits, width)
    values = values - ops.logsumexp(logits, axis=-1)[..., None]
    return values[:, 0], picks[:, 0]


def _extend(ops: Ops, scores: Array, logits: Array, width: int) -> tuple[Array, Array, Array]:
    """The best `width` one-token extensions: their scores, parents and ids, (B, W) each.

    Only the `width` best of each beam can be among them, which keeps the second choice small.
    """
    batch = scores.shape[0]
    values, picks = ops.top_k(logits, width)
    # In this order: a log-probability never rounds above 0, so a score never rises along a candidate.
    values = scores[..., None] + (values - ops.logsumexp(logits, axis=-1)[..., None])
    best, flat = ops.top_k(values.reshape(batch, width * width), width)
    return best, flat // width, ops.gather(picks.reshape(batch, width * width), flat, axis=1)


def _rows(ops: Ops, x: Array, parents: Array) -> Array:
    """x (B, W, D) in the order of parents (B, W)."""
    batch, width, size = x.shape
    offsets = ops.arange(batch)[:, None] * width
    return ops.take(x.reshape(batch * width, size), (parents + offsets).reshape(-1)).reshape(batch, width, size)
