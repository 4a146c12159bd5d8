"""Paired differences, ties and the Pareto front: numpy only.

Tokens inside a window are correlated, so windows are resampled, never tokens (seeded, 4,000 resamples).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4_000
CONFIDENCE = 0.95
FEWEST_WINDOWS = 4  # below this an interval says nothing
DRAWN_AT_ONCE = 4_000_000  # indices of resamples in memory at a time
SPEED_TIE = 0.05  # relative; repeated timings on one machine differ by about this much


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean paired difference with its 95 % interval; low and high are None where pairs are too few."""

    mean: float
    low: float | None
    high: float | None

    @property
    def is_tie(self) -> bool:
        """True where zero is inside the interval, or where nothing can be said."""
        return self.low is None or self.high is None or self.low <= 0.0 <= self.high


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], *, weights: Sequence[float] | None = None, seed: int = 0
) -> Difference:
    """The mean of ours - theirs over windows, with a bootstrap interval; raises ValueError on unequal lengths.

    With weights it is the weighted mean, and a pair is resampled together with its weight.

    The percentile interval is expanded for small samples (Hesterberg 2015, section 4.3): its level is set so that a
    normal sample of n windows is covered as a t interval covers it.

    >>> paired_difference([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    Difference(mean=0.0, low=0.0, high=0.0)
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired samples differ in length: {len(ours)} and {len(theirs)}")
    deltas = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    shares = np.ones(len(deltas)) if weights is None else np.asarray(weights, np.float64)
    mean, n = float((deltas * shares).mean() / shares.mean()), len(deltas)
    if n < FEWEST_WINDOWS:
        return Difference(mean, None, None)
    if not deltas.any():
        return Difference(0.0, 0.0, 0.0)
    means = _resampled(deltas, shares, seed)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(0.5 + CONFIDENCE / 2, n - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(mean, float(low), float(high))


def _resampled(deltas: NDArray[np.float64], weights: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Weighted means [RESAMPLES] of draws with replacement, drawn a few at a time."""
    n, draw = len(deltas), np.random.default_rng(seed)
    products, means, step = deltas * weights, np.empty(RESAMPLES), max(1, DRAWN_AT_ONCE // n)
    for start in range(0, RESAMPLES, step):
        picks = draw.integers(0, n, size=(min(step, RESAMPLES - start), n))
        means[start : start + step] = products[picks].mean(axis=1) / weights[picks].mean(axis=1)
    return means


def t_quantile(p: float, df: int) -> float:
    """Student's t quantile for df >= 3, by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).

    >>> round(t_quantile(0.975, 7), 2), round(t_quantile(0.975, 31), 2)
    (2.36, 2.04)
    """
    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Exact two-sided p that two sets of paired hits differ by chance alone.

    >>> mcnemar([True] * 6, [False] * 6), mcnemar([True, False], [True, False])
    (0.03125, 1.0)
    """
    won = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    n = won + lost
    tail: float = sum(math.comb(n, i) for i in range(min(won, lost) + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats: lower first coordinate, higher second. Not finite never enters.

    >>> pareto_front([(0.03, 1.0), (0.02, 1.5), (0.01, 0.9), (float("nan"), 9.0)])
    [2, 1]
    """
    known = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]
    order = sorted(known, key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    best = -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front
