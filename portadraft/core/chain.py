"""One sampled chain a row from the recurrent drafter, with the distributions that it was drawn from."""

from __future__ import annotations

from portadraft.core import recurrent
from portadraft.core.draw import draw
from portadraft.core.filters import weights
from portadraft.core.ops import Ops
from portadraft.core.recurrent import Parameters, RecurrentConfig
from portadraft.core.rejection import Chain
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array


def sample_chain(
    ops: Ops,
    config: RecurrentConfig,
    params: Parameters,
    embeddings: Array,
    roots: Array,
    hidden: Array,
    temperature: float,
    uniforms: Array,
    draft_vocabulary: Array | None = None,
) -> Chain:
    """Draw L tokens after each root, each from the drafter's distribution at `temperature`.

    embeddings: (V, E); roots: (B,) int32; hidden: (B, D), the state that chose the roots; uniforms:
    (B, L) from `draw.numbers`; draft_vocabulary: (V',) int32, the target's id of each drafter id, None
    where they are equal. temperature is above 0. Makes no host read.
    """
    batch, size = roots.shape[0], embeddings.shape[0]
    state = recurrent.first_state(ops, params, config, ops.take(embeddings, roots))
    ids = None
    if draft_vocabulary is not None:
        ids = ops.broadcast_to(draft_vocabulary[None, :], (batch, draft_vocabulary.shape[0]))
    tokens: list[Array] = []
    probabilities: list[Array] = []
    for step in range(uniforms.shape[1]):
        if step:
            state = recurrent.next_state(ops, params, state, ops.take(embeddings, tokens[-1]))
        logits = recurrent.head(ops, params, config, recurrent.trunk(ops, params, config, state, hidden))
        w = weights(ops, logits, Sampling(temperature))
        # A drafter that gives NaN drafts badly; whatever it names is then rejected.
        picks = ops.clip(draw(ops, w, uniforms[:, step]), 0, w.shape[1] - 1)
        q = w / w.sum(axis=1)[:, None]
        tokens.append(picks if draft_vocabulary is None else ops.take(draft_vocabulary, picks))
        probabilities.append(q if ids is None else ops.scatter(ops.full((batch, size), 0.0, ops.wide), ids, q, axis=1))
    return Chain(ops.stack(tokens, axis=1), ops.stack(probabilities, axis=1))
