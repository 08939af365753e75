"""Keys and values of several rows of different lengths, preallocated.

All layers of one shape share one buffer (planes, rows, heads, tokens, dim), so that a commit
is one gather and one scatter for all of them, and a pass makes its views of all layers in a
few calls. A row's committed entries are slots [0, length). A pass writes its N new slots of
every row at [M, M+N), M being the longest row; what lies between is masked, never moved.
Growth happens between passes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from portadraft.backends.torch.ops import to_device
from portadraft.errors import UnsupportedModel

BUCKET = 64
"""Capacities are multiples of this many tokens."""


@dataclass(frozen=True)
class LayerShape:
    """What one cache layer stores per token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class Store:
    """One buffer, or two where keys and values differ in width, for the layers of one shape."""

    def __init__(self, shape: LayerShape, layers: Sequence[int]) -> None:
        self.shape = shape
        self.layers = tuple(layers)
        count = len(self.layers)
        if shape.key_dim == shape.value_dim:
            self.planes = [(2 * count, shape.key_dim)]
        else:
            self.planes = [(count, shape.key_dim), (count, shape.value_dim)]
        self.buffers = self._allocate(0, 0)

    def _allocate(self, rows: int, tokens: int) -> list[Tensor]:
        # Zeros, not empty: a masked slot has weight 0, and 0 times a stray NaN is NaN.
        return [
            torch.zeros((planes, rows, self.shape.heads, tokens, dim), dtype=self.shape.dtype, device=self.shape.device)
            for planes, dim in self.planes
        ]

    def grow(self, rows: int, tokens: int) -> None:
        """New buffers of that capacity with the old content; nothing changes if it raises."""
        fresh = self._allocate(rows, tokens)
        for new, old in zip(fresh, self.buffers, strict=True):
            if old.numel():
                new[:, : old.shape[1], :, : old.shape[3]].copy_(old)
        self.buffers = fresh

    def views(self, rows: slice, tokens: slice) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Per layer, keys and values (rows, heads, tokens, dim) as views."""
        planes = [plane for buffer in self.buffers for plane in buffer[:, rows, :, tokens].unbind(0)]
        half = len(self.layers)
        return tuple(planes[:half]), tuple(planes[half:])


class RowCache(Cache):
    """The cache that is handed to the model. Host state: `lengths`, one number per row."""

    def __init__(self, shapes: Sequence[LayerShape | None]) -> None:
        """shapes: by cache layer index; None for a layer that stores nothing (shared keys)."""
        # Cache.__init__ is left out: its arguments changed between versions, its attributes did not.
        self.layer_class_to_replicate = None
        self.offloading = False
        self.layers = [RowLayer(self, i) for i in range(len(shapes))]
        groups: dict[LayerShape, list[int]] = {}
        for i, shape in enumerate(shapes):
            if shape is not None:
                groups.setdefault(shape, []).append(i)
        self.stores = [Store(shape, layers) for shape, layers in groups.items()]
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes if shape is not None)
        self.lengths: list[int] = []
        self.past = self.fresh = 0
        self._flags = [False] * len(shapes)
        self.read_keys: list[Any] = [None] * len(shapes)
        self.read_values: list[Any] = [None] * len(shapes)
        self._write_keys: list[Any] = [None] * len(shapes)
        self._write_values: list[Any] = [None] * len(shapes)

    # capacity

    @property
    def one_by_one(self) -> bool:
        """Whether a commit moves row after row, rather than all rows by one gather and scatter.

        On CUDA fewer kernels win. MPS scatters into views wrongly, and a CPU scatters through a
        spread index a thousand times slower than it copies rows (250 ms a step for four rows).
        """
        return any(store.shape.device.type != "cuda" for store in self.stores)

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and tokens per row that fit without growing."""
        shapes = [buffer.shape for store in self.stores for buffer in store.buffers]
        return min(s[1] for s in shapes), min(s[3] for s in shapes)

    def reserve(self, rows: int, tokens: int, *, exact: bool = False) -> None:
        """Make room for that many rows and tokens; never shrinks.

        exact: what is asked for is what will be needed, so leave no slack. Raises what the
        allocator raises; the content is then unchanged.
        """
        have_rows, have_tokens = self.capacity
        if rows <= have_rows and tokens <= have_tokens:
            return
        rows = max(rows, have_rows)
        least = max(-(-tokens // BUCKET) * BUCKET, have_tokens)
        roomy = least if exact or tokens <= have_tokens else max(least, -(-(have_tokens * 3 // 2) // BUCKET) * BUCKET)
        self._forget_views()
        for store in self.stores:
            try:
                store.grow(rows, roomy)
            except (RuntimeError, MemoryError):
                if roomy == least:
                    raise
                store.grow(rows, least)

    # one pass

    def begin(self, rows: slice, past: int, fresh: int) -> None:
        """Prepare a pass over `rows` that writes `fresh` slots at `past`."""
        self.past, self.fresh = past, fresh
        for store in self.stores:
            read_k, read_v = store.views(rows, slice(0, past + fresh))
            write_k, write_v = store.views(rows, slice(past, past + fresh))
            for j, layer in enumerate(store.layers):
                self.read_keys[layer], self.read_values[layer] = read_k[j], read_v[j]
                self._write_keys[layer], self._write_values[layer] = write_k[j], write_v[j]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new slots and return views of all slots, without a copy."""
        self._write_keys[layer_idx].copy_(key_states)
        self._write_values[layer_idx].copy_(value_states)
        return self.read_keys[layer_idx], self.read_values[layer_idx]

    def _forget_views(self) -> None:
        """Views would keep the old buffers alive while new ones are made."""
        for views in (self.read_keys, self.read_values, self._write_keys, self._write_values):
            views[:] = [None] * len(views)

    # rows

    def move(
        self,
        bases: Sequence[int],
        counts: Sequence[int],
        slots: Sequence[Sequence[int]],
        index: Tensor,
        fresh: int,
    ) -> None:
        """Commit `counts[b]` of a pass's slots behind row b's context, and count them.

        bases: where the pass wrote row b's slot 0; slots: host numbers; index: (B, T) the
        same on the device, of which only the first max(counts) columns are read; fresh: slots
        that the pass wrote.
        """
        lengths = self.lengths
        rows = len(lengths)
        settled = all(
            bases[b] == lengths[b] and list(slots[b][: counts[b]]) == list(range(counts[b])) for b in range(rows)
        )
        if not settled:
            most = max(counts)
            if rows == 1:
                source = index[0, :most].long() + bases[0]
                for buffer in (x for store in self.stores for x in store.buffers):
                    row = buffer[:, 0]
                    row[:, :, lengths[0] : lengths[0] + most] = row.index_select(2, source)
            elif self.one_by_one:
                source = index[:, :most].clamp(0, fresh - 1).long()
                for buffer in (x for store in self.stores for x in store.buffers):
                    for b, (base, length) in enumerate(zip(bases, lengths, strict=True)):
                        written = buffer[:, b, :, base : base + fresh]
                        buffer[:, b, :, length : length + most] = written.index_select(2, source[b])
            else:
                # What lies past a row's count is moved too: it is masked, and overwritten later.
                start = to_device([*bases, *lengths], index.device).view(2, rows, 1)
                offsets = torch.arange(most, device=index.device)
                source = index[:, :most].clamp(0, fresh - 1).long() + start[0]
                goal = start[1] + offsets
                for buffer in (x for store in self.stores for x in store.buffers):
                    taken = buffer[:, :rows].gather(3, _spread(source, buffer))
                    buffer[:, :rows].scatter_(3, _spread(goal, buffer), taken)
        for b in range(rows):
            lengths[b] += counts[b]

    def read(self, row: int) -> list[Tensor]:
        """A copy of a row's committed entries: (planes, heads, length, dim) for each buffer."""
        length = self.lengths[row]
        return [buffer[:, row, :, :length].clone() for store in self.stores for buffer in store.buffers]

    def write(self, row: int, planes: Sequence[Tensor], length: int) -> None:
        """Put the first `length` tokens of what `read` gave into a row that is not counted yet."""
        buffers = [buffer for store in self.stores for buffer in store.buffers]
        for buffer, plane in zip(buffers, planes, strict=True):
            buffer[:, row, :, :length].copy_(plane[:, :, :length])

    def release(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        last = len(self.lengths) - 1
        if row != last:
            for buffer in (x for store in self.stores for x in store.buffers):
                buffer[:, row, :, : self.lengths[last]] = buffer[:, last, :, : self.lengths[last]]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    # what models ask a cache for

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.past

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.past + self.fresh, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    # Models ask these for every mask; the answers never change.
    @property
    def is_sliding(self) -> list[bool]:
        return self._flags

    @property
    def is_linear(self) -> list[bool]:
        return self._flags

    @property
    def is_dummy(self) -> list[bool]:
        return self._flags

    def _recurrent(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel(
            "it keeps a recurrent or convolutional state besides keys and values, "
            "which cannot branch over a tree of drafted tokens"
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _recurrent
    has_previous_state = update_indexer = _recurrent


class RowLayer(CacheLayerMixin):
    """One layer's face, for models that look at `cache.layers`."""

    is_sliding = False

    def __init__(self, owner: RowCache, number: int) -> None:
        self._owner, self._number = owner, number
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        view: Tensor | None = self._owner.read_keys[self._number]
        return view

    @property
    def values(self) -> Tensor | None:
        view: Tensor | None = self._owner.read_values[self._number]
        return view

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._owner.update(key_states, value_states, self._number)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._owner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._owner.past

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class ProbeCache(RowCache):
    """Learns what each layer stores from one forward pass."""

    def __init__(self, layers: int) -> None:
        super().__init__([None] * layers)
        self.seen: dict[int, LayerShape] = {}
        self.updates = 0

    def begin(self, rows: slice, past: int, fresh: int) -> None:
        self.past, self.fresh = past, fresh

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.updates += 1
        if layer_idx >= len(self.layers) or layer_idx in self.seen or key_states.ndim != 4:
            raise UnsupportedModel(f"layer {layer_idx} stores its keys in a way of its own")
        self.seen[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype, key_states.device
        )
        self.read_keys[layer_idx], self.read_values[layer_idx] = key_states, value_states
        return key_states, value_states

    def shapes(self) -> list[LayerShape | None]:
        return [self.seen.get(i) for i in range(len(self.layers))]


def _spread(index: Tensor, buffer: Tensor) -> Tensor:
    """(B, T) as an index along a buffer's token axis: (planes, B, heads, T, dim), without a copy."""
    planes, _, heads, _, dim = buffer.shape
    return index[None, :, None, :, None].expand(planes, -1, heads, -1, dim)
