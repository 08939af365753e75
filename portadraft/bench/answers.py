"""Whole answers of the decode loop, shapes in turns: what choices and predictions of the tuner are confirmed by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from portadraft.core.decode import Decoder
from portadraft.core.requests import Request
from portadraft.core.types import BeamShape
from portadraft.tuner.outcome import DrafterResult
from portadraft.tuner.run import Tuner

STRIDE = 7
"""Between the prompts of two rounds, so that they are of different kinds."""
_TOGETHER = 3


@dataclass(frozen=True)
class Decoded:
    """Whole answers of one round. tokens_per_s: over all rows, of the whole time. step_ms: a step, the slowest and
    quickest left out. plain_ms: such a step of plain decoding of the same prompts, decoded just before and just after.
    tokens_per_step: of a row.
    """

    tokens_per_s: float
    step_ms: float
    plain_ms: float
    tokens_per_step: float = 1.0


@dataclass(frozen=True)
class Once:
    """Answers decoded once. tokens_per_s: over all rows, of the whole time. step_ms: the mean of a step, one in six
    left out at either end: a hiccup of the machine is not the shape's. tokens_per_step: of a row.
    """

    tokens_per_s: float
    step_ms: float
    tokens_per_step: float


def decode_rounds(
    tune: Tuner,
    one: DrafterResult,
    shapes: Sequence[BeamShape | None],
    batch: int,
    rounds: int,
    tokens: int,
    end: float,
    say: Callable[[str], None],
) -> dict[BeamShape | None, list[Decoded]]:
    """Whole answers of the loop, all shapes in turns, plain decoding among every few of them: machines drift.

    The prompts of a round are the same for all shapes, and every round has others.
    """
    out: dict[BeamShape | None, list[Decoded]] = {s: [] for s in (None, *shapes)}
    drafted = [s for s in shapes if s is not None]
    for n in range(rounds):
        first = (n * batch * STRIDE) % len(tune.ids)
        ids = [tune.ids[(first + i) % len(tune.ids)] for i in range(batch)]
        order = drafted if n % 2 == 0 else drafted[::-1]
        before = decode_once(tune, one, ids, None, tokens)
        for i in range(0, max(len(order), 1), _TOGETHER):
            if time.monotonic() > end and n >= 2:
                return out
            group = [(s, decode_once(tune, one, ids, s, tokens)) for s in order[i : i + _TOGETHER]]
            after = decode_once(tune, one, ids, None, tokens)
            plain_ms = (before.step_ms + after.step_ms) / 2
            out[None].append(Decoded(after.tokens_per_s, after.step_ms, plain_ms))
            for shape, got in group:
                out[shape].append(Decoded(got.tokens_per_s, got.step_ms, plain_ms, got.tokens_per_step))
            before = after
        say(f"whole answers, round {n + 1} of {rounds}")
    return out


def decode_once(
    tune: Tuner, one: DrafterResult, ids: Sequence[Sequence[int]], shape: BeamShape | None, tokens: int
) -> Once:
    """After the first token, until a row has `tokens` of them (end tokens are passed over). The step that ends it is
    left out, as in replay: the limit cuts its tokens.
    """
    drafter = None if shape is None else one.drafter
    decoder = Decoder(tune.target, drafter, shape, temperature=tune.config.temperature)
    try:
        decoder.admit([Request(tuple(p), tokens, i) for i, p in enumerate(ids)])
        tune.target.ops.synchronize()
        count = 0
        times: list[float] = []
        while True:
            began = time.perf_counter()
            progress = decoder.step()
            tune.target.ops.synchronize()
            if decoder.live < len(ids) and times:  # a batch that has lost a row is another batch size
                break
            times.append(time.perf_counter() - began)
            count += sum(len(p.tokens) for p in progress)
        return Once(count / sum(times), 1000 * middle_mean(times), count / len(times) / len(ids))
    finally:
        decoder.close()


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the greatest and the least sixth. Steps of one shape differ (without a budget by their slots),
    so a median would not do.
    """
    left_out = len(values) // 6
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])
