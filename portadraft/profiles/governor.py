"""Never slower: drafting goes on only while it pays, measured step by step against plain decoding.

A governor stands between what a profile or a default proposes and the decode loop. It knows what
a plain step costs here, from a few plain steps, and what each drafted step saved: its tokens, in plain
steps, less the time that it took. Rules:

- A shape whose expected time exceeds L + 1 plain steps, all that it could ever save, is not run.
- What was measured on this machine, and a modest default, is begun with as soon as two plain steps and two of
  (1, 2) have shown what steps cost. Anything else begins at (1, 2) and widens, rung by rung, as the narrower one pays.
- Drafting stops where the newest steps say, beyond their scatter, that it loses, and in any case once the account
  is overdrawn: gains less losses, of which a few plain steps at most are carried on from better times, may fall to
  2 % of the time so far and a small allowance below zero.
- A stop is checked: if plain steps, measured anew, turn out slower than they were taken for, drafting goes on. Else
  decoding is plain, with probes of the smallest shape, each twice as rare as the one before.

Whole steps are timed, by the host's clock: nothing here touches the device or the text. What was
learned is kept with the model, by number of rows, for its next call.
"""

from __future__ import annotations

import math
import statistics

from portadraft.core.types import BeamShape
from portadraft.profiles.evidence import BASELINE, FIRST_REST, SHAPE_WINDOW, Evidence, Standing, Steps
from portadraft.profiles.policy import ShapePolicy

LOSS = 0.02
"""The share of the time so far that drafting may have lost."""
ALLOWANCE_S = 0.03
"""What it may have lost besides, seconds."""
CREDIT = 4
"""Plain steps' time, of what was gained before, that may be lost again: a text that begins badly goes on."""
SURE = 1.5
"""Standard errors below zero at which the newest steps say that drafting loses."""
LEAST = 8
"""Steps at least that such a verdict takes."""
REFRESH = 64
"""Drafted steps after which one is decoded plainly, since contexts grow and machines drift."""
DOUBTFUL = 5
"""Drafted steps in which nothing was accepted after which one is decoded plainly: either drafting loses, or what is
known of plain steps is out of date."""
MISTAKEN = 1.15
"""How much quicker than believed plain steps must turn out for the newest drafted steps to be valued anew."""
DRIFTED = 1.05
"""How much slower plain steps must have become for a stop to be reconsidered."""
TRIAL = 4
"""Steps on a rung, at least, before the next one is tried."""
PROBE = 2
"""Steps of a probe."""
LONGEST_REST, LONGEST_BAR = 512, 1024
"""Plain steps between two probes, and drafted steps for which a rung is closed, at most."""
NEW_CALL_REST = 16
"""Plain steps that a call begins with where drafting lost in the calls before."""
FADE = 0.8
"""What each call leaves of what the calls before it have earned."""


class Governor:
    """A shape policy that follows another one while drafting pays.

    aim: what is proposed. trusted: whether it is begun with: measured on this machine, or modest.
    evidence: of earlier calls of the same model and drafter; it is added to.
    """

    def __init__(self, aim: ShapePolicy, evidence: Evidence, *, trusted: bool = False) -> None:
        self.aim, self.evidence, self.trusted = aim, evidence, trusted
        self.elapsed_s = 0.0
        self.balance_s: float | None = None
        self.stops = 0
        self._doubts: list[float] | None = None  # plain steps since the last stop
        self._believed = 0.0  # what a plain step was taken for then
        # Where that stop was, the steps that led to it, and their rung.
        self._stopped: tuple[Standing | None, list[tuple[float, float]], int] = (None, [], 0)

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
        at = self._standing(live, aim, plain_s)
        if at.rest > 0 or at.drafted >= REFRESH or at.failed >= DOUBTFUL:
            return None
        rungs = ladder(aim)
        if self._overdrawn(self._probe_s(live, rungs[0], plain_s) if at.probing else 0.0):
            return None
        if rungs[1:] and all(self.evidence.shape_s(live, other, plain_s) is None for other in rungs[1:]):
            return rungs[0]  # the cheapest steps say what others will about cost, before any is taken
        at.rung = min(at.rung, len(rungs) - 1)
        if at.rung > 0 and not self._could_pay(live, rungs[at.rung], plain_s):
            self._bar(at)
            at.enter(0)
        if self._could_pay(live, rungs[at.rung], plain_s):
            return rungs[at.rung]
        self._rest(at, plain_s)
        return None

    def _probe_s(self, live: int, shape: BeamShape, plain_s: float) -> float:
        """Seconds that a probe loses if nothing in it is right."""
        return PROBE * max((self.evidence.shape_s(live, shape, plain_s) or plain_s) - plain_s, 0.0)

    def _could_pay(self, live: int, shape: BeamShape, plain_s: float) -> bool:
        """Whether a step is expected to take no longer than the L + 1 plain ones that it saves at best."""
        expected = self.evidence.shape_s(live, shape, plain_s)
        return expected is None or expected <= (shape.length + 1) * plain_s

    def observe(self, live: int, shape: BeamShape | None, tokens: int, seconds: float) -> None:
        aim = self.aim.choose(live)
        self.elapsed_s += seconds
        if shape is None:
            before = self.evidence.plain_s(live)
            self.evidence.add_plain(live, seconds, tokens / live)
            plain_s = self.evidence.plain_s(live)
            if aim is not None and plain_s is not None:
                at = self._standing(live, aim, plain_s)
                if (
                    before is not None and plain_s * MISTAKEN < before
                ):  # the newest drafted steps were valued too highly
                    self._book(at, sum(tokens for tokens, _ in at.recent) * (plain_s - before), plain_s)
                at.rest, at.drafted, at.failed = max(at.rest - 1, 0), 0, 0
                self._reconsider(at, live, seconds)
            return
        steps = self.evidence.shapes.setdefault((live, shape), Steps())
        plain_s = self.evidence.plain_s(live)
        counted = seconds
        if not steps.seconds and plain_s is not None:
            # A shape's first step makes things ready, once in a process: it counts as what it is expected to take.
            counted = min(seconds, self.evidence.shape_s(live, shape, plain_s) or plain_s)
        elif len(steps.seconds) >= TRIAL:
            # A disturbed step says nothing about the shape: it counts as a slow one, not as a thousand.
            counted = min(seconds, 4 * steps.median)
        steps.add(seconds, tokens / live)
        if aim is None or plain_s is None:
            return
        at = self._standing(live, aim, plain_s)
        self._book(at, tokens / live * plain_s - counted, plain_s)
        at.recent.append((tokens / live, counted))
        at.failed = at.failed + 1 if tokens <= live else 0
        at.visit, at.drafted, at.barred = at.visit + 1, at.drafted + 1, max(at.barred - 1, 0)
        if at.barred == 0:
            at.ceiling = None
        self._judge(at, live, shape, steps, plain_s, ladder(aim))

    def _book(self, at: Standing, gain: float, plain_s: float) -> None:
        """Enter seconds that a step saved (or lost) into the account; what lies above the credit is not carried on."""
        self.balance_s = min((self.balance_s or 0.0) + gain, CREDIT * plain_s)
        at.visit_gain += gain
        at.earning += gain

    def _overdrawn(self, more: float = 0.0) -> bool:
        """Whether the account is, or would be after a further loss."""
        return self.balance_s is not None and self.balance_s - more < -(LOSS * self.elapsed_s + ALLOWANCE_S)

    # verdicts

    def _judge(
        self, at: Standing, live: int, shape: BeamShape, steps: Steps, plain_s: float, rungs: tuple[BeamShape, ...]
    ) -> None:
        if at.probing:
            self._judge_probe(at, plain_s, len(rungs) - 1)
            return
        loses = _loses(at, plain_s)
        if loses or self._overdrawn():
            if at.rung > 0 and steps.rate * plain_s < 1:
                self._bar(at)
            self._rest(at, plain_s, rarer=loses)
            return
        if at.visit >= TRIAL and _all_right(at, shape):
            at.ceiling = None  # what this rung can show it has shown: such a text wants more
        top = len(rungs) - 1 if at.ceiling is None else at.ceiling
        if at.visit >= SHAPE_WINDOW:
            at.backoff = FIRST_REST
        if at.rung < top and at.visit >= TRIAL and at.visit_gain > 0:
            if self._could_pay(live, rungs[at.rung + 1], plain_s):
                at.enter(at.rung + 1)
        elif at.visit >= SHAPE_WINDOW and 0 < at.rung < len(rungs) and shape == rungs[at.rung]:
            below = self.evidence.shapes.get((live, rungs[at.rung - 1]))
            if below is not None and len(below.seconds) >= 2 * TRIAL and steps.rate < 0.97 * below.rate:
                self._bar(at)
                at.enter(at.rung - 1)

    def _judge_probe(self, at: Standing, plain_s: float, top: int) -> None:
        at.probing -= 1
        if at.visit_gain > 0:
            at.probing = 0
            at.enter(top if self.trusted and at.ceiling is None else at.rung)
        elif at.probing == 0:
            self._rest(at, plain_s, probed=True)

    def _bar(self, at: Standing) -> None:
        """Keep below this rung for some time."""
        at.ceiling, at.barred = at.rung - 1, at.bar
        at.bar = min(2 * at.bar, LONGEST_BAR)

    def _rest(self, at: Standing, plain_s: float, *, rarer: bool = True, probed: bool = False) -> None:
        """Stop drafting for a while. rarer: the next time for longer. probed: a probe failed; nothing to reconsider."""
        self.stops += 0 if probed else 1
        self._doubts, self._believed = (None if probed else []), plain_s
        self._stopped = at, list(at.recent), at.rung
        at.enter(0)
        at.rest, at.probing = at.backoff, PROBE
        if rarer:
            at.backoff = min(2 * at.backoff, LONGEST_REST)

    def _reconsider(self, at: Standing, live: int, seconds: float) -> None:
        """After a stop: value the steps that led to it by plain steps measured since, and go on if they paid."""
        if self._doubts is None or self._stopped[0] is not at:
            return
        self._doubts.append(seconds)
        if len(self._doubts) < BASELINE:
            return
        plain_s, (_, recent, rung) = min(self._doubts), self._stopped
        self._doubts = None
        if plain_s <= DRIFTED * self._believed or not recent:
            return
        self.evidence.plain[live].keep(BASELINE)
        self._book(at, sum(tokens for tokens, _ in recent) * (plain_s - self._believed), plain_s)
        if sum(tokens * plain_s - taken for tokens, taken in recent) > 0 and not self._overdrawn():
            at.rest, at.probing, at.backoff, at.ceiling = 0, 0, max(at.backoff // 2, FIRST_REST), None
            at.enter(rung)
            self.stops -= 1

    def _standing(self, live: int, aim: BeamShape, plain_s: float) -> Standing:
        """By powers of two of the rows: as they finish, what was learned a moment ago holds on."""
        key = ((live - 1).bit_length(), self.trusted, aim)
        found = self.evidence.standing.get(key)
        if found is None:
            found = self.evidence.standing[key] = Standing(len(ladder(aim)) - 1 if self.trusted else 0)
        if found.caller is not self:
            self._begin(found, aim, plain_s)
        return found

    def _begin(self, at: Standing, aim: BeamShape, plain_s: float) -> None:
        """A call finds what others have left: credit where drafting has paid, a shorter rest where it has not."""
        at.earned = FADE * at.earned + min(max(at.earning, -CREDIT * plain_s), 2 * CREDIT * plain_s)
        at.earning, at.caller, at.drafted = 0.0, self, 0
        at.recent.clear()
        if at.earned > 0:
            at.rest, at.probing, at.backoff = 0, 0, FIRST_REST
            if self.trusted and at.ceiling is None:
                at.enter(len(ladder(aim)) - 1)
        elif at.probing:
            at.rest, at.backoff = NEW_CALL_REST, min(at.backoff, 2 * NEW_CALL_REST)
        if self.balance_s is None:
            self.balance_s = min(max(at.earned, 0.0), CREDIT * plain_s)

    # for stats

    def said(self) -> str | None:
        """What came of it, for `stats.chosen`."""
        if not self.stops:
            return None
        return f"drafting did not pay {self.stops} time{'s' if self.stops > 1 else ''}, so decoded plainly for a while"


def _loses(at: Standing, plain_s: float) -> bool:
    """Whether the newest steps of this visit lose, by more than their scatter explains."""
    n = len(at.recent)
    if n < LEAST:
        return False
    gains = [tokens * plain_s - seconds for tokens, seconds in at.recent]
    mean = statistics.fmean(gains)
    if mean >= 0:
        return False
    # Steps that all fail scatter little, and still say no more than so many steps can.
    deviation = max(math.sqrt(statistics.fmean((g - mean) ** 2 for g in gains)), plain_s)
    return mean + SURE * deviation / math.sqrt(n) < 0


def _all_right(at: Standing, shape: BeamShape) -> bool:
    """Whether nearly all that the newest steps could have drafted was right."""
    newest = list(at.recent)[-TRIAL:]
    return sum(tokens for tokens, _ in newest) >= 0.9 * len(newest) * (shape.length + 1)


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
