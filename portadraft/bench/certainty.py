"""How sure a drafter is, against how often it is right: calibration and divergence by drafting step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.backends.torch.ops import TorchOps
from portadraft.core import recurrent
from portadraft.core.recurrent import RecurrentConfig
from portadraft.training.finish import Runnable
from portadraft.training.said import Said
from portadraft.tuner.recordings import Recording

BINS = 15
ROWS = 128
"""Positions at once."""


@dataclass(frozen=True)
class Calibration:
    """By drafting step 1 … T, given that the tokens before were right.

    ece: expected calibration error of the best guess's probability, 0 to 1; sure: its mean; right: how often it was
    the target's choice; divergence: mean KL in nats, of the drafter from the target's distribution at the
    temperature of the texts over the draft vocabulary (at 0: from its first choice there); positions: how many.
    """

    ece: list[float]
    sure: list[float]
    right: list[float]
    divergence: list[float]
    positions: list[int]


def calibration_of(
    config: RecurrentConfig,
    one: Runnable,
    recordings: Sequence[Recording],
    steps: int,
    temperature: float,
    said: Said | None = None,
) -> Calibration:
    """How far a drafter's probabilities are from what the target then says, at every position of its generations.

    recordings: generated at `temperature`. Step t is looked at where the tokens of the steps before it are in the
    draft vocabulary, since drafting gets nowhere else; a choice outside of it counts as wrong.
    """
    said = said or Said()
    sure: list[list[NDArray[np.float64]]] = [[] for _ in range(steps)]
    right: list[list[NDArray[np.bool_]]] = [[] for _ in range(steps)]
    divergence: list[list[NDArray[np.float64]]] = [[] for _ in range(steps)]
    device = one.table.device
    inverse = torch.full((one.table.shape[0],), -1, dtype=torch.int64, device=device)
    inverse[torch.from_numpy(one.vocabulary).long().to(device)] = torch.arange(len(one.vocabulary), device=device)
    for r in recordings:
        tokens = torch.from_numpy(np.asarray(r.tokens)).long().to(device)
        hidden = torch.as_tensor(np.asarray(r.hidden) if not isinstance(r.hidden, Tensor) else r.hidden)
        hidden = hidden.to(device, one.table.dtype)
        for start in range(0, len(tokens) - 1, ROWS):
            at = torch.arange(start, min(start + ROWS, len(tokens) - 1), device=device)
            _look(config, one, tokens, hidden, at, inverse, temperature, said, (sure, right, divergence))
    joined = [
        tuple(np.concatenate([*part[t], np.zeros(0)]) for part in (sure, right, divergence)) for t in range(steps)
    ]
    return Calibration(
        [expected_error(p, ok > 0) for p, ok, _ in joined],
        [_mean(p) for p, _, _ in joined],
        [_mean(ok) for _, ok, _ in joined],
        [_mean(kl) for _, _, kl in joined],
        [len(p) for p, _, _ in joined],
    )


def _look(
    config: RecurrentConfig,
    one: Runnable,
    tokens: Tensor,
    hidden: Tensor,
    at: Tensor,
    inverse: Tensor,
    temperature: float,
    said: Said,
    found: tuple[list[list[Any]], list[list[Any]], list[list[Any]]],
) -> None:
    """Add what is found at positions `at`, roots of drafts, to `found`: by step sure, right, divergence."""
    ops, bias = TorchOps(one.table.device), one.params.get("head.bias")
    with torch.no_grad():
        state = recurrent.first_state(ops, one.params, config, one.table[tokens[at]])
        for t in range(1, len(found[0]) + 1):
            inside = at + t < len(tokens)
            at, state = at[inside], state[inside]
            if not len(at):
                return
            read = recurrent.trunk(ops, one.params, config, state, hidden[at])
            log_q = torch.log_softmax(recurrent.head(ops, one.params, config, read).float(), -1)
            probability, guess = log_q.max(-1)
            true = inverse[tokens[at + t]]
            chosen_from = hidden[at + t - 1]
            z = said(torch.nn.functional.linear(chosen_from, one.params["head.weight"], bias).float())
            if temperature == 0:
                kl = -log_q.gather(1, z.argmax(-1, keepdim=True)).squeeze(1)
            else:
                log_p = torch.log_softmax(z / temperature, -1)
                kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            for part, values in zip(found, (probability.exp(), guess == true, kl), strict=True):
                part[t - 1].append(values.double().cpu().numpy())
            kept = true >= 0
            at, state = at[kept], state[kept]
            state = recurrent.next_state(ops, one.params, state, one.table[tokens[at + t]])


def expected_error(sure: NDArray[np.float64], right: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error (Guo et al. 2017): the mean gap between probability and frequency, over equal bins."""
    if not len(sure):
        return math.nan
    number = np.minimum((sure * bins).astype(np.int64), bins - 1)
    gaps = [abs(float(sure[number == b].sum() - right[number == b].sum())) for b in np.unique(number)]
    return sum(gaps) / len(sure)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan
