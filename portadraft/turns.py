"""Who may use a model now: threads take turns, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque

from portadraft.errors import InvalidArgument

_LOOK_S = 0.02
"""How often one who waits looks whether it is still wanted."""


class Turn:
    """A fair lock that says so, instead of waiting for ever, where the same thread has it already.

    A turn is for one call, or for a block (`with model.turn():`), in which the calls of its thread run
    one at a time. A call's may be given back by another thread than took it: streams may be handed on.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[tuple[threading.Event, threading.Thread, bool]] = deque()
        # The thread itself: its number may be given to another one when it ends.
        self._holder: threading.Thread | None = None
        self._blocks = 0
        self._running = False

    def refuse_if_mine(self) -> None:
        """Raises: InvalidArgument where this thread holds it, so that waiting would never end."""
        if self._holder is not threading.current_thread():
            return
        if self._running:
            raise InvalidArgument(
                "model: a stream of it is still open in this thread; read it to its end, or close() it, first"
            )
        raise InvalidArgument(
            "model: this thread holds it by `with model.turn():`, and what asyncio runs would wait for the block's "
            "end; call generate or stream in it instead"
        )

    def pass_on(self) -> None:
        """Called when a stream goes on: it is now the stream of the thread that reads it."""
        me = threading.current_thread()
        if self._holder is not me:
            with self._guard:
                if self._running and not self._blocks:
                    self._holder = me

    def take(self, cancelled: threading.Event | None = None, *, block: bool = False) -> bool:
        """Wait for the turn; False, without it, where `cancelled` is set before it comes.

        Raises: InvalidArgument where a stream of this thread is open.
        """
        me = threading.current_thread()
        with self._guard:
            if self._holder is me:
                if self._running:
                    self.refuse_if_mine()
                self._enter(me, block)
                return True
            if self._holder is None:
                self._enter(me, block)
                return True
            gate = threading.Event()
            entry = (gate, me, block)
            self._waiting.append(entry)
        try:
            while not gate.wait(None if cancelled is None else _LOOK_S):
                if cancelled is not None and cancelled.is_set() and self._leave(entry):
                    return False
        except BaseException:  # an interrupt: leave the queue, or hand on what was just given
            if not self._leave(entry):
                self.give_back(block=block)
            raise
        return True

    def _enter(self, who: threading.Thread, block: bool) -> None:
        self._holder = who
        if block:
            self._blocks += 1
        else:
            self._running = True

    def _leave(self, entry: tuple[threading.Event, threading.Thread, bool]) -> bool:
        """Leave the queue; False where the turn had come already."""
        with self._guard:
            if entry[0].is_set():
                return False
            self._waiting.remove(entry)
            return True

    def give_back(self, *, block: bool = False) -> None:
        """End a call or a block, and hand the turn to the one who has waited longest once neither is left."""
        with self._guard:
            if block:
                self._blocks -= 1
            else:
                self._running = False
            if self._running or self._blocks:
                return
            self._holder = None
            if self._waiting:
                gate, who, its_block = self._waiting.popleft()
                self._enter(who, its_block)
                gate.set()
