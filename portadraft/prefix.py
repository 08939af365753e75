"""Keys and values that are kept between calls, so that a common prefix is not computed again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from portadraft.core.scalars import as_integer
from portadraft.core.target import RowState, Target
from portadraft.errors import InvalidArgument

DEFAULT_BYTES = 1 << 30


class PrefixCache:
    """States of finished answers, found again by their longest common prefix with a new prompt.

    max_bytes: what all of them together may occupy on the device; those that were not used for
    the longest time go first. A state that is larger by itself is not kept, and the answer's
    notices say so. One cache serves one model; it may be shared by threads.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises: InvalidArgument unless max_bytes is a positive integer."""
        most = as_integer(max_bytes)
        if most is None or most < 1:
            raise InvalidArgument(f"max_bytes={max_bytes!r}: expected a positive number of bytes")
        self.max_bytes = most
        self._states: list[RowState] = []  # the one used last is the last
        self._target: Target | None = None
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied now."""
        return sum(state.nbytes for state in self._states)

    def clear(self) -> None:
        """Forget everything."""
        with self._guard:
            self._states.clear()

    def bind(self, target: Target) -> None:
        """Tie it to a target, the first time; states mean nothing to another one.

        Raises: InvalidArgument where it belongs to another target.
        """
        with self._guard:
            if self._target is None:
                self._target = target
            elif self._target is not target:
                raise InvalidArgument(
                    "reuse: this PrefixCache holds states of another model; make one PrefixCache for each model"
                )

    def find(self, ids: Sequence[int]) -> tuple[RowState, int] | None:
        """The state with the longest common prefix, and its length; at least one id is left to compute."""
        with self._guard:
            best, length = None, 0
            for state in self._states:
                common = min(common_prefix(state.ids, ids), len(ids) - 1)
                if common >= max(length, 1):
                    best, length = state, common
            if best is None:
                return None
            self._states.remove(best)
            self._states.append(best)
            return best, length

    def keep(self, state: RowState) -> str | None:
        """Keep a state; returns a notice for the user where it does not fit."""
        if state.nbytes > self.max_bytes:
            return (
                f"the keys and values of {len(state.ids)} tokens take {_size(state.nbytes)}, more than the limit of "
                f"{_size(self.max_bytes)}, so they were not kept and the next call computes them again; raise max_bytes"
            )
        with self._guard:
            longer = next((s for s in self._states if common_prefix(s.ids, state.ids) == len(state.ids)), None)
            if longer is not None:  # it holds all of this one
                self._states.remove(longer)
                self._states.append(longer)
                return None
            # What the new one begins with is of no more use.
            self._states = [s for s in self._states if common_prefix(s.ids, state.ids) < len(s.ids)]
            self._states.append(state)
            total = sum(s.nbytes for s in self._states)
            while total > self.max_bytes:
                total -= self._states.pop(0).nbytes
        return None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items two sequences share."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
