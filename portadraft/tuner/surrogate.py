"""What measurements say about shapes that were not measured: a Gaussian process over the grid (scikit-optimize's).

It models log(measured ÷ predicted step cost), so that it starts from the prediction and learns where that is off;
the noise of a turn is known from repeats and not fitted.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.types import BeamShape
from portadraft.errors import MissingDependency

_LEAST_NOISE = 0.01
_FEW, _FAR = 4, math.log(1.5)
UNSEEN = 0.1
"""What a prediction is worth before anything was measured: a standard deviation of 10 %."""


class Surrogate:
    """log(measured ÷ predicted) over the grid, from a handful of noisy points."""

    def __init__(self, shapes: Sequence[BeamShape], most: int) -> None:
        self._points = np.array([_features(s, most) for s in shapes])
        self._index = {s: i for i, s in enumerate(shapes)}

    def posterior(self, ratios: Mapping[BeamShape, Sequence[float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation at every shape. ratios: log(measured ÷ predicted) of each turn, by shape."""
        by_shape = _without_hiccups({s: list(v) for s, v in ratios.items() if s in self._index and v})
        n = len(self._points)
        if not by_shape:
            return np.zeros(n), np.full(n, UNSEEN)
        noise = _noise(list(by_shape.values()))
        x = np.array([self._points[self._index[s]] for s in by_shape])
        y = np.array([statistics.median(v) for v in by_shape.values()])
        variance = np.array([noise**2 / len(v) for v in by_shape.values()])
        process = _process(variance, x.shape[1])
        centre = float(np.mean(y)) * len(y) / (len(y) + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bounds of length scales that a few points do not settle
            process.fit(x, y - centre)
            mean, deviation = process.predict(self._points, return_std=True)
        return np.asarray(mean) + centre, np.maximum(np.asarray(deviation), 1e-6)


def load_process() -> None:
    """Import what the search needs now, before a clock runs. Raises: MissingDependency."""
    _process(np.array([1e-4]), 3)


def _process(variance: NDArray[np.float64], dimensions: int) -> Any:
    try:
        from skopt.learning import GaussianProcessRegressor
        from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern
    except ImportError:
        raise MissingDependency(
            "the tuner's search needs scikit-optimize: pip install 'portadraft[tune]', or tune with --predict-only"
        ) from None
    kernel = ConstantKernel(0.05**2, (0.005**2, 0.5**2)) * Matern([1.0] * dimensions, [(0.2, 5.0)] * dimensions, nu=2.5)
    return GaussianProcessRegressor(
        kernel=kernel, alpha=variance, noise=None, normalize_y=False, n_restarts_optimizer=0, random_state=0
    )


def _features(shape: BeamShape, most: int) -> tuple[float, float, float]:
    slots = min(shape.nodes or most, 1 + shape.width * shape.length)
    return math.log2(shape.width) / 2, shape.length / 4, math.log2(slots) / 2


def _noise(groups: Sequence[Sequence[float]]) -> float:
    """The standard deviation of one turn, pooled over shapes that were measured again.

    From the median deviation: one turn that took four times as long would else hide all differences between shapes.
    """
    deviations: list[float] = []
    for values in groups:
        n, middle = len(values), statistics.median(values)
        if n > 1:
            apart = sorted(abs(v - middle) for v in values)[n % 2 :]  # without the median itself
            deviations += [d * math.sqrt(n / (n - 1)) for d in apart]
    typical = 1.4826 * statistics.median(deviations) if deviations else 0.0
    pooled = math.sqrt((len(deviations) * typical**2 + 4 * 0.02**2) / (len(deviations) + 4))  # starts from 2 %
    return max(pooled, _LEAST_NOISE)


def _without_hiccups(ratios: dict[BeamShape, list[float]]) -> dict[BeamShape, list[float]]:
    """Without shapes of which the only turn was far slower than the rest: another turn must say so, too."""
    if len(ratios) < _FEW:
        return ratios
    middle = statistics.median(statistics.median(v) for v in ratios.values())
    return {s: v for s, v in ratios.items() if len(v) > 1 or v[0] < middle + _FAR}


def expected_improvement(mean: NDArray[np.float64], deviation: NDArray[np.float64], best: float) -> NDArray[np.float64]:
    """Of log tokens per second over the best known."""
    z = (mean - best) / deviation
    normal = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z])
    gain: NDArray[np.float64] = (mean - best) * below + deviation * normal
    return gain
