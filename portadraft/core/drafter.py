"""The drafter protocol: whatever can guess the next tokens.

Rows are dense as in `portadraft.core.target`. A drafter changes the speed and never the
text, so it may guess as it likes, but what it returns must be a well-formed `Beam`.
Stateless drafters leave most methods empty: derive from `StatelessDrafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from portadraft.core.types import Array, Beam, BeamShape, Verdict, Verified


@runtime_checkable
class Drafter(Protocol):
    """Guesses continuations of the root token of every live row."""

    name: str
    """For stats and reports: "redrafter", "lookup", "redrafter+lookup"."""
    wants: Literal["none", "last", "all"]
    """Which positions' features it reads: none, the newest one, or every committed one."""

    def candidates(self, shape: BeamShape) -> int:
        """The most candidate sequences that `draft` returns for this shape."""

    def depth(self, shape: BeamShape) -> int:
        """The most tokens of a candidate that `draft` returns for this shape."""

    def admit(self, row: int, ids: Sequence[int]) -> None:
        """A new row, the last one: its prompt."""

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam | None:
        """Candidates that follow the roots, or None to have this step decoded plainly.

        roots: (B,) int32, chosen by the target and not in its cache yet; features: (B, D),
        the hidden state that chose them. Makes no host read.
        """

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None:
        """What each live row was given: new token ids, the newest being the next root.

        After a step the pass and its verdict come along (features of all accepted slots are
        verified.hidden at verdict.slots); after `admit` they are None.
        """

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on (prompt and answer counted together)."""

    def release(self, row: int) -> None:
        """Drop a row; the last row takes its number."""

    def memory(self, batch: int, context: int) -> int:
        """Bytes that it holds besides its weights for so many rows and tokens."""


class StatelessDrafter:
    """A base for drafters that keep nothing per row."""

    wants: Literal["none", "last", "all"] = "last"

    def candidates(self, shape: BeamShape) -> int:
        return shape.width

    def depth(self, shape: BeamShape) -> int:
        return shape.length

    def admit(self, row: int, ids: Sequence[int]) -> None: ...

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None: ...

    def truncate(self, row: int, length: int) -> None: ...

    def release(self, row: int) -> None: ...

    def memory(self, batch: int, context: int) -> int:
        return 0
