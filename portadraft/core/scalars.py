"""Numbers as callers pass them: Python's, and those of array libraries (numpy.float32, an array of no dimension)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


def as_integer(value: Any) -> int | None:
    """The integer that `value` is; None for what is none (True, 2.0, "2")."""
    if type(value) is int:
        return value
    number = _scalar(value)
    if isinstance(number, bool):
        return None
    return int(number) if isinstance(number, Integral) else None


def as_number(value: Any) -> float | None:
    """The number that `value` is, infinite beyond float64; None for what is none (True, "2")."""
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf if bool(number > 0) else -math.inf  # type: ignore[operator]


def as_flag(value: Any) -> bool | None:
    """The truth value that `value` is; None for what is none (1, "no")."""
    flag = _scalar(value)
    return flag if isinstance(flag, bool) else None


def as_items(value: Any) -> list[Any] | None:
    """What a list, set, range, iterator or array of one dimension holds; None for anything else."""
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        return None
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return _held(value, "tolist") if len(shape) == 1 else None
    return list(value) if isinstance(value, Iterable) else None


def _scalar(value: Any) -> Any:
    """What an array of no dimension holds; anything else as it is."""
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or shape:
        return value
    held = _held(value, "item")
    return value if held is None else held


def _held(array: Any, method: str) -> Any:
    """The array's content in Python's own types; None where it cannot be read (torch's device "meta")."""
    try:
        return getattr(array, method)()
    except Exception:  # whatever a library raises there
        return None
