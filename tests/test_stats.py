"""Intervals that cover, ties that are called ties, and a front that nothing beats."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dash.stats import (
    Difference,
    hits_difference,
    holm,
    judged,
    look_confidence,
    looks,
    mcnemar,
    paired_difference,
    pairs,
    pareto_front,
    t_quantile,
    t_tail,
    windows_to_settle,
    windows_to_tell,
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
        values = base + truth + 0.02 * DRAWS[kind](rng, n)
        difference = paired_difference(values.tolist(), base.tolist(), seed=trial)
        held += difference.low <= truth <= difference.high
    assert 0.925 <= held / 1_000 <= most


def test_windows_of_unequal_length_count_by_their_tokens():
    rng = np.random.default_rng(3)
    deltas, tokens = rng.normal(0.01, 0.02, 40), rng.integers(10, 500, 40)
    difference = paired_difference(deltas.tolist(), [0.0] * 40, weights=tokens.tolist())
    assert difference.mean == pytest.approx(float((deltas * tokens).sum() / tokens.sum()))
    same = [paired_difference(deltas.tolist(), [0.0] * 40, weights=w) for w in (None, [7] * 40)]
    assert same[0].low == pytest.approx(same[1].low) and same[0].p == pytest.approx(same[1].p)


def test_many_windows_are_joined_to_neighbours_and_keep_mean_and_width():
    deltas = np.random.default_rng(4).normal(0.01, 0.02, 5_000)
    difference = paired_difference(deltas.tolist(), [0.0] * 5_000)
    assert difference.mean == pytest.approx(float(deltas.mean()), rel=1e-12)
    normal = 1.96 * 0.02 / math.sqrt(5_000)
    assert difference.half_width == pytest.approx(normal, rel=0.25)  # a drawn lag widens by 15 %
    assert difference.spread == pytest.approx(0.02, rel=0.25)


def test_the_p_value_is_five_per_cent_where_an_end_of_the_interval_is_zero():
    deltas = np.random.default_rng(5).normal(0.0, 1.0, 12)
    difference = paired_difference(deltas.tolist(), [0.0] * 12)
    for end in (difference.low, difference.high):
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
    assert windows_to_settle(Difference(1.0, 0.5, 1.5, p=0.01, windows=8, spread=1.0).at(1 - 0.05 / 28)) > 0
    assert windows_to_settle(paired_difference([1.0] * 8, [1.0] * 8)) is None
    assert windows_to_settle(paired_difference([1.0, 2.0], [0.0, 0.0])) is None


def test_stopping_at_a_width_keeps_the_level_whatever_look_it_stops_at():
    """Peeking at 8, 16, 32 and 64 windows, heavy-tailed, until the interval is narrower than what chance decides."""
    rng, held, at = np.random.default_rng(7), 0, []
    for trial in range(500):
        deltas = 0.02 + 0.01 * (heavy(rng, 64) - 1.0)
        for look in looks(64):
            difference = paired_difference(
                deltas[:look].tolist(), [0.0] * look, seed=trial, confidence=look_confidence(64)
            )
            if difference.half_width < 0.0025:
                break
        at.append(look)
        held += difference.low <= 0.02 <= difference.high
    assert held / 500 >= 0.925 and len(set(at)) > 1


def test_the_leader_of_many_equals_is_rarely_called_better():
    """Ten equal recipes, the one that looks best against the rest: in 95 % of experiments all are tied."""
    rng, wrong = np.random.default_rng(8), 0
    for trial in range(200):
        runs = (0.5 * rng.standard_normal(16) + rng.standard_normal((10, 16))).tolist()  # they share difficulty
        leader = min(range(10), key=lambda i: sum(runs[i]))
        others = runs[:leader] + runs[leader + 1 :]
        behind = [paired_difference(run, runs[leader], seed=trial) for run in others]
        wrong += any(not difference.is_tie for difference in judged(behind, family=pairs(10)))
    assert wrong <= 17  # 10 in 200, and two standard errors of 3.1


def test_holm_is_that_of_its_paper_and_more_tests_make_it_stricter():
    p = [0.01, 0.013, 0.014, 0.19]
    assert holm(p) == [True, True, True, False]
    assert holm(p, family=6) == [False, False, False, False]


def test_pairing_sees_what_an_unpaired_comparison_cannot():
    rng = np.random.default_rng(1)
    base = 2.5 + 0.4 * rng.standard_normal(16)
    difference = paired_difference((base + 0.01 + 0.002 * rng.standard_normal(16)).tolist(), base.tolist())
    assert not difference.is_tie and difference.low < 0.01 < difference.high


def test_differences_that_are_all_the_same_are_certain_whatever_their_last_bit_says():
    difference = paired_difference([0.1 + 0.3] * 7, [0.3] * 7, weights=[511.0] * 6 + [100.0])
    assert difference.low == difference.mean == difference.high == pytest.approx(0.1) and difference.p == 0.0


def test_few_windows_give_no_interval_and_so_a_tie():
    difference = paired_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (difference.mean, difference.low, difference.high, difference.is_tie) == (2.0, None, None, True)


def test_weights_are_as_if_each_pair_stood_there_that_often():
    """Ten documents, one of them of 991 words: alone it moves the mean, and the interval with it."""
    values, others, weights = [float(i) for i in range(10)], [0.0] * 10, [1.0] * 9 + [991.0]
    difference = paired_difference(values, others, weights=weights)
    assert difference.mean == pytest.approx((36 + 9 * 991) / 1_000)
    assert difference.low < difference.mean < difference.high + 0.1 and difference.low < 8.0
    alike, plain = paired_difference(values, others, weights=[3.0] * 10), paired_difference(values, others)
    assert (alike.mean, alike.low, alike.high) == pytest.approx((plain.mean, plain.low, plain.high))


def test_samples_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        paired_difference([1.0], [1.0, 2.0])


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.integers(4, 40), st.integers(1, 3), st.floats(-2.0, 2.0).filter(lambda x: abs(x) > 1e-6),
    st.floats(-3.0, 3.0), st.sampled_from([0.0, 1e-12, 1e-6, 1e-3]), st.integers(0, 3),
)  # fmt: skip
def test_where_few_windows_differ_the_interval_stays_within_reach_of_the_data(n, odd, step, level, noise, seed):
    """Resamples without the odd windows vary by rounding alone, or next to nothing: they must not decide the width."""
    odd = min(odd, n - 2)
    others = [level] * n
    values = [level + noise * (i % 3) for i in range(n - odd)] + [level + step] * odd
    difference = paired_difference(values, others, neighbours=0, seed=seed)
    span = max(x - level for x in [*values, level]) - min(x - level for x in [*values, level])
    reach = 5 * span * (1 + 1e-9)  # an end may lie on the bound itself, and rounds
    assert difference.mean - reach <= difference.low <= difference.mean <= difference.high <= difference.mean + reach
    mirrored = paired_difference([2 * level - x for x in values], others, neighbours=0, seed=seed)
    assert mirrored.low == pytest.approx(-difference.high, abs=1e-6 * span + 1e-12)


def test_one_window_that_differs_among_ten_is_no_difference_of_millions():
    difference = paired_difference([0.5] * 9 + [1.0], [0.5] * 10, neighbours=0)
    assert difference.mean == pytest.approx(0.05) and -0.1 < difference.low < 0.0 < difference.high < 1.0


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.lists(st.floats(-1, 1), min_size=8, max_size=8), min_size=1, max_size=6))
def test_a_verdict_is_what_the_interval_beside_it_says(runs):
    """Holm's procedure by p and the interval at each verdict's own level never disagree."""
    differences = [paired_difference(run, [0.0] * 8) for run in runs]
    family = pairs(len(runs) + 1)
    fallen = holm([difference.p for difference in differences], family=family)
    assert [not difference.is_tie for difference in judged(differences, family=family)] == fallen


def test_an_open_comparison_says_how_many_windows_would_do():
    """Four windows of twelve times the divergence: not tied, and not apart."""
    rng = np.random.default_rng(9)
    few = paired_difference((0.6 + 0.6 * rng.standard_normal(4)).tolist(), [0.0] * 4).at(1 - 0.05 / 21)
    assert few.outcome(margin=0.054) == "open" and few.outcome(margin=10.0) == "tied"
    more = windows_to_tell(few, margin=0.054)
    many = paired_difference((0.6 + 0.6 * rng.standard_normal(4 + more)).tolist(), [0.0] * (4 + more))
    assert many.at(1 - 0.05 / 21).outcome(margin=0.054) == "apart"


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_hits_that_chance_alone_may_make_so_are_tied_by_their_interval(pairs_of_hits):
    hits, others = zip(*pairs_of_hits, strict=True)
    difference = hits_difference(hits, others)
    assert difference.low <= difference.mean <= difference.high
    if mcnemar(hits, others) > 0.05:
        assert difference.is_tie


def test_t_quantiles_are_the_tables():
    for df, expected in ((3, 3.182), (7, 2.365), (15, 2.131), (31, 2.040), (100, 1.984)):
        assert t_quantile(0.975, df) == pytest.approx(expected, rel=3e-4)
        assert t_tail(expected, df) == pytest.approx(0.05, rel=2e-3)


def test_one_needle_more_is_a_tie_and_ten_are_not():
    assert mcnemar([True] * 5 + [True], [True] * 5 + [False]) == 1.0
    assert mcnemar([True] * 10, [False] * 10) < 0.01


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.tuples(st.floats(), st.floats())))
def test_the_front_is_what_nothing_beats(points):
    front = pareto_front(points)
    finite = [p for p in points if all(map(math.isfinite, p))]
    for i in front:
        x, y = points[i]
        assert not any(a <= x and b >= y and (a, b) != (x, y) for a, b in finite)
    assert bool(front) == bool(finite)
