"""Never slower on real answers: the watched default on 18 answers of SmolLM2-135M-Instruct, and the same alone.

`data/acceptance_by_position.npz` holds, for each token of the answers (six prompts of the demonstration, twelve of
MT-Bench, at most 256 tokens, greedy, bfloat16), how many drafted tokens would be accepted after it: (1, 2) with 4
slots, (2, 3) and (4, 4) with 8, the shipped drafter with lookup. Costs are those of a small CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from portadraft.core.types import BeamShape
from portadraft.profiles.evidence import Evidence
from portadraft.profiles.governor import CREDIT, Governor
from portadraft.profiles.policy import FixedShape

from .test_governor import DEFAULT, PLAIN_S, cpu_step

FILE = Path(__file__).parent.parent / "data" / "acceptance_by_position.npz"
COLUMN = {BeamShape(1, 2, 3): 0, BeamShape(2, 3, 7): 1, DEFAULT: 2}


def answers() -> Iterator[np.ndarray]:
    with np.load(FILE) as file:
        counts, lengths = file["counts"], file["lengths"]
    yield from np.split(counts, np.cumsum(lengths)[:-1])


def seconds(answer: np.ndarray, policy: Governor | FixedShape, rng: np.random.Generator, most: int) -> float:
    """Of decoding at most so many tokens of an answer, with noise of 5 %."""
    at, total, end = 0, 0.0, min(most, len(answer))
    while at < end:
        shape = policy.choose(1)
        accepted = 0 if shape is None else min(int(answer[at, COLUMN[shape]]), end - 1 - at)
        took = cpu_step(shape) * float(np.exp(0.05 * rng.standard_normal()))
        policy.observe(1, shape, accepted + 1, took)
        total, at = total + took, at + accepted + 1
    return total


def over_all(most: int, seed: int, watched: bool) -> tuple[float, float]:
    """The speedup over plain decoding of all answers together, and the seconds that any lost, beyond 3 %, at most."""
    rng, evidence = np.random.default_rng(seed), Evidence()
    times, plain = [], []
    for answer in answers():
        aim = FixedShape(DEFAULT)
        times.append(seconds(answer, Governor(aim, evidence, trusted=True) if watched else aim, rng, most))
        plain.append(PLAIN_S * min(most, len(answer)))
    return sum(plain) / sum(times), max(t - 1.03 * p for p, t in zip(plain, times, strict=True))


@pytest.mark.parametrize("most", [96, 256])
def test_watching_the_default_costs_nothing(most: int) -> None:
    free = np.mean([over_all(most, seed, watched=False)[0] for seed in range(3)])
    watched = [over_all(most, seed, watched=True) for seed in range(6)]
    assert free > 1.3
    assert min(total for total, _ in watched) > 0.98 * free
    assert np.mean([total for total, _ in watched]) > free
    # What was gained before may be lost again, and a short text's first steps.
    assert max(lost for _, lost in watched) < CREDIT * PLAIN_S + 0.05
