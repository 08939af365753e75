"""Recorded features on disk, in chunks, within a limit of bytes.

Chunks that fit under the limit are written once and kept. The others are streamed: recorded
again whenever training gets to them, one at a time for each process. So a limit costs
time in every epoch, and no text is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.training.pieces import write_array


class Store:
    """Rows of bfloat16 bits, (n, D) uint16, read by number like an array.

    folder, name: chunk c is the file `<name>-<c>.npy`. bounds: (chunks + 1,) first row of each.
    make: records a chunk. streamed: the chunks that are not kept.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        bounds: Sequence[int],
        size: int,
        make: Callable[[int], NDArray[np.uint16]],
        streamed: Collection[int] = (),
        rank: int = 0,
    ) -> None:
        self.folder, self.name, self.size, self.make, self.rank = folder, name, size, make, rank
        self.bounds = np.asarray(bounds, np.int64)
        self.streamed = frozenset(streamed)
        self.made_again = 0
        self._open: dict[int, NDArray[np.uint16]] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.bounds[-1]), self.size

    def path(self, chunk: int) -> Path:
        """Where a chunk lies; a streamed one for this process alone."""
        return self.folder / (
            f"{self.name}-stream{self.rank}-{chunk:05d}.npy"
            if chunk in self.streamed
            else f"{self.name}-{chunk:05d}.npy"
        )

    def absent(self, shard: tuple[int, int] = (0, 1)) -> list[int]:
        """The kept chunks that this process has yet to record."""
        rank, world = shard
        chunks = range(rank, len(self.bounds) - 1, world)
        return [c for c in chunks if c not in self.streamed and not self.path(c).exists()]

    def write(self, chunk: int) -> None:
        """Record a chunk and put it on disk. Raises: OSError for a full disk."""
        if chunk in self.streamed:
            for old in self.folder.glob(f"{self.name}-stream{self.rank}-*.npy"):
                old.unlink()
            self._open = {c: a for c, a in self._open.items() if c not in self.streamed}
        write_array(self.path(chunk), self.make(chunk))

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Rows by number, (len(rows), D)."""
        if len(self.bounds) == 2:
            return self._chunk(0)[rows]
        chunks = np.searchsorted(self.bounds, rows, side="right") - 1
        out = np.empty((len(rows), self.size), np.uint16)
        for c in np.unique(chunks).tolist():
            here = chunks == c
            out[here] = self._chunk(c)[rows[here] - self.bounds[c]]
        return out

    def _chunk(self, chunk: int) -> NDArray[np.uint16]:
        found = self._open.get(chunk)
        if found is None:
            if not self.path(chunk).exists():
                self.write(chunk)
                self.made_again += chunk in self.streamed
            found = np.load(self.path(chunk), mmap_mode="r", allow_pickle=False)
            self._open[chunk] = found
        return found

    def clear(self) -> None:
        """Remove this process's streamed chunk."""
        for old in self.folder.glob(f"{self.name}-stream{self.rank}-*.npy"):
            old.unlink()


def stream_beyond(sizes: Sequence[Sequence[int]], limit: int, world: int) -> list[list[int]] | int:
    """Which chunks of several stores cannot be kept under a limit of bytes.

    sizes: bytes of each store's chunks. Returns the streamed chunks of each store, or, where not
    even streaming fits, the least limit that would do.
    """
    if sum(map(sum, sizes)) <= limit:
        return [[] for _ in sizes]
    # Each store may need room for one streamed chunk in every process.
    room = world * sum(max(s, default=0) for s in sizes)
    if room > limit:
        return room
    left, out = limit - room, []
    for store in sizes:
        streamed = []
        for c, size in enumerate(store):
            if size <= left:
                left -= size
            else:
                streamed.append(c)
        out.append(streamed)
    return out


Hidden = Any
"""What features read their rows from: a `Store`, or an array (n, D) uint16."""
