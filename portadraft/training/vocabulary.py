"""Which tokens the drafter may predict.

By what the target wrote, what texts hold, and what the target gave probability to: little text
counts rare tokens badly, and the target's own distributions know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.errors import InvalidArgument
from portadraft.training.features import KINDS, Features

TEXT_WEIGHT = 0.25


def counts(sources: Sequence[Features], vocabulary_size: int) -> NDArray[np.float64]:
    """Weighted occurrences of each token: answers in full, text by TEXT_WEIGHT; nothing held out."""
    out = np.zeros(vocabulary_size)
    for source in sources:
        for d, (start, answer, kind, held) in enumerate(source.documents):
            if held:
                continue
            own = KINDS[kind] == "answer"
            first = int(source.offsets[d]) + int(answer if own else start)
            ids, number = np.unique(source.tokens[first : source.offsets[d + 1]], return_counts=True)
            out[ids] += number * (1.0 if own else TEXT_WEIGHT)
    return out


def mean_prediction(
    source: Features, head: Tensor, bias: Tensor | None = None, sample: int = 40_000, seed: int = 0
) -> NDArray[np.float64]:
    """The target's distribution, averaged over a sample of positions; it sums to 1."""
    positions = [
        np.arange(source.offsets[d] + start, source.offsets[d + 1])
        for d, (start, _, _, held) in enumerate(source.documents)
        if not held
    ]
    at = np.concatenate([*positions, np.zeros(0, np.int64)])
    if len(at) > sample:
        at = np.sort(np.random.default_rng(seed).choice(at, sample, replace=False))
    mean = np.zeros(head.shape[0])
    with torch.no_grad():
        for i in range(0, len(at), 256):
            hidden = source.bits(at[i : i + 256]).to(head.device, head.dtype)
            logits = torch.nn.functional.linear(hidden, head, bias)
            mean += torch.softmax(logits.float(), -1).sum(0, dtype=torch.float32).cpu().numpy()
    return mean / max(float(mean.sum()), 1e-300)


def choose(
    occurrences: NDArray[np.float64], mean: NDArray[np.float64], size: int, always: Iterable[int]
) -> NDArray[np.int32]:
    """The `size` tokens with the greatest share of occurrences and predictions, ascending; `always` first.

    Raises: InvalidArgument if size is outside 1…V or cannot hold `always`.
    """
    fixed = sorted({int(i) for i in always if 0 <= int(i) < len(occurrences)})
    if not max(1, len(fixed)) <= size <= len(occurrences):
        raise InvalidArgument(
            f"draft_vocabulary={size}: expected {max(1, len(fixed))} to {len(occurrences)}, the special tokens "
            "and the whole vocabulary"
        )
    score = occurrences / max(float(occurrences.sum()), 1.0) + mean
    score[fixed] = np.inf
    return np.sort(np.argsort(-score, kind="stable")[:size]).astype(np.int32)


def coverage(vocabulary: NDArray[np.int32], texts: Iterable[NDArray[np.int32]], vocabulary_size: int) -> float:
    """Share of the tokens of some texts that the vocabulary holds."""
    inside = np.zeros(vocabulary_size, bool)
    inside[vocabulary] = True
    tokens = np.concatenate([*texts, np.zeros(0, np.int32)])
    return float(inside[tokens].mean()) if len(tokens) else float("nan")
