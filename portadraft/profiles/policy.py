"""Which shape the next step drafts with: what stands between a profile and the decode loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from portadraft.core.types import BeamShape


class ShapePolicy(Protocol):
    """Asked before every decode step of one call, told after it. It changes the speed, never the text."""

    def choose(self, live: int) -> BeamShape | None:
        """The shape for the next step of `live` rows, or None to decode it plainly."""

    def observe(self, live: int, shape: BeamShape | None, tokens: int, seconds: float) -> None:
        """What that step gave: tokens over all rows (accepted and chosen), and its wall time."""

    def widest(self) -> BeamShape | None:
        """The largest shape that `choose` may return, for which the cache is made ready; None: plain only."""

    def said(self) -> str | None:
        """What came of it so far, for stats; None where that is nothing but what was proposed."""


@dataclass(frozen=True)
class FixedShape:
    """The same shape at every step (None: plain decoding)."""

    shape: BeamShape | None

    def choose(self, live: int) -> BeamShape | None:
        return self.shape

    def observe(self, live: int, shape: BeamShape | None, tokens: int, seconds: float) -> None: ...

    def widest(self) -> BeamShape | None:
        return self.shape

    def said(self) -> str | None:
        return None
