"""Never slower: drafting goes on only while it pays, measured step by step against plain decoding.

A governor stands between what a profile or a default proposes and the decode loop. It knows what
a plain step costs here, from plain steps themselves, and keeps the balance of every call: the
plain steps that drafted tokens saved, less the time that drafting took. Rules:

- A shape whose expected time exceeds L + 1 plain steps, all that it could ever save, is not run.
- What was measured on this machine is begun with as soon as two plain steps and two of (1, 2) have
  shown what steps cost. Anything else begins at (1, 2) and widens, rung by rung, as the narrower one pays.
- Once the balance is lower than 2 % of the time so far (and an allowance for the first steps),
  decoding goes on plainly, with probes of the smallest shape, each twice as rare as the one before.

What was learned is kept with the model, by number of rows, for its next call. Nothing here
touches the device or the text.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from portadraft.core.types import BeamShape
from portadraft.profiles.policy import ShapePolicy

LOSS = 0.02
"""The share of the time so far that drafting may have lost."""
ALLOWANCE_S = 0.03
"""What it may have lost besides, seconds: so that the first bad step of a text does not end drafting."""
BASELINE = 2
"""Plain steps that are measured before anything is drafted, and smallest steps before anything larger."""
REFRESH = 128
"""Drafted steps after which one is decoded plainly, since contexts grow and machines drift."""
TRIAL = 4
"""Steps on a rung, at least, before the next one is tried."""
WINDOW = 24
"""Steps that a verdict on a shape takes."""
FIRST_REST, LONGEST_REST = 8, 512
"""Plain steps between two probes: the first time, and at most."""
FIRST_BAR, LONGEST_BAR = 64, 1024
"""Drafted steps for which a rung that lost is not entered again: the first time, and at most."""


@dataclass
class Steps:
    """The newest steps of one kind: seconds, and tokens per row."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float, tokens: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per row and second."""
        return sum(self.tokens) / max(sum(self.seconds), 1e-12)


@dataclass
class Standing:
    """Where drafting stands for about so many rows: the rung it is on, and how long it rests."""

    rung: int
    rest: int = 0
    backoff: int = FIRST_REST
    ceiling: int | None = None  # no rung above it, for the next `barred` drafted steps
    barred: int = 0
    bar: int = FIRST_BAR
    visit: int = 0  # steps since this rung was entered
    visit_gain: float = 0.0  # seconds
    drafted: int = 0  # steps since the last plain one


class Evidence:
    """What steps cost and gave, by number of rows. One object serves all calls of a model with a drafter."""

    def __init__(self) -> None:
        self.plain: dict[int, Steps] = {}
        self.shapes: dict[tuple[int, BeamShape], Steps] = {}
        self.standing: dict[tuple[int, bool, BeamShape], Standing] = {}

    def plain_s(self, live: int) -> float | None:
        """Seconds of a plain step of so many rows: measured, else read between or beside the sizes that were."""
        own = self.plain.get(live)
        if own is not None and len(own.seconds) >= BASELINE:
            return own.median
        known = sorted(n for n, steps in self.plain.items() if len(steps.seconds) >= BASELINE)
        below = [n for n in known if n < live]
        above = [n for n in known if n > live]
        if below and above:
            low, high = self.plain[below[-1]].median, self.plain[above[0]].median
            return low + (high - low) * (live - below[-1]) / (above[0] - below[-1])
        if above:
            return self.plain[above[0]].median
        return None

    def shape_s(self, live: int, shape: BeamShape, plain_s: float) -> float | None:
        """Seconds that a step of a shape is expected to take: from its own steps, else by slots from another's.

        What other numbers of rows have shown counts in plain steps of theirs.
        """
        own = self.shapes.get((live, shape))
        if own is not None and own.seconds:
            return own.median
        others = []
        for (rows, other), steps in self.shapes.items():
            theirs = self.plain_s(rows)
            if theirs and len(steps.seconds) >= BASELINE:
                others.append((rows == live, other == shape, other.slots(), steps.median / theirs))
        if not others:
            return None
        _, _, slots, cost = max(others)
        return plain_s * (1 + max(cost - 1, 0.0) * (shape.slots() - 1) / max(slots - 1, 1))


def ladder(aim: BeamShape) -> tuple[BeamShape, ...]:
    """From (1, 2) to the shape aimed at, each rung wider or longer than the one below and within the aim."""
    rungs: list[BeamShape] = []
    for width, length in ((1, 2), (2, 3), (4, 4), (8, 4)):
        if width >= aim.width and length >= aim.length:
            break
        width, length = min(width, aim.width), min(length, aim.length)
        nodes = None if aim.nodes is None else min(aim.nodes, 1 + width * length)
        rung = BeamShape(width, length, nodes if nodes is None or nodes >= 2 else 2)
        if rung not in rungs and rung.slots() < aim.slots():
            rungs.append(rung)
    return (*rungs, aim)


class Governor:
    """A shape policy that follows another one while drafting pays.

    aim: what is proposed. trusted: whether it was measured on this machine (or asked for), so that it is begun with.
    evidence: of earlier calls of the same model and drafter; it is added to.
    """

    def __init__(self, aim: ShapePolicy, evidence: Evidence, *, trusted: bool = False) -> None:
        self.aim, self.evidence, self.trusted = aim, evidence, trusted
        self.elapsed_s = 0.0
        self.balance_s = 0.0
        self.stops = 0

    # the policy

    def widest(self) -> BeamShape | None:
        return self.aim.widest()

    def choose(self, live: int) -> BeamShape | None:
        aim = self.aim.choose(live)
        if aim is None:
            return None
        plain_s = self.evidence.plain_s(live)
        if plain_s is None:
            return None
        at = self._standing(live, aim)
        if at.rest > 0 or at.drafted >= REFRESH or self._overdrawn():
            return None
        rungs = ladder(aim)
        if rungs[1:] and all(self.evidence.shape_s(live, other, plain_s) is None for other in rungs[1:]):
            return rungs[0]  # the cheapest steps say what others will about cost, before any is taken
        at.rung = min(at.rung, len(rungs) - 1)
        if self._could_pay(live, rungs[at.rung], plain_s):
            return rungs[at.rung]
        if at.rung > 0:
            self._bar(at)
            self._enter(at, 0)
            if self._could_pay(live, rungs[0], plain_s):
                return rungs[0]
        self._rest(at)
        return None

    def _could_pay(self, live: int, shape: BeamShape, plain_s: float) -> bool:
        """Whether a step is expected to take no longer than the L + 1 plain ones that it saves at best."""
        expected = self.evidence.shape_s(live, shape, plain_s)
        return expected is None or expected <= (shape.length + 1) * plain_s

    def observe(self, live: int, shape: BeamShape | None, tokens: int, seconds: float) -> None:
        aim = self.aim.choose(live)
        self.elapsed_s += seconds
        at = None if aim is None else self._standing(live, aim)
        if shape is None:
            self.evidence.plain.setdefault(live, Steps()).add(seconds, tokens / live)
            if at is not None:
                at.rest, at.drafted = max(at.rest - 1, 0), 0
            return
        steps = self.evidence.shapes.setdefault((live, shape), Steps())
        # A disturbed step says nothing about the shape: it counts as a slow one, not as a thousand.
        counted = min(seconds, 4 * steps.median) if len(steps.seconds) >= TRIAL else seconds
        steps.add(seconds, tokens / live)
        plain_s = self.evidence.plain_s(live)
        if at is None or aim is None or plain_s is None:
            return
        gain = tokens / live * plain_s - counted
        self.balance_s += gain
        at.visit, at.visit_gain, at.drafted = at.visit + 1, at.visit_gain + gain, at.drafted + 1
        at.barred = max(at.barred - 1, 0)
        if at.barred == 0:
            at.ceiling = None
        self._judge(at, live, shape, steps, plain_s, ladder(aim))

    # verdicts

    def _judge(
        self, at: Standing, live: int, shape: BeamShape, steps: Steps, plain_s: float, rungs: tuple[BeamShape, ...]
    ) -> None:
        settled = at.visit >= WINDOW
        if self._overdrawn() or (settled and steps.rate * plain_s < 1):
            if at.rung > 0 and steps.rate * plain_s < 1:
                self._bar(at)
            self._rest(at)
            return
        if settled:
            at.backoff = FIRST_REST
        top = len(rungs) - 1 if at.ceiling is None else at.ceiling
        if at.rung < top and at.visit >= TRIAL and at.visit_gain > 0:
            self._enter(at, at.rung + 1)
        elif settled and 0 < at.rung < len(rungs) and shape == rungs[at.rung]:
            below = self.evidence.shapes.get((live, rungs[at.rung - 1]))
            if below is not None and len(below.seconds) >= 2 * TRIAL and steps.rate < 0.97 * below.rate:
                self._bar(at)
                self._enter(at, at.rung - 1)

    def _bar(self, at: Standing) -> None:
        """Keep below this rung for some time."""
        at.ceiling, at.barred = at.rung - 1, at.bar
        at.bar = min(2 * at.bar, LONGEST_BAR)

    def _overdrawn(self) -> bool:
        return self.balance_s < -(LOSS * self.elapsed_s + ALLOWANCE_S)

    def _enter(self, at: Standing, rung: int) -> None:
        at.rung, at.visit, at.visit_gain = rung, 0, 0.0

    def _rest(self, at: Standing) -> None:
        self.stops += 1
        self._enter(at, 0)
        at.rest, at.backoff = at.backoff, min(2 * at.backoff, LONGEST_REST)

    def _standing(self, live: int, aim: BeamShape) -> Standing:
        """By powers of two of the rows: as they finish, what was learned a moment ago holds on."""
        key = ((live - 1).bit_length(), self.trusted, aim)
        found = self.evidence.standing.get(key)
        if found is None:
            found = self.evidence.standing[key] = Standing(len(ladder(aim)) - 1 if self.trusted else 0)
        return found

    # for stats

    def said(self) -> str | None:
        """What came of it, for `stats.chosen`."""
        if not self.stops:
            return None
        return f"drafting did not pay {self.stops} time{'s' if self.stops > 1 else ''}, so decoded plainly for a while"
