"""Single numbers as callers pass them: Python's, and those of array libraries that register as such (numpy.float32)."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def as_integer(value: Any) -> int | None:
    """The integer that `value` is; None for what is none (True, 2.0, "2")."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, Integral) else None


def as_number(value: Any) -> float | None:
    """The number that `value` is, infinite beyond float64; None for what is none (True, "2")."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if bool(value > 0) else -math.inf  # type: ignore[operator]


def as_flag(value: Any) -> bool | None:
    """The truth value that `value` is, numpy's own included; None for what is none (1, "no")."""
    if isinstance(value, bool):
        return value
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if is_numpys else None
