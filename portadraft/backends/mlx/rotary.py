"""Rotary positions per token, for models that know one offset per row.

`mx.fast.rope` takes an offset for each row of a batch but not for each token. So the tokens are
folded into the batch, (B, H, N, D) → (B·N, H, 1, D), where each is a row with an offset of its own.
The function is swapped while a pass's graph is built, which reaches every rotary class and the
models that have none. The swap is the process's; what it does depends on the thread, so another
thread's models never notice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from portadraft.errors import UnsupportedModel

Array = Any

_lock = threading.Lock()
_users = 0
_stock: Any = None
_local = threading.local()


@contextmanager
def positions(places: Array | None) -> Iterator[None]:
    """Within it, this thread's calls of `mx.fast.rope` rotate token [b, n] by places[b, n], (B, N) int32.

    None leaves the calls alone.
    """
    if places is None:
        yield
        return
    _install()
    before = getattr(_local, "places", None)
    _local.places = places
    try:
        yield
    finally:
        _local.places = before
        _remove()


def _install() -> None:
    global _users, _stock
    with _lock:
        if _users == 0:
            _stock = mx.fast.rope
            vars(mx.fast)["rope"] = _rope
        _users += 1


def _remove() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and mx.fast.rope is _rope:
            vars(mx.fast)["rope"] = _stock


def _rope(x: Array, *args: Any, **kwargs: Any) -> Array:
    places = getattr(_local, "places", None)
    if places is None:
        return _stock(x, *args, **kwargs)
    rows, slots = places.shape
    if x.ndim not in (3, 4) or x.shape[0] != rows or x.shape[-2] != slots:
        raise UnsupportedModel(
            f"it rotates an array of shape {tuple(x.shape)}, expected (rows, heads, slots, size) with {rows} rows "
            f"and {slots} slots"
        )
    kwargs["offset"] = places.reshape(-1)
    size = x.shape[-1]
    if slots == 1:
        return _stock(x, *args, **kwargs)
    if x.ndim == 3:
        return _stock(x.reshape(rows * slots, 1, size), *args, **kwargs).reshape(x.shape)
    heads = x.shape[1]
    folded = x.transpose(0, 2, 1, 3).reshape(rows * slots, heads, 1, size)
    turned = _stock(folded, *args, **kwargs)
    return turned.reshape(rows, slots, heads, size).transpose(0, 2, 1, 3)
