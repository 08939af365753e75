"""Where the rest of the time budget goes: shapes that may be best are measured, until one is known to be.

A Gaussian process says what measurements mean for the other shapes (`surrogate`). The acquisition,
expected improvement of log tokens per second, is evaluated over the whole enumerated grid.
Plain decoding is measured in every round and is always a candidate. The winner is scored on
rounds that did not select it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from portadraft.core.types import BeamShape
from portadraft.tuner.machine import Machine, is_out_of_memory
from portadraft.tuner.measure import Disturbance
from portadraft.tuner.predict import Prediction
from portadraft.tuner.surrogate import Surrogate, expected_improvement

STEPS = 4
"""Steps of a shape in a turn."""
SCORE_ROUNDS = 5
_CANDIDATES = 150
_PROMISING = 0.7


@dataclass(frozen=True)
class Measured:
    """One turn of a shape within a round.

    ratio: log(measured ÷ predicted step cost), the same of plain decoding in that round taken off. step_ms: mean of the
    turn; plain_ms: of plain decoding in that round. tokens_per_s: over all rows, as it went (the acceptance is that of
    a few steps only).
    """

    shape: BeamShape | None
    round: int
    phase: Literal["search", "score"]
    ratio: float
    step_ms: float
    plain_ms: float
    tokens_per_s: float
    disturbed: bool = False


@dataclass
class Result:
    """What was found at one batch size.

    shape: None where plain decoding wins. tokens_per_s: of replayed acceptance at the measured step cost; plain and
    the spread (half the interquartile range ÷ median) from the scoring rounds. interrupted: by Ctrl-C; the best so far.
    """

    batch: int
    shape: BeamShape | None
    tokens_per_s: float
    plain_tokens_per_s: float
    spread: float
    tokens_per_step: float
    prediction: Prediction
    measured: list[Measured] = field(default_factory=list)
    too_large: int | None = None
    disturbed: bool = False
    interrupted: bool = False
    seconds: float = 0.0
    corrected: NDArray[np.float64] | None = None

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass
class Search:
    """One batch size's search on a machine. Run `run` once.

    turn: steps of a shape in a turn. most_rounds: after which the search ends though there is time left.
    """

    machine: Machine
    prediction: Prediction
    seconds: float
    clock: Callable[[], float] = time.perf_counter
    disturbance: Disturbance = field(default_factory=Disturbance)
    report: Callable[[str], None] = lambda text: None
    measured: list[Measured] = field(default_factory=list)
    too_large: int | None = None
    turn: int = STEPS
    most_rounds: int | None = None
    _round: int = 0
    _known: tuple[int, NDArray[np.float64], NDArray[np.float64]] | None = None
    _end: float | None = None
    _spent: float = 0.0
    _planned: float = 0.0

    def run(self, exhaustive: bool = False) -> Result:
        """Search, choose, score. Ctrl-C keeps what was found so far."""
        start = self.clock()
        end = start + self.seconds
        shapes = self.prediction.distinct()[: None if exhaustive else _CANDIDATES]
        most = max((self.prediction.table.kind.slots(s, True) for s in shapes), default=1)
        self._model = Surrogate(shapes, most)
        self._end = None if exhaustive else end
        self._pace()
        interrupted, chosen = False, None
        try:
            if exhaustive:
                self._measure_all(shapes)
            else:
                self._search(shapes, end)
            chosen = self._choose(shapes)
            self._score([chosen], end, exhaustive)
        except KeyboardInterrupt:
            interrupted = True
            chosen = self._choose(shapes)
        return self._result(chosen, shapes, start, interrupted)

    def _pace(self) -> None:
        """Fewer steps a turn on a device so slow that a round would take a large part of the time."""
        step_s = self.prediction.costs.plain_ms / 1000
        while self.turn > 1 and 12 * self.turn * step_s > self.seconds:
            self.turn -= 1

    def _takes(self, shapes: Sequence[BeamShape | None]) -> float:
        """Seconds that a round of these and plain decoding is expected to take, as rounds have gone so far."""
        slower = max(self._spent / self._planned, 1.0) if self._planned else 1.0
        return slower * self._plan(shapes)

    def _plan(self, shapes: Sequence[BeamShape | None]) -> float:
        """The same by prediction alone."""
        means, grid = self.prediction.tokens_per_step, self.prediction.table.grid
        drafted = [1000 * self.machine.batch * float(means[grid.index(s)]) / self.prediction.of(s) for s in shapes if s]
        return self.turn * (self.prediction.costs.plain_ms + sum(drafted)) / 1000

    # choosing

    def _posterior(self, shapes: Sequence[BeamShape]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """log tokens per second relative to plain decoding: mean and deviation at every shape."""
        if self._known is None or self._known[0] != len(self.measured):
            prior = np.array([math.log(self.prediction.of(s) / self.prediction.plain_tokens_per_s) for s in shapes])
            ratios: dict[BeamShape, list[float]] = {}
            for m in self.measured:
                if m.shape is not None and not m.disturbed:
                    ratios.setdefault(m.shape, []).append(m.ratio)
            mean, deviation = self._model.posterior(ratios)
            self._known = len(self.measured), prior - mean, deviation
        return self._known[1], self._known[2]

    def _fitting(self, shapes: Sequence[BeamShape]) -> NDArray[np.bool_]:
        kind = self.prediction.table.kind
        return np.array([self.too_large is None or kind.slots(s, True) < self.too_large for s in shapes])

    def _search(self, shapes: Sequence[BeamShape], end: float) -> None:
        first = self._spread(shapes)
        while shapes and (self.most_rounds is None or self._round < self.most_rounds):
            fitting = self._fitting(shapes)
            if not fitting.any():
                return
            mean, deviation = self._posterior(shapes)
            best = max(0.0, float(mean[fitting].max()))  # 0 is plain decoding
            gain = np.where(fitting, expected_improvement(mean, deviation, best), -1.0)
            if first:
                wanted, first = first[:4], first[4:]
            else:
                wanted = [shapes[i] for i in np.argsort(-gain)[:2] if gain[i] >= 0]
                top = shapes[int(np.where(fitting, mean, -np.inf).argmax())]
                if top not in wanted:
                    wanted.append(top)
            left = end - self.clock() - self._scoring(shapes)
            while wanted and self._takes(wanted) > left:
                wanted.pop()
            if not wanted:
                return
            self._measure(wanted, "search")
            champion = self._choose(shapes)
            self.report(f"best so far {_name(champion)}: {self._estimate(champion, shapes):.1f} tokens/s")

    def _spread(self, shapes: Sequence[BeamShape]) -> list[BeamShape]:
        """Where to begin: each width's best by prediction, so that a prediction which is wrong from some width on is
        found out at once.
        """
        best: dict[int, BeamShape] = {}
        for shape in shapes:  # best first
            best.setdefault(shape.width, shape)
        least = _PROMISING * self.prediction.of(shapes[0]) if shapes else 0.0
        return [s for s in best.values() if self.prediction.of(s) >= least]

    def _scoring(self, shapes: Sequence[BeamShape]) -> float:
        """Seconds to keep for the scoring rounds: for all of them, or a third of the time on a slow device."""
        one = 1.2 * self._takes(shapes[:1])
        return max(one, min((SCORE_ROUNDS + 1) * one, self.seconds / 3))

    def _choose(self, shapes: Sequence[BeamShape]) -> BeamShape | None:
        """The best by the posterior mean among shapes that were measured; None: plain."""
        if not shapes:
            return None
        mean, _ = self._posterior(shapes)
        tried = {m.shape for m in self.measured}
        allowed = [i for i, s in enumerate(shapes) if s in tried and self._fitting([s])[0]]
        if not allowed and not self.measured:
            return self.prediction.best()
        best = max(allowed, key=lambda i: mean[i], default=None)
        return shapes[best] if best is not None and mean[best] > 0 else None

    def _estimate(self, shape: BeamShape | None, shapes: Sequence[BeamShape]) -> float:
        plain = [m.plain_ms for m in self.measured if not m.disturbed]
        rate = self.machine.batch * 1000 / statistics.median(plain) if plain else self.prediction.plain_tokens_per_s
        if shape is None:
            return rate
        return rate * math.exp(float(self._posterior(shapes)[0][list(shapes).index(shape)]))

    # measuring

    def _measure_all(self, shapes: Sequence[BeamShape]) -> None:
        for turn in range(2):
            for i in range(0, len(shapes), 6):
                self._measure([s for s in shapes[i : i + 6] if self._fitting([s])[0]], "search")
                self.report(f"exhaustive, turn {turn + 1}: {i} of {len(shapes)}")

    def _score(self, chosen: Sequence[BeamShape | None], end: float, all_rounds: bool) -> None:
        wanted = [s for s in chosen if s is not None]
        for _ in range(SCORE_ROUNDS):
            if not all_rounds and self.clock() + self._takes(wanted) > end:
                return
            self._measure(wanted, "score")

    def _measure(self, shapes: Sequence[BeamShape], phase: Literal["search", "score"]) -> None:
        """One round: plain and every shape take turns, the order flips; a disturbed round is repeated once."""
        for attempt in range(2):
            done, disturbed = self.one_round(shapes, phase)
            self.measured.extend(done)
            if not disturbed:
                return
            late = self._end is not None and self.clock() + self._takes(shapes) > self._end
            again = attempt == 0 and not late
            self.report("the machine is busy: " + ("repeating the round" if again else "kept with a mark"))
            if not again:
                return

    def one_round(self, shapes: Sequence[BeamShape], phase: Literal["search", "score"]) -> tuple[list[Measured], bool]:
        self._round += 1
        order: list[BeamShape | None] = [None, *shapes]
        if self._round % 2 == 0:
            order.reverse()
        chunks: dict[BeamShape | None, tuple[float, float, float]] = {}
        plain: list[float] = []
        self.disturbance.begin()
        start = self.clock()
        for shape in order:
            self.report(f"trying {_name(shape)}")
            try:
                chunk = self.machine.steps(shape, self.turn)
            except Exception as error:
                if shape is None or not is_out_of_memory(error):
                    raise
                slots = self.prediction.table.kind.slots(shape, True)
                self.too_large = slots if self.too_large is None else min(self.too_large, slots)
                continue
            if shape is None:
                plain = list(chunk.ms)
            ratio = _trimmed([ms / self._expected(shape, n) for ms, n in zip(chunk.ms, chunk.slots, strict=True)])
            chunks[shape] = ratio, statistics.fmean(chunk.ms), chunk.tokens * 1000 / sum(chunk.ms)
        disturbed = self.disturbance.end(plain)
        if not disturbed:
            self._spent += self.clock() - start
            self._planned += self._plan(shapes)
        base, plain_ms = chunks[None][0], _trimmed(plain)
        return [
            Measured(s, self._round, phase, math.log(ratio / base), ms, plain_ms, rate, disturbed)
            for s, (ratio, ms, rate) in chunks.items()
        ], disturbed

    def _expected(self, shape: BeamShape | None, slots: int) -> float:
        """The predicted milliseconds of a step of which the slots are known."""
        costs = self.prediction.costs
        return costs.plain_ms if shape is None else costs.seen_ms(self.prediction.table.kind, shape, slots)

    # the result

    def _result(self, chosen: BeamShape | None, shapes: Sequence[BeamShape], start: float, interrupted: bool) -> Result:
        scored = [m for m in self.measured if m.phase == "score"]
        everything = scored or self.measured
        clean = [m for m in everything if not m.disturbed] or everything
        base = [m.plain_ms for m in clean if m.shape is None]
        plain = self.machine.batch * 1000 / statistics.median(base) if base else self.prediction.plain_tokens_per_s
        mine = [m for m in clean if m.shape == chosen]
        tokens = (
            1.0 if chosen is None else float(self.prediction.tokens_per_step[self.prediction.table.grid.index(chosen)])
        )
        # Against plain decoding within each round, so that drift between rounds does not count.
        gain = self.prediction.of(chosen) / self.prediction.plain_tokens_per_s
        rates = [plain * gain * math.exp(-m.ratio) for m in mine]
        rate = statistics.median(rates) if rates else plain * gain
        if chosen is not None and rates and rate <= plain and not interrupted:
            chosen, rate, tokens = None, plain, 1.0  # the scoring rounds say otherwise than the search
        if chosen is None:  # plain decoding against itself would have no spread
            rates = [self.machine.batch * 1000 / ms for ms in base]
        corrected = None
        if shapes and self.measured:
            corrected = np.full(self.prediction.table.grid.size, np.nan)
            for shape in self.prediction.distinct():  # what the search did not look at keeps its prediction
                rate_there = self.prediction.of(shape) / self.prediction.plain_tokens_per_s * plain
                corrected[self.prediction.table.grid.index(shape)] = rate_there
            mean, _ = self._posterior(shapes)
            for shape, value in zip(shapes, mean, strict=True):
                corrected[self.prediction.table.grid.index(shape)] = plain * math.exp(value)
        return Result(
            self.machine.batch,
            chosen,
            rate,
            plain,
            _spread(rates),
            tokens,
            self.prediction,
            self.measured,
            self.too_large,
            bool(everything) and statistics.fmean(m.disturbed for m in everything) > 0.25,
            interrupted,
            self.clock() - start,
            corrected,
        )


def _trimmed(values: Sequence[float]) -> float:
    """The mean without the slowest of the turn, if there are enough: one hiccup is no cost of the shape."""
    ordered = sorted(values)
    return statistics.fmean(ordered[:-1] if len(ordered) > 3 and ordered[-1] > 1.3 * ordered[-2] else ordered)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


def _name(shape: BeamShape | None) -> str:
    if shape is None:
        return "plain decoding"
    return f"{shape.width}x{shape.length}" + (f", {shape.nodes} slots" if shape.nodes else "")
