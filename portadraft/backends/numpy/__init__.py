"""The reference backend: plain numpy, for tests and as the oracle of the others."""

from typing import Any

from portadraft.backends.numpy.ops import NumpyOps
from portadraft.backends.numpy.target import NumpyConfig, NumpyTarget


def make_ops() -> NumpyOps:
    """The reference `Ops`."""
    return NumpyOps()


def make_target(seed: int = 0, **sizes: Any) -> NumpyTarget:
    """A small random transformer; `sizes` are those of `NumpyTarget.random`."""
    return NumpyTarget.random(seed, **sizes)


__all__ = ["NumpyConfig", "NumpyOps", "NumpyTarget", "make_ops", "make_target"]
