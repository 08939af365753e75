"""Keys and values of several rows of different lengths, behind the face of mlx-lm's caches.

Each layer keeps one buffer (rows, heads, capacity, size) for keys and one for values. A pass over
N slots writes them at [past, past + N), `past` being the longest row, and every layer sees the
same place; row b's context is [0, length_b), the gap up to `past` is masked. Masks go by
position, also for layers whose own cache would rotate.

Commits take the accepted entries from the pass's OWN keys and values, never from the buffer:
a buffer that is still read by something cannot be written in place, and mlx would copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from portadraft.backends.mlx.passes import Pass
from portadraft.errors import UnsupportedModel

Array = Any

STEP = 256
"""Buffers grow by multiples of this many slots."""
LAYERS_AHEAD = 4
"""So many layers of a pass are built before the device begins with them."""


class LayerCache:
    """One layer's keys and values, with the methods that mlx-lm's models call.

    window: the size of the stock cache where that one rotates, else None.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.max_size = window
        self.running: Pass | None = None
        # Named as mlx-lm's: some models reach for them.
        self.keys: Any = None
        self.values: Any = None
        self.begins = False
        """Whether the device begins with what was built so far when this layer is reached."""
        self._seen: tuple[Array, Array] | None = None
        self._fresh: tuple[Array, Array] | None = None
        self.rows = self.capacity = 0

    # what models call

    @property
    def offset(self) -> int:
        """The greatest length. Rotary positions are set per token elsewhere (see `rotary`)."""
        assert self.running is not None
        return self.running.past

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Array | str | None:
        assert self.running is not None
        sizes = [w for w in (window_size, self.window) if w]
        return self.running.mask(min(sizes, default=None), return_array)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Write a pass's slots; the result covers all slots [0, past + N)."""
        running = self.running
        assert running is not None
        if keys.ndim != 4 or keys.shape[0] != running.rows or keys.shape[2] != running.slots:
            raise UnsupportedModel(
                f"a layer stores keys of shape {tuple(keys.shape)}, expected (rows, heads, slots, size)"
            )
        if self.begins and running.runs:
            begin: Any = mx.async_eval
            begin(keys)
        self._ensure_buffers(keys, values)
        rows = slice(running.first, running.first + running.rows)
        end = running.past + running.slots
        self.keys[rows, :, running.past : end] = keys
        self.values[rows, :, running.past : end] = values
        self._fresh = (keys, values)
        self._seen = (self.keys[rows, :, :end], self.values[rows, :, :end])
        return self._seen

    def _ensure_buffers(self, keys: Array, values: Array) -> None:
        """Make them on first use: only what a layer stores says what form they have."""
        if self.keys is None:
            self.keys = mx.zeros((self.rows, keys.shape[1], self.capacity, keys.shape[3]), dtype=keys.dtype)
            self.values = mx.zeros((self.rows, values.shape[1], self.capacity, values.shape[3]), dtype=values.dtype)

    def keys_and_values(self) -> tuple[Array, Array]:
        """The same as the last `update_and_fetch` gave, for layers that read another's cache."""
        assert self._seen is not None
        return self._seen

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    # what the target calls

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room; what is stored stays."""
        if self.keys is not None:
            self.keys = _grown(self.keys, rows, capacity)
            self.values = _grown(self.values, rows, capacity)
        self.rows, self.capacity = rows, capacity

    def forget_views(self) -> None:
        """Let go of views of the buffers, which would keep them from being written in place."""
        self._seen = None

    def drop_pass(self) -> None:
        self._seen = self._fresh = None
        self.running = None

    def move(self, runs: Sequence[tuple[int, int, int]], index: Array | None, count: int) -> None:
        """Write accepted slots behind the rows' contexts.

        runs: (first row, rows, place): neighbouring rows that are written at one place. index:
        (B, count) slots on the device.
        """
        if self._fresh is None or index is None:
            return
        for fresh, buffer in zip(self._fresh, (self.keys, self.values), strict=True):
            taken = mx.take_along_axis(fresh, index[:, None, :, None], axis=2)
            for first, rows, place in runs:
                buffer[first : first + rows, :, place : place + count] = taken[first : first + rows]

    def row(self, row: int, length: int) -> list[Array]:
        """A copy of a row's entries (lazy)."""
        if self.keys is None:
            return []
        return [mx.contiguous(x[row : row + 1, :, :length]) for x in (self.keys, self.values)]

    def put_row(self, row: int, entries: Sequence[Array], length: int) -> None:
        """Write the first `length` of what `row` gave; nothing for a layer that stores nothing."""
        if not entries:
            return
        self._ensure_buffers(*entries)
        for buffer, new in zip((self.keys, self.values), entries, strict=True):
            buffer[row : row + 1, :, :length] = new[:, :, :length]


class ManyCaches:
    """A layer that keeps several caches (mlx-lm's CacheList)."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __bool__(self) -> bool:
        return True


class RowCache:
    """All layers' caches of a model, and the lengths of its rows."""

    def __init__(self, model: Any) -> None:
        self.layers: list[LayerCache] = []
        known: dict[int, Any] = {}
        self.faces = [self._face(c, known) for c in stock.make_prompt_cache(model)]
        self.lengths: list[int] = []
        self.rows = self.capacity = 0
        if not self.layers:
            raise UnsupportedModel("it keeps no keys and values")
        for layer in self.layers[LAYERS_AHEAD::LAYERS_AHEAD]:
            layer.begins = True

    def _face(self, cache: Any, known: dict[int, Any]) -> Any:
        if cache is None:
            return None
        if id(cache) in known:
            return known[id(cache)]
        kind = type(cache)
        face: Any
        if kind is stock.CacheList:
            face = ManyCaches([self._face(c, known) for c in cache.caches])
        elif kind in (stock.KVCache, stock.ConcatenateKVCache):
            face = LayerCache()
            self.layers.append(face)
        elif kind is stock.RotatingKVCache:
            if cache.keep:
                raise UnsupportedModel(
                    f"its rotating cache keeps the first {cache.keep} tokens, which no window by position does"
                )
            face = LayerCache(int(cache.max_size))
            self.layers.append(face)
        else:
            raise UnsupportedModel(_refusal(kind.__name__))
        known[id(cache)] = face
        return face

    @property
    def bytes_per_token(self) -> int:
        return sum(
            x.shape[1] * x.shape[3] * x.itemsize
            for layer in self.layers
            for x in (layer.keys, layer.values)
            if x is not None
        )

    def reserve(self, rows: int, tokens: int, exact: bool = False) -> None:
        """Room for rows and tokens; grows by half where the need was not foretold."""
        if rows <= self.rows and tokens <= self.capacity:
            return
        if tokens > self.capacity:
            roomy = tokens if exact or not self.capacity else max(tokens, self.capacity * 3 // 2)
            self.capacity = -(-roomy // STEP) * STEP
        self.rows = max(rows, self.rows)
        for layer in self.layers:
            layer.reserve(self.rows, self.capacity)

    def begin(self, running: Pass) -> None:
        for layer in self.layers:
            layer.drop_pass()
            layer.running = running

    def end(self) -> None:
        for layer in self.layers:
            layer.forget_views()

    def drop_pass(self) -> None:
        for layer in self.layers:
            layer.drop_pass()

    def buffers(self) -> list[Array]:
        return [x for layer in self.layers for x in (layer.keys, layer.values) if x is not None]

    def commit(self, past: int, index: Array, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Put the accepted slots of the last pass, written at `past`, behind each row's context."""
        lengths = self.lengths
        settled = all(past == lengths[b] and list(slots[b][:n]) == list(range(n)) for b, n in enumerate(counts))
        if not settled:
            # What lies past a row's count is moved too: it is masked, and overwritten later. It must
            # not reach over the buffer's end.
            count = max(counts)
            if max(lengths) + count > self.capacity:
                self.reserve(self.rows, max(lengths) + count)
            runs: list[tuple[int, int, int]] = []
            for b, length in enumerate(lengths):
                if runs and runs[-1][2] == length:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
                else:
                    runs.append((b, 1, length))
            for layer in self.layers:
                layer.move(runs, index[:, :count], count)
        for b, n in enumerate(counts):
            lengths[b] += n
        self.drop_pass()

    def read(self, row: int) -> list[list[Array]]:
        """A copy of a row's committed entries: keys and values (1, heads, length, size) of each layer."""
        length = self.lengths[row]
        entries = [layer.row(row, length) for layer in self.layers]
        # Evaluated here: else the buffers would be read and written at once later, and be copied.
        mx.eval(entries)
        return entries

    def write(self, row: int, entries: Sequence[Sequence[Array]], length: int) -> None:
        """Put the first `length` tokens of what `read` gave into a row; lazy, and in place."""
        for layer, new in zip(self.layers, entries, strict=True):
            layer.put_row(row, new, length)

    def release(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        last = len(self.lengths) - 1
        self.drop_pass()
        if row != last:
            self.write(row, self.read(last), self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self.clear()

    def clear(self) -> None:
        """Give the memory back: nobody is left."""
        self.rows = self.capacity = 0
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.rows = layer.capacity = 0


def _grown(x: Array, rows: int, capacity: int) -> Array:
    have_rows, heads, have, size = x.shape
    if have < capacity:
        x = mx.concatenate([x, mx.zeros((have_rows, heads, capacity - have, size), dtype=x.dtype)], axis=2)
    if have_rows < rows:
        x = mx.concatenate([x, mx.zeros((rows - have_rows, heads, capacity, size), dtype=x.dtype)], axis=0)
    return x


def _refusal(kind: str) -> str:
    if kind == "ArraysCache":
        return "it keeps a recurrent or convolutional state (ArraysCache), which cannot branch over a tree"
    if kind == "ChunkedKVCache":
        return "it drops the keys of past chunks (ChunkedKVCache), which a tree may still need"
    return f"its cache is a {kind}, which portadraft does not know"
