"""Stop strings over a text stream, to the character and to the token.

The text ends where the stop string begins. The ids end before the first token that contributes to
it, so the text may hold leading characters of a token that the ids leave out. What could still become a
stop string is held back, so that no part of one is ever streamed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portadraft.detokenize import TextStream
from portadraft.errors import InvalidArgument


@dataclass(frozen=True)
class Scan:
    """What some tokens brought.

    delta: text that may be shown now.
    stop: the stop string that was found, or None.
    keep: how many of the stream's ids, from its first, remain if one was found, else None.
    """

    delta: str
    stop: str | None = None
    keep: int | None = None


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises: InvalidArgument for an empty string or something that is no string.
    """
    if stop is None:
        return ()
    if not isinstance(stop, (str, list, tuple)):
        raise InvalidArgument(f"stop={stop!r}: expected a string, or a list of strings")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for item in stops:
        if not isinstance(item, str) or not item:
            raise InvalidArgument(
                f"stop={stop!r}: expected strings of at least one character, found {item!r}; leave it out"
            )
    return tuple(dict.fromkeys(stops))


@dataclass(frozen=True)
class Piece:
    """A piece of an answer that nothing can change any more.

    text: to show. ids: to report; both end where a stop string says. stop: the one found, or None.
    """

    text: str
    ids: tuple[int, ...]
    stop: str | None = None


class StopStrings:
    """Watches a stream for stop strings.

    The stop string that ends first wins, and of those that end together the longest, so that
    the result does not depend on how tokens are grouped into pushes.
    """

    def __init__(self, stream: TextStream, stop: str | Sequence[str] | None = None) -> None:
        """Raises: InvalidArgument for an empty stop string."""
        self._stream = stream
        self._stops = check_stops(stop)
        self._longest = max(map(len, self._stops), default=0)
        self._buffer = ""
        self._start = 0
        self._found: Scan | None = None

    def push(self, ids: int | Iterable[int]) -> Scan:
        """Add tokens, up to the one that completes a stop string; the rest, and later pushes, are ignored."""
        deltas: list[str] = []
        for token in [ids] if isinstance(ids, int) else ids:
            if self._found is not None:
                break
            deltas.append(self._scan(self._stream.push(token)))
        return self._result("".join(deltas))

    def finish(self) -> Scan:
        """The end of the stream: scans what the stream held, and gives out what was held back."""
        delta = ""
        if self._found is None:
            delta = self._scan(self._stream.finish())
        if self._found is None:
            delta, self._buffer = delta + self._buffer, ""
        return self._result(delta)

    def _result(self, delta: str) -> Scan:
        if self._found is None:
            return Scan(delta)
        return Scan(delta, self._found.stop, self._found.keep)

    def _scan(self, text: str) -> str:
        """Take in settled text; returns what is certain to stay. The buffer holds every start of a possible match."""
        if not text:
            return ""
        self._buffer += text
        match = self._first_match()
        if match is not None:
            index, stop = match
            keep = bisect_right(self._stream.reach, self._start + index)
            self._found = Scan("", stop, keep)
            return self._give(index)
        for held in range(min(self._longest - 1, len(self._buffer)), 0, -1):
            end = self._buffer[-held:]
            if any(stop.startswith(end) for stop in self._stops):
                return self._give(len(self._buffer) - held)
        return self._give(len(self._buffer))

    def _give(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._start += count
        return text

    def _first_match(self) -> tuple[int, str] | None:
        found = ((self._buffer.find(stop), stop) for stop in self._stops)
        ends = [(index + len(stop), index, stop) for index, stop in found if index >= 0]
        if not ends:
            return None
        _, index, stop = min(ends)
        return index, stop

    @property
    def certain_ids(self) -> int:
        """How many of the stream's ids no stop string can take back."""
        return bisect_right(self._stream.reach, self._start)

    @property
    def watches(self) -> bool:
        """Whether there is a stop string to find."""
        return bool(self._stops)


class Answer:
    """The text and the certain ids of one answer, as its tokens come."""

    def __init__(self, scanner: StopStrings) -> None:
        self._scanner = scanner
        self._ids: list[int] = []
        self._released = 0
        self._texts: list[str] = []
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._texts)

    def push(self, ids: Sequence[int], *, ended: bool = False, last: bool = False) -> Piece:
        """Add tokens.

        ended: the last id is an end token; it belongs to the ids and not to the text.
        last: no more will come (implied by ended): what was held back is given out.
        A stop string that appears at any of them cuts text and ids; later pushes give nothing.
        """
        if self._stop is not None:
            return Piece("", (), self._stop)
        seen = list(ids[:-1]) if ended else list(ids)
        scan = self._scanner.push(seen)
        text = scan.delta
        self._ids += seen
        if scan.stop is None and (last or ended):
            scan = self._scanner.finish()
            text += scan.delta
        if scan.keep is not None:
            certain, self._stop = scan.keep, scan.stop
        else:
            if ended:
                self._ids.append(ids[-1])
            done = last or ended or not self._scanner.watches
            certain = len(self._ids) if done else self._scanner.certain_ids
        self._texts.append(text)
        out = tuple(self._ids[self._released : certain])
        self._released = max(self._released, certain)
        return Piece(text, out, self._stop)
