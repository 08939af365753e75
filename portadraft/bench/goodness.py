"""How far counts are from the probabilities that they should follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def chi_square(counts: Any, probabilities: Any, least: float = 5.0) -> tuple[float, int, float]:
    """Pearson's chi-square, its degrees of freedom, and the probability of one at least that large.

    counts, probabilities: of the same cells; probabilities sum to 1. Cells whose expected count is
    below `least` are pooled. A count where the probability is 0 gives (inf, …, 0.0). The probability
    is by Wilson and Hilferty's cube root (1931), right to a tenth of itself down to 0.001.
    """
    counts, probabilities = np.ravel(counts).astype(np.float64), np.ravel(probabilities).astype(np.float64)
    expected = counts.sum() * probabilities
    if (counts[probabilities == 0] > 0).any():
        return math.inf, 1, 0.0
    small = expected < least
    seen = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    if wanted[-1] < least and len(wanted) > 1:  # a rest too small to stand alone goes to the smallest cell
        smallest = int(np.argmin(wanted[:-1]))
        seen[smallest] += seen[-1]
        wanted[smallest] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    if degrees == 0:
        return 0.0, 0, 1.0
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return statistic, degrees, 0.5 * math.erfc(z / math.sqrt(2))


def total_variation(counts: Any, probabilities: Any) -> float:
    """Half the sum of |share - probability| over all cells."""
    counts = np.ravel(counts).astype(np.float64)
    return float(np.abs(counts / counts.sum() - np.ravel(probabilities)).sum() / 2)


def fair_variation(probabilities: Any, draws: int) -> float:
    """The total variation that so many fair draws have on average.

    Exact: the mean absolute deviation of each cell's count is De Moivre's (1730),
    2 k C(n, k) p^k (1 - p)^(n - k + 1) with k = floor(n p) + 1.
    """
    p = np.ravel(probabilities).astype(np.float64)
    p = p[(p > 0) & (p < 1)]
    k = np.minimum(np.floor(draws * p) + 1, draws)
    factorial = np.vectorize(math.lgamma, otypes=[np.float64])
    ways = math.lgamma(draws + 1) - factorial(k + 1) - factorial(draws - k + 1)
    deviation = np.exp(np.log(2 * k) + ways + k * np.log(p) + (draws - k + 1) * np.log1p(-p))
    return float(deviation.sum() / (2 * draws))
