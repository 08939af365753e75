"""The reference backend: plain numpy, float32, for tests and as the oracle of the others."""

from portadraft.backends.numpy.ops import NumpyOps


def make_ops() -> NumpyOps:
    """The reference `Ops`."""
    return NumpyOps()


__all__ = ["NumpyOps", "make_ops"]
