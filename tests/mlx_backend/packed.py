"""A packed pass compared with the stock model over each path alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from portadraft.backends.mlx.target import MlxTarget
from portadraft.core.types import PackedBeam
from portadraft.testing import Tree, pack_tree, random_tree, verdict_for


def plain(model: Any, ids: Sequence[int]) -> np.ndarray:
    """The stock model over a whole sequence with its own cache and none of our code: (V,) of the last position."""
    logits = model(mx.array([list(ids)]), cache=make_prompt_cache(model))
    return np.array(logits[0, -1].astype(mx.float32))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The greatest difference as a part of the spread of b; infinite for what is no number."""
    value = float(np.abs(a - b).max() / b.std())
    return value if np.isfinite(value) else float("inf")


def worst(
    model: Any, target: MlxTarget, packed: PackedBeam, trees: Sequence[Tree], texts: Sequence[list[int]]
) -> float:
    """The greatest distance of any living slot from its path alone."""
    logits = target.ops.to_numpy(target.verify(packed).logits)
    return max(
        distance(logits[b, slot], plain(model, text + tree.path_tokens(slot)))
        for b, (tree, text) in enumerate(zip(trees, texts, strict=True))
        for slot in range(len(tree.tokens))
    )


def greatest_error(model: Any, seed: int = 0) -> float:
    """Prefill two rows of different lengths, check a tree, commit paths, check another, and a plain step."""
    target = MlxTarget(model)
    vocabulary = target.facts.vocabulary_size
    rng = np.random.default_rng(seed)
    texts = [[int(t) for t in rng.integers(0, vocabulary, n)] for n in (13, 9)]
    first = target.ops.to_numpy(target.admit(texts).logits)
    error = max(distance(first[b, 0], plain(model, text)) for b, text in enumerate(texts))
    for slots in (7, 6):
        trees = [random_tree(rng, slots, vocabulary), random_tree(rng, slots - 2, vocabulary)]
        packed = pack_tree(target.ops, trees)
        error = max(error, worst(model, target, packed, trees, texts))
        paths = [tree.path(len(tree.tokens) - 1 - b) for b, tree in enumerate(trees)]
        verdict, counts, chosen = verdict_for(target.ops, packed, paths)
        target.commit(verdict, counts, chosen)
        texts = [t + [tree.tokens[s] for s in path] for t, tree, path in zip(texts, trees, paths, strict=True)]
    trees = [Tree((int(rng.integers(0, vocabulary)),), (0,)) for _ in texts]
    return max(error, worst(model, target, pack_tree(target.ops, trees), trees, texts))
