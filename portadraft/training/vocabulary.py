"""Which tokens the drafter may predict.

By what the target wrote, what texts hold, and what the target gave probability to: little text
counts rare tokens badly, and the target's own distributions know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.drafters.checkpoint import Checkpoint
from portadraft.errors import InvalidArgument
from portadraft.training.features import Features


def counts(sources: Sequence[Features], vocabulary_size: int) -> NDArray[np.float64]:
    """Weighted occurrences of each token: what the target said in full, given text by less; nothing held out."""
    out = np.zeros(vocabulary_size)
    for source in sources:
        for tokens, weight in source.counted():
            ids, number = np.unique(tokens, return_counts=True)
            out[ids] += number * weight
    return out


def mean_prediction(
    sources: Features | Sequence[Features],
    head: Tensor,
    bias: Tensor | None = None,
    sample: int = 40_000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """The target's distribution, averaged over a sample of positions; it sums to 1."""
    mean = np.zeros(head.shape[0])
    listed = [sources] if isinstance(sources, Features) else list(sources)
    total = sum(len(source.learned()) for source in listed)
    with torch.no_grad():
        for source in listed:
            share = max(1, round(sample * len(source.learned()) / max(total, 1)))
            seen = source.sample(share, seed)
            for i in range(0, len(seen), 256):
                hidden = seen[i : i + 256].to(head.device, head.dtype)
                logits = source.said(torch.nn.functional.linear(hidden, head, bias).float())
                mean += torch.softmax(logits, -1).sum(0, dtype=torch.float32).cpu().numpy()
    return mean / max(float(mean.sum()), 1e-300)


def score(occurrences: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a token is worth, (V,): its share of the occurrences plus its share of the predictions."""
    return occurrences / max(float(occurrences.sum()), 1.0) + mean


def choose(
    occurrences: NDArray[np.float64],
    mean: NDArray[np.float64],
    size: int,
    always: Iterable[int],
    among: NDArray[np.int32] | None = None,
    name: str = "draft_vocabulary",
) -> NDArray[np.int32]:
    """The `size` tokens with the greatest share of occurrences and predictions, ascending; `always` first.

    among: choose from these only. name: of the argument that `size` came from.

    Raises: InvalidArgument if size is outside 1…V (or what `among` holds) or cannot hold `always`.
    """
    worth = score(occurrences, mean)
    allowed = np.ones(len(worth), bool)
    if among is not None:
        allowed[:] = False
        allowed[among] = True
    fixed = sorted({int(i) for i in always if 0 <= int(i) < len(worth) and allowed[int(i)]})
    most = int(allowed.sum())
    if not max(1, len(fixed)) <= size <= most:
        whole = "the whole vocabulary" if among is None else "those that the drafter predicts"
        raise InvalidArgument(f"{name}={size}: expected {max(1, len(fixed))} to {most}, the special tokens and {whole}")
    worth[fixed] = np.inf
    worth[~allowed] = -np.inf
    return np.sort(np.argsort(-worth, kind="stable")[:size]).astype(np.int32)


def cut(checkpoint: Checkpoint, kept: NDArray[np.int32]) -> Checkpoint:
    """The same drafter for fewer tokens. kept: (V'',) target ids, ascending, all of which it predicts now.

    With a tied head only the list of tokens changes, for the rows are the target's own.

    Raises: InvalidArgument for a token that the drafter does not predict.
    """
    before = checkpoint.draft_vocabulary
    if before is None:
        before = np.arange(checkpoint.config.vocabulary_size, dtype=np.int32)
    rows = np.searchsorted(before, kept)
    inside = rows < len(before)
    if len(kept) == 0 or not inside.all() or (before[rows] != kept).any() or (np.diff(kept) <= 0).any():
        raise InvalidArgument(
            f"kept: expected ascending ids out of the {len(before)} tokens that the drafter predicts; "
            "choose them with `choose(…, among=checkpoint.draft_vocabulary)`"
        )
    config = replace(checkpoint.config, vocabulary_size=len(kept))
    params = dict(checkpoint.params)
    if not config.tied_head:
        name = f"lm_head.{config.blocks}.weight"
        params[name] = np.ascontiguousarray(params[name][rows])
    whole = len(kept) == checkpoint.identity.vocabulary_size
    return replace(checkpoint, config=config, params=params, draft_vocabulary=None if whole else kept.astype(np.int32))


def coverage(vocabulary: NDArray[np.int32], texts: Iterable[NDArray[np.int32]], vocabulary_size: int) -> float:
    """Share of the tokens of some texts that the vocabulary holds."""
    inside = np.zeros(vocabulary_size, bool)
    inside[vocabulary] = True
    tokens = np.concatenate([*texts, np.zeros(0, np.int32)])
    return float(inside[tokens].mean()) if len(tokens) else float("nan")
