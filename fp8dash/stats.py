"""Paired differences, ties, how many windows would settle one, and the Pareto front: numpy only.

Tokens inside a window are correlated, so windows are resampled, never tokens (seeded, 4,000 resamples).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4_000
CONFIDENCE = 0.95
SIGNIFICANT = 0.05  # p of hits, whose test has no interval
FEWEST_WINDOWS = 4  # below this an interval says nothing
MOST_UNITS = 256  # resampled; more windows than this are first joined to neighbours, which keeps their correlation
ROUNDING = 1e-12  # relative: differences that vary less than this are all the same
LEAST_ERROR = 0.1  # of the sample's standard error: a resample that happens to vary less is taken to vary this much
STIFFEST = 0.9  # of a lag-1 correlation that is believed: beyond it the windows are one
POWER = 0.8  # the chance with which as many windows as are named settle a difference that stays as it is
FIRST_LOOK = 8  # windows before a run may stop early
SPEED_TIE = 0.05  # relative; repeated timings on one machine differ by about this much

Floats = NDArray[np.float64]
Outcome = Literal["apart", "tied", "open"]  # of a comparison; open: too few windows to say either


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean paired difference with its interval; low and high are None where pairs are too few."""

    mean: float
    low: float | None
    high: float | None
    p: float = 1.0  # two-sided, of no difference; 0.05 where an end of the 95 % interval is zero
    windows: int = 0
    spread: float = 0.0  # standard deviation of one window's difference, what neighbours share counted in
    confidence: float = CONFIDENCE  # of the interval

    @property
    def is_tie(self) -> bool:
        """True where zero is inside the interval, or where nothing can be said."""
        return self.low is None or self.high is None or self.low <= 0.0 <= self.high

    @property
    def half_width(self) -> float:
        """Half the interval's width; infinite where there is none."""
        return math.inf if self.low is None or self.high is None else (self.high - self.low) / 2

    def at(self, confidence: float) -> "Difference":
        """The same difference with its interval at another level: it holds zero where p is above 1 - confidence.

        >>> Difference(0.02, -0.01, 0.05, p=0.14, windows=8).at(0.99).low < -0.02
        True
        """
        if self.low is None or self.high is None:
            return replace(self, confidence=confidence)
        df = max(1, min(self.windows, MOST_UNITS) - 1)
        wider = t_quantile((1 + confidence) / 2, df) / t_quantile((1 + self.confidence) / 2, df)
        low, high = (self.mean + wider * (end - self.mean) for end in (self.low, self.high))
        return replace(self, low=low, high=high, confidence=confidence)

    def outcome(self, margin: float) -> Outcome:
        """What the interval says: apart where zero is outside it, tied where it is within `margin` of the mean at most.

        An interval that holds zero and differences that matter as well (`margin`, in the difference's unit) settles
        nothing.

        >>> [Difference(0.02, low, 0.05).outcome(margin=0.04) for low in (0.01, -0.01, -0.09, None)]
        ['apart', 'tied', 'open', 'open']
        """
        if not self.is_tie:
            return "apart"
        return "tied" if self.half_width <= margin else "open"


def paired_difference(
    values: Sequence[float],
    others: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    neighbours: int = 1,
) -> Difference:
    """The mean of values - others over windows, with its interval; raises ValueError on unequal lengths.

    With weights it is the weighted mean, and a pair is resampled together with its weight. On each side the widest of
    three intervals: the studentized bootstrap, which follows a heavy tail (Efron and Tibshirani 1993, chapter 12), the
    percentile one, and Student's t, which holds where windows are too few to show a tail. They are widened by
    sqrt((1 + r) / (1 - r)), r the correlation of neighbours where it is positive (the variance of an AR(1) process's
    mean), corrected for its bias at few windows (Kendall 1954); `neighbours` is 0 for pairs in no order, as documents.

    >>> paired_difference([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    Difference(mean=0.0, low=0.0, high=0.0, p=1.0, windows=4, spread=0.0, confidence=0.95)
    """
    deltas, masses = _units(values, others, weights)
    power = math.frexp(float(np.abs(deltas).max()))[1]
    scaled = _interval(
        np.ldexp(deltas, -power), masses, len(values), confidence, neighbours, seed
    )  # squares stay in range
    low, high = (None if end is None else math.ldexp(end, power) for end in (scaled.low, scaled.high))
    return replace(
        scaled, mean=math.ldexp(scaled.mean, power), low=low, high=high, spread=math.ldexp(scaled.spread, power)
    )


def _interval(
    deltas: Floats, masses: Floats, windows: int, confidence: float, neighbours: int, seed: int
) -> Difference:
    mean, n = float(deltas @ masses / masses.sum()), len(deltas)
    if n < FEWEST_WINDOWS:
        return Difference(mean, None, None, windows=windows, confidence=confidence)
    pulls = masses / masses.mean() * (deltas - mean)
    widening = _widening(pulls) if neighbours else 1.0
    spread = float(pulls.std(ddof=1)) * widening * math.sqrt(windows / n)
    if np.abs(pulls).max() <= ROUNDING * np.abs(deltas).max():
        return Difference(mean, mean, mean, float(mean == 0.0), windows, confidence=confidence)
    error, critical = float(pulls.std(ddof=1)) / math.sqrt(n), t_quantile((1 + confidence) / 2, n - 1)
    below, above = (
        widening * max(side, error * critical) for side in _reach(deltas, masses, mean, error, confidence, seed)
    )
    p = t_tail(abs(mean) / (below if mean > 0 else above) * critical, n - 1)
    return Difference(mean, mean - below, mean + above, p, windows, spread, confidence)


def _units(values: Sequence[float], others: Sequence[float], weights: Sequence[float] | None) -> tuple[Floats, Floats]:
    """Differences and weights of what is resampled: windows, or as many groups of neighbours as are allowed."""
    if len(values) != len(others) or not values or (weights is not None and len(weights) != len(values)):
        raise ValueError(f"paired samples differ in length: {len(values)} and {len(others)}")
    deltas = np.asarray(values, np.float64) - np.asarray(others, np.float64)
    masses = np.ones_like(deltas) if weights is None else np.asarray(weights, np.float64)
    if len(deltas) <= MOST_UNITS:
        return deltas, masses
    starts = np.arange(MOST_UNITS) * len(deltas) // MOST_UNITS
    joined = np.add.reduceat(masses, starts)
    return np.add.reduceat(deltas * masses, starts) / joined, joined


def _reach(
    deltas: Floats, masses: Floats, mean: float, error: float, confidence: float, seed: int
) -> tuple[float, float]:
    """How far resampled means put the interval's ends below and above the mean: studentized, or as they lie.

    As they lie they see what an error does not: that all may hang on one window of great weight. A resample that leaves
    out the few windows which differ has next to no error of its own, and in its place a rounding error of its sums:
    its studentized shift would be any number. Its error is bounded from below (as in Polansky 2000, who adds to it).
    """
    n, centred = len(deltas), masses * (deltas - mean)
    picks = _resamples(n, seed)
    moments = (centred, masses, centred**2, centred * masses, masses**2)
    pull, mass, pull2, both, mass2 = (values[picks].sum(1) for values in moments)
    shifts = pull / mass  # of the resample's mean from the mean
    errors = np.sqrt(np.maximum(pull2 - 2 * shifts * both + shifts**2 * mass2, 0.0) / (1 - 1 / n)) / mass
    errors = np.maximum(errors, LEAST_ERROR * error)
    varied = picks.min(1) < picks.max(1)  # a resample of one window over and over has no error
    tail = (1 - confidence) / 2 / (1 + 30 / n**2)  # few windows seldom show a heavy tail: found by simulation
    low, high = error * np.quantile(shifts[varied] / errors[varied], [tail, 1 - tail])
    least, most = np.quantile(shifts, [tail, 1 - tail])
    return max(float(high), -float(least)), max(-float(low), float(most))


@lru_cache(maxsize=8)
def _resamples(n: int, seed: int) -> NDArray[np.int64]:
    """The windows that each resample draws [RESAMPLES, n]."""
    return np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, n))


def _widening(pulls: Floats) -> float:
    """What the correlation of neighbours does to the standard error of a mean; at least 1."""
    size = float(pulls @ pulls)
    if not size:
        return 1.0
    lag = float(pulls[1:] @ pulls[:-1]) / size
    lag += (1 + 4 * max(lag, 0.0)) / len(pulls)
    lag = min(max(lag, 0.0), STIFFEST)
    return math.sqrt((1 + lag) / (1 - lag))


def windows_to_settle(difference: Difference) -> int | None:
    """How many more windows would settle a tie with a chance of 80 %, were the difference to stay as it is.

    0 where there is no tie at the interval's own level; None where nothing can be said, as between runs without any
    difference.

    >>> windows_to_settle(Difference(0.01, -0.01, 0.03, p=0.3, windows=8, spread=0.025))
    43
    """
    level = difference.confidence
    if difference.p <= 1 - level:
        return 0
    if difference.low is None or not difference.mean or not difference.spread:
        return None
    wished = abs(difference.mean) / difference.spread  # in standard deviations of a window
    power, n = NormalDist().inv_cdf(POWER), max(difference.windows, FEWEST_WINDOWS)
    for _ in range(8):  # the t quantile hardly depends on n: this converges at once
        tail = t_quantile(0.5 + level / 2, min(n, MOST_UNITS) - 1)
        n = max(math.ceil(((tail + power) / wished) ** 2), FEWEST_WINDOWS)
    return max(1, n - difference.windows)


def windows_to_tell(difference: Difference, margin: float) -> int | None:
    """How many more windows would make an open comparison apart or tied, whichever comes first; None where unknown.

    >>> windows_to_tell(Difference(0.01, -0.07, 0.09, p=0.7, windows=4, spread=0.05), margin=0.04)
    12
    """
    settled = windows_to_settle(difference)
    if difference.low is None or not margin > 0:
        return settled
    narrow = math.ceil(difference.windows * (difference.half_width / margin) ** 2) - difference.windows
    return max(1, narrow) if settled is None else min(max(1, narrow), settled)


def looks(windows: int) -> tuple[int, ...]:
    """After how many windows a run that may stop early is looked at: 8, twice as many each time, and the last.

    >>> looks(5), looks(8), looks(40)
    ((5,), (8,), (8, 16, 32, 40))
    """
    counts = []
    at = FIRST_LOOK
    while at < windows:
        counts.append(at)
        at *= 2
    return (*counts, windows)


def look_confidence(windows: int) -> float:
    """The level of each look's interval, so that all looks together hold with 95 % (Bonferroni).

    >>> look_confidence(8), look_confidence(40)
    (0.95, 0.9875)
    """
    return 1 - (1 - CONFIDENCE) / len(looks(windows))


def pairs(count: int) -> int:
    """How many pairs so many runs make: what a leader that these very numbers picked is judged among.

    >>> pairs(2), pairs(8)
    (1, 28)
    """
    return count * (count - 1) // 2


def judged(differences: Sequence[Difference], *, family: int = 0) -> list[Difference]:
    """Each difference with its interval at the level at which Holm's procedure judged it: 95 % for all together.

    What holds zero is not told apart, so that a verdict and the interval beside it never disagree. `family` counts
    tests that are not given, too; a leader and its rivals make `pairs(rivals + 1)`, since these numbers picked the
    leader.

    >>> strong, weak = (Difference(1.0, 1 - r, 1 + r, p, 8) for r, p in ((0.5, 0.001), (1.2, 0.09)))
    >>> [round(difference.confidence, 3) for difference in judged([weak, strong], family=3)]
    [0.975, 0.983]
    """
    family = max(family, len(differences))
    order = sorted(range(len(differences)), key=lambda i: differences[i].p)
    fallen = holm([difference.p for difference in differences], family=family)
    levels = {i: 1 - (1 - CONFIDENCE) / (family - step) for step, i in enumerate(order) if fallen[i]}
    rest = 1 - (1 - CONFIDENCE) / max(1, family - len(levels))
    return [difference.at(levels.get(i, rest)) for i, difference in enumerate(differences)]


def holm(p_values: Sequence[float], *, family: int = 0) -> list[bool]:
    """Which hypotheses fall at 5 % for all together (Holm 1979); `family` counts tests whose p is not given, too.

    >>> holm([0.01, 0.04, 0.03]), holm([0.01, 0.04, 0.03], family=6)
    ([True, False, False], [False, False, False])
    """
    family, fallen = max(family, len(p_values)), [False] * len(p_values)
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > (1 - CONFIDENCE) / (family - step):
            break
        fallen[index] = True
    return fallen


def t_tail(t: float, df: int) -> float:
    """The chance that Student's t is further from zero than `t`, either way (Abramowitz and Stegun 26.7.3 and 4).

    >>> round(t_tail(2.365, 7), 4), round(t_tail(2.0, 8), 4), t_tail(0.0, 7)
    (0.05, 0.0805, 1.0)
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    square, odd = math.cos(angle) ** 2, df % 2
    total, term = 0.0, 1.0
    for k in range(1, df // 2 + 1):
        total += term
        term *= square * (2 * k - 1 + odd) / (2 * k + odd)
    inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1.0 - inside)


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: int) -> float:
    """Student's t quantile for p >= 0.5.

    >>> round(t_quantile(0.975, 7), 3), round(t_quantile(0.975, 31), 3), t_quantile(0.5, 3)
    (2.365, 2.04, 0.0)
    """
    low, high = 0.0, 1.0
    while t_tail(high, df) > 2 * (1 - p):
        low, high = high, 2 * high
    for _ in range(60 if p > 0.5 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 2 * (1 - p) else (low, middle)
    return low


def mcnemar(hits: Sequence[bool], others: Sequence[bool]) -> float:
    """Exact two-sided p that two sets of paired hits differ by chance alone.

    >>> mcnemar([True] * 6, [False] * 6), mcnemar([True, False], [True, False])
    (0.03125, 1.0)
    """
    won = sum(a and not b for a, b in zip(hits, others, strict=True))
    lost = sum(b and not a for a, b in zip(hits, others, strict=True))
    n = won + lost
    tail: float = sum(math.comb(n, i) for i in range(min(won, lost) + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def hits_difference(hits: Sequence[bool], others: Sequence[bool]) -> Difference:
    """The difference of two shares of paired hits: the bootstrap's interval, and all of McNemar's within it.

    McNemar's exact test is of the pairs that differ: the share of them that we won has Clopper and Pearson's interval,
    which holds one half, and so the difference zero, where the test does not reject. How many pairs differ is the
    bootstrap's to say.

    >>> found = hits_difference([True] * 8 + [False] * 8, [False] * 16)
    >>> found.mean, found.low > 0, found.p < 0.05
    (0.5, True, True)
    """
    won = sum(a and not b for a, b in zip(hits, others, strict=True))
    lost = sum(b and not a for a, b in zip(hits, others, strict=True))
    n, count = won + lost, len(hits)
    shares = (_least_share(won, n), 1 - _least_share(lost, n)) if n else (0.5, 0.5)
    low, high = ((2 * share - 1) * n / count for share in shares)
    resampled = paired_difference([float(x) for x in hits], [float(x) for x in others], neighbours=0)
    if resampled.low is not None and resampled.high is not None:
        low, high = min(low, resampled.low), max(high, resampled.high)
    return replace(resampled, low=low, high=high, p=max(mcnemar(hits, others), resampled.p))


def _least_share(hits: int, n: int) -> float:
    """The lower end of Clopper and Pearson's 95 % interval of the share behind `hits` of n."""
    if not hits:
        return 0.0
    ways = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(hits, n + 1)])
    seen = np.arange(hits, n + 1)

    def at_least(share: float) -> float:
        return float(np.exp(ways + seen * math.log(share) + (n - seen) * math.log1p(-share)).sum())

    return _bisected(lambda share: at_least(share) > SIGNIFICANT / 2, 0.0, 1.0)


def _bisected(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds from some point on begins to hold."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return low


def hits_tie(hits: Sequence[bool], others: Sequence[bool]) -> bool:
    """True where chance alone may make two sets of paired hits differ so (McNemar, 5 %)."""
    return mcnemar(hits, others) > SIGNIFICANT


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats: lower first coordinate, higher second. Not finite never enters.

    >>> pareto_front([(0.03, 1.0), (0.02, 1.5), (0.01, 0.9), (float("nan"), 9.0)])
    [2, 1]
    """
    finite = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]
    order = sorted(finite, key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    best = -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front
