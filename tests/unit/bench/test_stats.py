"""Intervals, drift and the rule for "no difference"."""

import math

import numpy as np
import pytest

from dflash_verify.bench.stats import effect, interval, weighted_percentile


def test_the_interval_of_one_value_is_that_value():
    found = interval([3.5])
    assert (found.median, found.low, found.high, found.n) == (3.5, 3.5, 3.5, 1)


def test_values_that_are_not_numbers_are_left_out():
    assert interval([1.0, math.nan, math.inf]).n == 1
    assert interval([math.nan]) is None
    assert interval([]) is None


def test_the_same_values_give_the_same_interval():
    values = [float(v) for v in np.random.default_rng(3).normal(10, 1, 9)]
    assert interval(values) == interval(values)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    """600 samples of 12. For the median of 12 values the order-statistic interval x(3)..x(10) has 96.1 % (binomial); the
    bootstrap's is within one order statistic of it: x(4)..x(9) has 85.4 %, x(2)..x(11) 99.4 %. Four standard errors of
    the estimate (0.0144 at 85.4 %) are added on both sides."""
    rng = np.random.default_rng(11)
    hits = 0
    for trial in range(600):
        found = interval([float(v) for v in rng.normal(0, 1, 12)], seed=trial)
        hits += found.low <= 0 <= found.high
    assert 0.854 - 4 * 0.0144 < hits / 600 <= 1.0


def test_weighted_percentiles_of_a_list_one_can_count():
    values, weights = [30.0, 10.0, 20.0], [1.0, 8.0, 1.0]
    assert weighted_percentile(values, weights, 0.50) == 10.0
    assert weighted_percentile(values, weights, 0.80) == 10.0
    assert weighted_percentile(values, weights, 0.81) == 20.0
    assert weighted_percentile(values, weights, 0.99) == 30.0
    assert weighted_percentile([], [], 0.5) is None


SAME = [(100.0, 100.0)] * 6


@pytest.mark.parametrize(
    ("arm", "drift", "verdict"),
    [
        (1.20, 1.004, "faster"),
        (0.63, 1.004, "slower"),
        (1.02, 1.03, "no difference"),  # inside drift
        (0.98, 0.97, "no difference"),
        (1.00, 1.00, "no difference"),
    ],
)
def test_a_difference_inside_the_drift_is_none(arm, drift, verdict):
    pairs = [(arm * b, b) for b in (100.0, 101.0, 99.0, 100.5, 99.5, 100.2)]
    found = effect(pairs, [(drift * 100.0, 100.0)] * 6)
    assert found.verdict == verdict
    assert found.ratio.median == pytest.approx(arm)
    assert found.drift.median == pytest.approx(drift)


def test_a_difference_inside_its_interval_is_none():
    pairs = [(b * r, b) for b, r in zip([100.0] * 7, [1.3, 0.8, 1.2, 0.85, 1.25, 0.9, 1.1], strict=True)]
    found = effect(pairs, SAME)
    assert found.ratio.median == pytest.approx(1.1)
    assert found.verdict == "no difference"


def test_five_pairs_on_one_side_are_too_few():
    """Chance puts five of five on one side in 2 / 2^5 = 6 % of cases."""
    assert effect([(120.0, 100.0)] * 5, SAME).verdict == "too few runs"
    assert effect([(120.0, 100.0)] * 6, SAME).verdict == "faster"


def test_equal_arms_are_rarely_called_different():
    """400 comparisons of equal arms, 10 pairs each, no drift. Two-sided 95 % intervals of a median of 10: the next tighter
    order-statistic interval x(3)..x(8) misses in 10.9 %; plus four standard errors (1.6 %) of the estimate."""
    rng = np.random.default_rng(5)
    false = 0
    for _ in range(400):
        pairs = [(float(a), float(b)) for a, b in rng.normal(100, 3, (10, 2))]
        false += effect(pairs, [(100.0, 100.0)] * 10).verdict in ("faster", "slower")
    assert false / 400 < 0.109 + 4 * 0.016


def test_without_a_second_baseline_drift_is_unknown():
    assert effect([(120.0, 100.0)] * 6, []).drift is None
    assert effect([], SAME) is None
