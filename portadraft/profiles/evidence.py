"""What steps cost and gave on this machine, by number of rows: measured, and read between what was measured."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from portadraft.core.types import BeamShape

PLAIN_WINDOW, SHAPE_WINDOW = 5, 24
"""Newest steps that count. Few plain ones: where drafting pays they are rare, and machines drift."""
BASELINE = 2
"""Plain steps that are measured before anything is drafted."""
FIRST_REST, FIRST_BAR = 8, 32
"""Plain steps before the first probe; drafted steps for which a rung that lost is not entered again."""


@dataclass
class Steps:
    """The newest steps of one kind: seconds, and tokens per row."""

    window: int = SHAPE_WINDOW
    seconds: deque[float] = field(default_factory=deque)
    tokens: deque[float] = field(default_factory=deque)
    _median: float | None = None

    def add(self, seconds: float, tokens: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        if len(self.seconds) > self.window:
            self.seconds.popleft()
            self.tokens.popleft()
        self._median = None

    @property
    def median(self) -> float:
        """Of an even number the lower one: what is out of the ordinary is slower, a first step above all."""
        if self._median is None:
            self._median = statistics.median_low(self.seconds)
        return self._median

    @property
    def steady(self) -> float:
        """The second quickest, or the quickest of two: a slow moment in which most were measured does not count."""
        return sorted(self.seconds)[1 if len(self.seconds) > BASELINE else 0]

    def keep(self, newest: int) -> None:
        """Forget all but the newest few."""
        while len(self.seconds) > newest:
            self.seconds.popleft()
            self.tokens.popleft()
        self._median = None

    @property
    def rate(self) -> float:
        """Tokens per row and second."""
        return sum(self.tokens) / max(sum(self.seconds), 1e-12)


@dataclass
class Standing:
    """Where drafting stands for about so many rows; kept from one call to the next.

    earned: seconds that drafting has saved in earlier calls, the newest counting most. earning: in the present one.
    """

    rung: int
    rest: int = 0  # plain steps before the next probe
    backoff: int = FIRST_REST
    probing: int = 0  # steps that are left of a probe
    ceiling: int | None = None  # no rung above it, for the next `barred` drafted steps
    barred: int = 0
    bar: int = FIRST_BAR
    visit: int = 0  # steps since this rung was entered
    visit_gain: float = 0.0  # seconds
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SHAPE_WINDOW))
    drafted: int = 0  # steps since the last plain one
    failed: int = 0  # of these the newest, in which nothing was accepted
    earned: float = 0.0
    earning: float = 0.0
    caller: object = None

    def enter(self, rung: int) -> None:
        """Begin anew on a rung."""
        self.rung, self.visit, self.visit_gain = rung, 0, 0.0
        self.recent.clear()


class Evidence:
    """What steps cost and gave, by number of rows. One object serves all calls of a model with a drafter."""

    def __init__(self) -> None:
        self.plain: dict[int, Steps] = {}
        self.shapes: dict[tuple[int, BeamShape], Steps] = {}
        self.standing: dict[tuple[int, bool, BeamShape], Standing] = {}

    def add_plain(self, live: int, seconds: float, tokens: float) -> None:
        self.plain.setdefault(live, Steps(PLAIN_WINDOW)).add(seconds, tokens)

    def plain_s(self, live: int) -> float | None:
        """Seconds of a plain step of so many rows; None where one must be measured first.

        Between two numbers of rows that were measured it is read from both. Where only a larger one was, as rows of a
        batch finish, a single step of its own does, which is taken for no dearer than that of more rows.
        """
        own = self.plain.get(live)
        count = 0 if own is None else len(own.seconds)
        if own is not None and count >= BASELINE:
            return own.steady
        known = sorted(n for n, steps in self.plain.items() if len(steps.seconds) >= BASELINE)
        below = [n for n in known if n < live]
        above = [n for n in known if n > live]
        if below and above:
            low, high = self.plain[below[-1]].steady, self.plain[above[0]].steady
            return low + (high - low) * (live - below[-1]) / (above[0] - below[-1])
        if above and own is not None and count:
            return min(own.steady, self.plain[above[0]].steady)
        return None

    def shape_s(self, live: int, shape: BeamShape, plain_s: float) -> float | None:
        """Seconds that a step of a shape is expected to take: from its own steps, else by slots from another's.

        What other numbers of rows have shown counts in plain steps of theirs.
        """
        own = self.shapes.get((live, shape))
        once = own.median if own is not None and own.seconds else math.inf  # its first step may have made things ready
        if own is not None and len(own.seconds) >= BASELINE:
            return once
        others = []
        for (rows, other), steps in self.shapes.items():
            theirs = self.plain_s(rows)
            if theirs and len(steps.seconds) >= BASELINE:
                others.append((rows == live, other == shape, other.slots(), steps.median / theirs))
        if not others:
            return once if once < math.inf else None
        _, _, slots, cost = max(others)
        return min(once, plain_s * (1 + max(cost - 1, 0.0) * (shape.slots() - 1) / max(slots - 1, 1)))
