"""What one forward pass is about: its rows, its place in the cache, its positions and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

Array = Any


class Pass:
    """What one forward pass is about; shared by all layers.

    first, rows: the rows it runs, first … first + rows - 1. past: the slot that it writes first.
    lengths: the committed tokens of its rows, before it. slots: N. depths: (B, N) int32 and
    tree: (B, N, N) bool for a packed beam; None for a causal chunk, where `past` is every row's length.
    extra_axis: masks have five axes, for attention that keeps the groups of heads apart. runs: the
    device may begin with its first layers while the host builds the rest.
    """

    def __init__(
        self,
        first: int,
        lengths: Sequence[int],
        slots: int,
        depths: Array | None = None,
        tree: Array | None = None,
        extra_axis: bool = False,
        runs: bool = False,
    ) -> None:
        self.first, self.rows = first, len(lengths)
        self.lengths = list(lengths)
        self.past = max(lengths)
        self.slots = slots
        self.extra_axis = extra_axis
        self.runs = runs
        self.tree = tree
        self.even = min(lengths) == self.past
        # A chunk, or a plain step of rows of one length, is what the stock model computes itself.
        self.stock = self.even and (tree is None or slots == 1)
        self.positions: Array | None = None
        self._starts: Array | None = None
        if not self.stock:
            assert depths is not None
            self._starts = mx.array(self.lengths, dtype=mx.int32)
            self.positions = depths + self._starts[:, None]
        self._masks: dict[tuple[int | None, bool], Array] = {}

    def mask(self, window: int | None, as_array: bool) -> Array | str | None:
        """What a slot may look at: bool (B, 1, N, past + N), or what mlx-lm uses for plain chunks."""
        if self.stock and (window is None or self.past + self.slots <= window) and not as_array:
            return "causal" if self.slots > 1 else None
        key = (window, as_array)
        if key not in self._masks:
            mask = self._stock_mask(window) if self.stock else self._tree_mask(window)
            if self.extra_axis and mask.ndim == 4:
                mask = mask[:, :, None]
            self._masks[key] = mask
        return self._masks[key]

    def _stock_mask(self, window: int | None) -> Array:
        places = mx.arange(self.past + self.slots)
        queries = places[self.past :][:, None]
        mask = places[None] <= queries
        return mask if window is None else mask & (queries < places[None] + window)

    def _tree_mask(self, window: int | None) -> Array:
        assert self.positions is not None and self._starts is not None and self.tree is not None
        places = mx.arange(self.past)[None, None]
        context = places < self._starts[:, None, None]
        tree = self.tree
        if window is not None:
            context = context & (self.positions[:, :, None] < places + window)
            tree = tree & (self.positions[:, :, None] < self.positions[:, None, :] + window)
        context = mx.broadcast_to(context, (self.rows, self.slots, self.past))
        return mx.concatenate([context, tree], axis=2)[:, None]
