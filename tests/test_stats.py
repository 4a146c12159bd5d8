"""Intervals that cover, ties that are called ties, and a front that nothing beats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dash.stats import (
    Difference,
    holm,
    look_confidence,
    looks,
    mcnemar,
    paired_difference,
    pareto_front,
    t_quantile,
    t_tail,
    told_apart,
    windows_to_settle,
)


def neighbours(rng, n, lag):
    """An AR(1) series of unit variance: windows of one document, each a little like the one before."""
    drawn = rng.standard_normal(n + 40)
    for i in range(1, n + 40):
        drawn[i] = lag * drawn[i - 1] + math.sqrt(1 - lag * lag) * drawn[i]
    return drawn[40:]


def heavy(rng, n):
    """Window means of a KLD: 511 tokens of log-normal divergence in a window of log-normal difficulty; mean 1."""
    tokens = np.exp(1.5 * rng.standard_normal((n, 511)) - 1.125)
    return (tokens * np.exp(0.4 * rng.standard_normal((n, 1)) - 0.08)).mean(1)


DRAWS = {  # what a window's difference is around its true mean
    "independent": lambda rng, n: rng.standard_normal(n),
    "correlated with its neighbours": lambda rng, n: neighbours(rng, n, 0.3),
    "heavy-tailed as a KLD": lambda rng, n: heavy(rng, n) - 1.0,
    "log-normal": lambda rng, n: np.exp(rng.standard_normal(n)) - math.exp(0.5),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(("n", "most"), [(8, 1.0), (32, 0.975)])
def test_the_interval_holds_the_truth_nineteen_times_in_twenty(n, most, kind):
    """1,000 experiments of n windows that share their difficulty with the baseline's; seeded, so never flaky."""
    rng, truth, held = np.random.default_rng(0), 0.02, 0
    for trial in range(1_000):
        base = 2.5 + 0.4 * rng.standard_normal(n)
        ours = base + truth + 0.02 * DRAWS[kind](rng, n)
        found = paired_difference(ours.tolist(), base.tolist(), seed=trial)
        held += found.low <= truth <= found.high
    assert 0.925 <= held / 1_000 <= most


def test_windows_of_unequal_length_count_by_their_tokens():
    rng = np.random.default_rng(3)
    deltas, tokens = rng.normal(0.01, 0.02, 40), rng.integers(10, 500, 40)
    found = paired_difference(deltas.tolist(), [0.0] * 40, weights=tokens.tolist())
    assert found.mean == pytest.approx(float((deltas * tokens).sum() / tokens.sum()))
    same = [paired_difference(deltas.tolist(), [0.0] * 40, weights=w) for w in (None, [7] * 40)]
    assert same[0].low == pytest.approx(same[1].low) and same[0].p == pytest.approx(same[1].p)


def test_many_windows_are_joined_to_neighbours_and_keep_mean_and_width():
    deltas = np.random.default_rng(4).normal(0.01, 0.02, 5_000)
    found = paired_difference(deltas.tolist(), [0.0] * 5_000)
    assert found.mean == pytest.approx(float(deltas.mean()), rel=1e-12)
    assert found.half_width == pytest.approx(1.96 * 0.02 / math.sqrt(5_000), rel=0.25)  # a drawn lag widens by 15 %
    assert found.spread == pytest.approx(0.02, rel=0.25)


def test_the_p_value_is_five_per_cent_where_an_end_of_the_interval_is_zero():
    deltas = np.random.default_rng(5).normal(0.0, 1.0, 12)
    found = paired_difference(deltas.tolist(), [0.0] * 12)
    for end in (found.low, found.high):
        assert paired_difference((deltas - end).tolist(), [0.0] * 12).p == pytest.approx(0.05, rel=1e-6)


def test_the_windows_that_are_named_settle_a_tie_four_times_in_five():
    """Power is asked of independent windows whose true mean and spread are as seen."""
    seen = Difference(0.01, -0.01, 0.03, windows=8, spread=0.03)
    more, rng = windows_to_settle(seen), np.random.default_rng(6)
    settled = sum(
        not paired_difference(rng.normal(0.01, 0.03, 8 + more).tolist(), [0.0] * (8 + more), seed=i).is_tie
        for i in range(300)
    )
    assert 0.7 <= settled / 300 <= 0.9  # 80 %, less what positive lags widen, and three standard errors of 2.3 %


def test_what_is_settled_needs_no_windows_and_what_never_differs_cannot_be():
    assert windows_to_settle(Difference(1.0, 0.5, 1.5, p=0.01, windows=8, spread=1.0)) == 0
    assert windows_to_settle(Difference(1.0, 0.5, 1.5, p=0.01, windows=8, spread=1.0), family=28) > 0
    assert windows_to_settle(paired_difference([1.0] * 8, [1.0] * 8)) is None
    assert windows_to_settle(paired_difference([1.0, 2.0], [0.0, 0.0])) is None


def test_stopping_at_a_width_keeps_the_level_whatever_look_it_stops_at():
    """Peeking at 8, 16, 32 and 64 windows, heavy-tailed, until the interval is narrower than what chance decides."""
    rng, held, at = np.random.default_rng(7), 0, []
    for trial in range(500):
        deltas = 0.02 + 0.01 * (heavy(rng, 64) - 1.0)
        for look in looks(64):
            found = paired_difference(deltas[:look].tolist(), [0.0] * look, seed=trial, confidence=look_confidence(64))
            if found.half_width < 0.0025:
                break
        at.append(look)
        held += found.low <= 0.02 <= found.high
    assert held / 500 >= 0.925 and len(set(at)) > 1


def test_the_leader_of_many_equals_is_rarely_called_better():
    """Ten equal recipes, the one that looks best against the rest: in 95 % of experiments all are tied."""
    rng, wrong = np.random.default_rng(8), 0
    for trial in range(200):
        runs = (0.5 * rng.standard_normal(16) + rng.standard_normal((10, 16))).tolist()  # they share difficulty
        leader = min(range(10), key=lambda i: sum(runs[i]))
        others = runs[:leader] + runs[leader + 1 :]
        wrong += any(told_apart([paired_difference(run, runs[leader], seed=trial) for run in others]))
    assert wrong <= 17  # 10 in 200, and two standard errors of 3.1


def test_holm_is_that_of_its_paper_and_more_tests_make_it_stricter():
    p = [0.01, 0.013, 0.014, 0.19]
    assert holm(p) == [True, True, True, False]
    assert holm(p, family=6) == [False, False, False, False]


def test_pairing_sees_what_an_unpaired_comparison_cannot():
    rng = np.random.default_rng(1)
    base = 2.5 + 0.4 * rng.standard_normal(16)
    found = paired_difference((base + 0.01 + 0.002 * rng.standard_normal(16)).tolist(), base.tolist())
    assert not found.is_tie and found.low < 0.01 < found.high


def test_differences_that_are_all_the_same_are_certain_whatever_their_last_bit_says():
    found = paired_difference([0.1 + 0.3] * 7, [0.3] * 7, weights=[511.0] * 6 + [100.0])
    assert found.low == found.mean == found.high == pytest.approx(0.1) and found.p == 0.0


def test_few_windows_give_no_interval_and_so_a_tie():
    found = paired_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (found.mean, found.low, found.high, found.is_tie) == (2.0, None, None, True)


def test_weights_are_as_if_each_pair_stood_there_that_often():
    """Ten documents, one of them of 991 words: alone it moves the mean, and the interval with it."""
    ours, theirs, weights = [float(i) for i in range(10)], [0.0] * 10, [1.0] * 9 + [991.0]
    found = paired_difference(ours, theirs, weights=weights)
    assert found.mean == pytest.approx((36 + 9 * 991) / 1_000)
    assert found.low < found.mean < found.high + 0.1 and found.low < 8.0
    alike, plain = paired_difference(ours, theirs, weights=[3.0] * 10), paired_difference(ours, theirs)
    assert (alike.mean, alike.low, alike.high) == pytest.approx((plain.mean, plain.low, plain.high))


def test_samples_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        paired_difference([1.0], [1.0, 2.0])


def test_t_quantiles_are_the_tables():
    for df, expected in ((3, 3.182), (7, 2.365), (15, 2.131), (31, 2.040), (100, 1.984)):
        assert t_quantile(0.975, df) == pytest.approx(expected, rel=3e-4)
        assert t_tail(expected, df) == pytest.approx(0.05, rel=2e-3)


def test_one_needle_more_is_a_tie_and_ten_are_not():
    assert mcnemar([True] * 5 + [True], [True] * 5 + [False]) == 1.0
    assert mcnemar([True] * 10, [False] * 10) < 0.01


@given(st.lists(st.tuples(st.floats(), st.floats())))
def test_the_front_is_what_nothing_beats(points):
    front = pareto_front(points)
    finite = [p for p in points if all(map(math.isfinite, p))]
    for i in front:
        x, y = points[i]
        assert not any(a <= x and b >= y and (a, b) != (x, y) for a, b in finite)
    assert bool(front) == bool(finite)
