"""Intervals that cover, ties that are called ties, and a front that nothing beats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dash import stats
from fp8dash.stats import mcnemar, paired_difference, pareto_front, t_quantile


@pytest.mark.parametrize("n", [8, 32])
def test_the_interval_holds_the_truth_nineteen_times_in_twenty(n):
    """1,000 experiments of n windows that share their difficulty with the baseline's; seeded, so never flaky."""
    rng, truth, held = np.random.default_rng(0), 0.02, 0
    for trial in range(1_000):
        base = 2.5 + 0.4 * rng.standard_normal(n)
        ours = base + truth + 0.02 * rng.standard_normal(n)
        found = paired_difference(ours.tolist(), base.tolist(), seed=trial)
        held += found.low <= truth <= found.high
    assert 925 <= held <= 975


def test_pairing_sees_what_an_unpaired_comparison_cannot():
    rng = np.random.default_rng(1)
    base = 2.5 + 0.4 * rng.standard_normal(16)
    found = paired_difference((base + 0.01 + 0.002 * rng.standard_normal(16)).tolist(), base.tolist())
    assert not found.is_tie and found.low < 0.01 < found.high


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


def test_many_pairs_are_resampled_piecemeal_with_the_same_result(monkeypatch):
    ours = np.random.default_rng(2).standard_normal(50).tolist()
    whole = paired_difference(ours, [0.0] * 50)
    monkeypatch.setattr(stats, "DRAWN_AT_ONCE", 700)
    assert paired_difference(ours, [0.0] * 50) == whole


def test_samples_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        paired_difference([1.0], [1.0, 2.0])


def test_t_quantiles_are_the_tables():
    for df, expected in ((3, 3.182), (7, 2.365), (15, 2.131), (31, 2.040), (100, 1.984)):
        assert t_quantile(0.975, df) == pytest.approx(expected, rel=0.002 if df > 3 else 0.01)


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
