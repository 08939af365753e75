"""Who may use a model now: threads take turns, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque

from portadraft.errors import InvalidArgument

_LOOK_S = 0.02
"""How often one who waits looks whether it is still wanted."""


class Turn:
    """A fair lock that says so, instead of waiting for ever, where a stream of the same thread is still open.

    It may be given back by another thread than the one that took it: a stream may be read by several.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[tuple[threading.Event, int]] = deque()
        self._taken = False
        self._holder: int | None = None  # a thread, or None where several have used it

    def refuse_if_mine(self) -> None:
        """Raises: InvalidArgument where this thread holds it, so that waiting would never end."""
        if self._taken and self._holder == threading.get_ident():
            raise InvalidArgument(
                "model: a stream of it is still open in this thread; read it to its end, or close() it, first"
            )

    def pass_on(self) -> None:
        """Called when a stream goes on: once another thread reads it, its first one may wait for it."""
        if self._holder != threading.get_ident():
            self._holder = None

    def take(self, cancelled: threading.Event | None = None) -> bool:
        """Wait for the turn; False, without it, where `cancelled` is set before it comes.

        Raises: InvalidArgument as `refuse_if_mine`.
        """
        me = threading.get_ident()
        with self._guard:
            self.refuse_if_mine()
            if not self._taken:
                self._taken, self._holder = True, me
                return True
            gate = threading.Event()
            self._waiting.append((gate, me))
        try:
            while not gate.wait(None if cancelled is None else _LOOK_S):
                if cancelled is not None and cancelled.is_set() and self._leave(gate, me):
                    return False
        except BaseException:  # an interrupt: leave the queue, or hand on what was just given
            if not self._leave(gate, me):
                self.give_back()
            raise
        return True

    def _leave(self, gate: threading.Event, me: int) -> bool:
        """Leave the queue; False where the turn had come already."""
        with self._guard:
            if gate.is_set():
                return False
            self._waiting.remove((gate, me))
            return True

    def give_back(self) -> None:
        """Hand the turn to the one who has waited longest."""
        with self._guard:
            if self._waiting:
                gate, self._holder = self._waiting.popleft()
                gate.set()
            else:
                self._taken, self._holder = False, None
