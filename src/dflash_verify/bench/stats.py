"""Medians, bootstrap intervals and the rule for "no difference".

numpy instead of scipy.stats.bootstrap: scipy is no dependency of vLLM's, and a percentile bootstrap of a median is one
line. BCa would not help: with five runs its acceleration term is as noisy as the median.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
# With five pairs all on one side the interval excludes 1, which chance does in 2 / 2^5 = 6 % of cases; with six, in 3 %.
_MIN_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % percentile-bootstrap interval over n independent runs."""

    median: float
    low: float
    high: float
    n: int


def interval(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Median and 95 % interval; None without values. One value has the interval [value, value]: n says so."""
    finite = np.asarray([v for v in values if v is not None and math.isfinite(v)], dtype=float)
    if finite.size == 0:
        return None
    picks = np.random.default_rng(seed).integers(0, finite.size, (_RESAMPLES, finite.size))
    low, high = np.quantile(np.median(finite[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(finite)), float(low), float(high), int(finite.size))


def weighted_percentile(values: Sequence[float], weights: Sequence[float], q: float) -> float | None:
    """The smallest value at which at least the share q of the weight is reached; None without weight."""
    if not values or sum(weights) <= 0:
        return None
    order = np.argsort(np.asarray(values, dtype=float), kind="stable")
    cumulative = np.cumsum(np.asarray(weights, dtype=float)[order])
    # The epsilon keeps 0.5 * 10 from landing beyond 5.0 by a rounding error.
    index = int(np.searchsorted(cumulative, q * cumulative[-1] * (1 - 1e-12)))
    return float(np.asarray(values, dtype=float)[order][index])


@dataclass(frozen=True, slots=True)
class Effect:
    """One arm against the baseline around it.

    ratio: arm / baseline of the same prompt, repeat and pass (1.2: 20 % faster), median and interval over the pairs.
    drift: second baseline / first baseline, the same way; None when there is only one.
    verdict: "faster", "slower", "no difference" or "too few runs".
    """

    ratio: Interval
    drift: Interval | None
    verdict: str


def effect(pairs: Sequence[tuple[float, float]], drift_pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """Judge (arm, baseline) pairs; drift_pairs are (second baseline, first baseline).

    A difference is one only if its interval excludes 1 and it is larger than the drift between the two baselines.
    """
    ratio = interval([a / b for a, b in pairs if b > 0])
    if ratio is None:
        return None
    drift = interval([b / a for b, a in drift_pairs if a > 0])
    drift_size = abs(drift.median - 1) if drift is not None else 0.0
    if ratio.n < _MIN_PAIRS:
        verdict = "too few runs"
    elif ratio.low <= 1 <= ratio.high or abs(ratio.median - 1) <= drift_size:
        verdict = "no difference"
    else:
        verdict = "faster" if ratio.median > 1 else "slower"
    return Effect(ratio, drift, verdict)
