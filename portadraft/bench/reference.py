"""The target's choice in float64 on the host, one position at a time, written to be read.

A second opinion on `portadraft.core.choice`, with which it shares no code: `verify` recomputes
choices with it where two passes disagree, and tests compare distributions with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.sampling import Sampling

Floats = NDArray[np.float64]


def choice(
    logits: Any,
    sampling: Sampling,
    uniform: float,
    *,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    end_tokens: Sequence[int] = (),
) -> int:
    """The token chosen after prompt and answer; logits (V,) are the model's own there, uniform in [0, 1)."""
    return _chosen(changed(logits, sampling, prompt=prompt, answer=answer, end_tokens=end_tokens), sampling, uniform)


def _chosen(x: Floats, sampling: Sampling, uniform: float) -> int:
    if sampling.greedy:
        return int(np.argmax(x))
    cdf = np.cumsum(filtered(x, sampling))
    kept = np.flatnonzero(np.diff(cdf, prepend=0.0) > 0)
    return int(kept[min(np.searchsorted(cdf[kept], uniform * cdf[-1], side="right"), len(kept) - 1)])


def explains(
    token: int,
    logits: Any,
    sampling: Sampling,
    uniform: float,
    *,
    edge: float = 0.0,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    end_tokens: Sequence[int] = (),
) -> bool:
    """Whether the token is what these logits choose.

    edge: 0 asks for the very choice. Above 0 it says by how much, as a share of all probability, a device without
    float64 may move edges between tokens and those of filters; a greedy token's logit may then lie that far below
    the best, as a share of the greatest logit's size.
    """
    x = changed(logits, sampling, prompt=prompt, answer=answer, end_tokens=end_tokens)
    if edge == 0:
        return _chosen(x, sampling, uniform) == token
    if sampling.greedy:
        return bool(x[token] >= x.max() - edge * np.abs(x[np.isfinite(x)]).max())
    for shift in (0.0, -edge, edge):
        near = replace(sampling, top_p=min(1.0, sampling.top_p + shift) if sampling.top_p < 1 else 1.0)
        near = replace(near, min_p=near.min_p * (1 - shift))
        low, high = _chosen(x, near, max(0.0, uniform - edge)), _chosen(x, near, min(1.0, uniform + edge))
        if low <= token <= high and filtered(x, near)[token] > 0:
            return True
    return False


def distribution(
    logits: Any,
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    end_tokens: Sequence[int] = (),
) -> Floats:
    """What the token is drawn from, (V,), summing to 1; sampling.temperature above 0."""
    return filtered(changed(logits, sampling, prompt=prompt, answer=answer, end_tokens=end_tokens), sampling)


def changed(
    logits: Any, sampling: Sampling, *, prompt: Sequence[int], answer: Sequence[int], end_tokens: Sequence[int]
) -> Floats:
    """The logits after penalties, bias and bans."""
    x = np.array(logits, dtype=np.float64)
    for token in {*prompt, *answer}:
        x[token] *= sampling.repetition_penalty if x[token] <= 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(answer).items():
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, value in dict(sampling.logit_bias).items():
        x[token] += value
    x[list(sampling.banned)] = -np.inf
    if len(answer) < sampling.min_tokens:
        x[[token for token in end_tokens if 0 <= token < len(x)]] = -np.inf
    return x


def filtered(x: Floats, sampling: Sampling) -> Floats:
    """Probabilities after temperature, top-k, top-p and min-p; equals are kept or dropped together."""
    p = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    if 0 < sampling.top_k < len(p):
        p[p < np.sort(p)[-sampling.top_k]] = 0
        p /= p.sum()
    least = sampling.min_p * p.max()
    if sampling.top_p < 1:
        falling = np.sort(p)[::-1]
        before = int(np.searchsorted(np.cumsum(falling), sampling.top_p))
        least = max(least, falling[min(before, len(p) - 1)])
    p[p < least] = 0
    return p / p.sum()
