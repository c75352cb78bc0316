"""Coverage is counted with fixed seeds: how often an interval holds the true value of a process that is known."""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from charonia.tools.perf import intervals
from charonia.tools.results.records import Estimate

Floats = NDArray[np.float64]


def autoregressive(random: np.random.Generator, count: int, correlation: float) -> Floats:
    """Samples around 50, each resembling the one before it."""
    noise = random.normal(size=count)
    found = np.empty(count)
    at = noise[0] / np.sqrt(1 - correlation**2)
    for index in range(count):
        at = correlation * at + noise[index]
        found[index] = at
    return found + 50


def share_of(runs: int, held: Callable[[np.random.Generator], bool]) -> float:
    random = np.random.default_rng(3)
    return sum(held(random) for _ in range(runs)) / runs


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_a_mean_s_interval_holds_it_as_often_as_it_says(correlation: float) -> None:
    def held(random: np.random.Generator) -> bool:
        found = intervals.mean_interval(autoregressive(random, 2000, correlation), 0.95)
        return found.low <= 50 <= found.high

    assert share_of(120, held) >= 0.9


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_percentile_s_interval_holds_it_as_often_as_it_says(correlation: float) -> None:
    true = 50 + NormalDist().inv_cdf(0.9) / np.sqrt(1 - correlation**2)

    def held(random: np.random.Generator) -> bool:
        found = intervals.percentile_interval(autoregressive(random, 2000, correlation), 90, 0.95)
        return bool(found.low <= true <= found.high)

    assert share_of(120, held) >= 0.88


def test_a_rate_s_interval_holds_it_as_often_as_it_says() -> None:
    def held(random: np.random.Generator) -> bool:
        times = np.cumsum(random.exponential(1e7, 1000)).astype(np.int64)
        found = intervals.rate_interval(times[times < 5_000_000_000], 0, 5_000_000_000, 0.95)
        return found.low <= 100 <= found.high

    assert share_of(150, held) >= 0.9


def test_more_samples_make_a_tighter_interval() -> None:
    random = np.random.default_rng(1)

    few, many = (intervals.mean_interval(random.normal(50, 5, count), 0.95) for count in (100, 10_000))

    assert many.relative_half_width < few.relative_half_width / 3


def test_too_few_samples_have_no_interval() -> None:
    few = np.arange(5.0)

    assert intervals.mean_interval(few, 0.95) == Estimate.exact(2.0)
    assert intervals.percentile_interval(few, 50, 0.95) == Estimate.exact(2.0)
    assert intervals.rate_interval(few.astype(np.int64), 0, 10**9, 0.95) == Estimate.exact(5.0)
    assert intervals.mean_interval(few[:0], 0.95) == Estimate.exact(0.0)
    assert intervals.percentile_interval(few[:0], 50, 0.95) == Estimate.exact(0.0)
    assert intervals.rate_interval(few.astype(np.int64), 5, 5, 0.95) == Estimate.exact(0.0)


def test_a_percentile_beyond_which_there_is_hardly_a_sample_has_no_interval() -> None:
    found = intervals.percentile_interval(np.random.default_rng(1).normal(50, 5, 100), 99.9, 0.95)

    assert found.confidence == 0.0
    assert found.low <= found.value <= found.high


def test_equal_samples_have_an_interval_without_width() -> None:
    found = intervals.mean_interval(np.full(100, 7.0), 0.95)

    assert (found.low, found.high) == (7.0, 7.0)


STEPS = np.arange(2000.0)
LOOSE = 50 + np.sin(STEPS * 12.9898) * 5  # neighbours hardly resemble each other
SLOW = 50 + np.sin(STEPS / 40) * 5 + np.sin(STEPS * 12.9898)  # neighbours do


@pytest.mark.parametrize(
    ("samples", "percentile", "value", "low", "high", "confidence"),
    [
        (LOOSE[:19], None, 50.599319, 50.599319, 50.599319, 0),
        (LOOSE[:20], None, 50.814798, 45.514031, 56.115566, 0.95),
        (LOOSE[:41], None, 50.321271, 47.949031, 52.693511, 0.95),
        (LOOSE, None, 50.005888, 49.935068, 50.076708, 0.95),
        (SLOW[:20], None, 51.327142, 50.132563, 52.521721, 0.95),
        (SLOW[:300], None, 50.432276, 43.602867, 57.261686, 0.95),
        (SLOW, None, 50.005009, 48.769763, 51.240255, 0.95),
        (LOOSE, 50, 50.009203, 49.888654, 50.148147, 0.95),
        (LOOSE[:300], 90, 54.754903, 54.500242, 54.908907, 0.95),
        (LOOSE[:160], 97, 54.969979, 54.969979, 54.969979, 0),
        (LOOSE[:160], 3, 45.016737, 45.016737, 45.016737, 0),
        (LOOSE, 99, 54.997377, 54.995197, 54.998655, 0.95),
        (SLOW[:300], 90, 54.691978, 53.177822, 55.999578, 0),
        (SLOW, 99, 55.855198, 55.775681, 55.954087, 0.95),
    ],
)
def test_the_interval_of_the_mean_or_a_percentile_of_given_samples_stays(
    samples: Floats, percentile: float | None, value: float, low: float, high: float, confidence: float
) -> None:
    if percentile is None:
        found = intervals.mean_interval(samples, 0.95)
    else:
        found = intervals.percentile_interval(samples, percentile, 0.95)

    assert (found.value, found.low, found.high) == pytest.approx((value, low, high), abs=2e-6)
    assert found.confidence == confidence


@pytest.mark.parametrize(
    ("count", "value", "low", "high"),
    [
        (39, 621.03869, 621.03869, 621.03869),
        (400, 666.4197, 620.74853, 712.09088),
        (1999, 665.92706, 661.23668, 670.61744),
    ],
)
def test_the_interval_of_a_rate_of_given_times_stays(count: int, value: float, low: float, high: float) -> None:
    times = np.cumsum(1e6 * (1.5 + np.sin(STEPS[:count] * 12.9898))).astype(np.int64)

    found = intervals.rate_interval(times, 0, int(times[-1]) + 1, 0.9)

    assert (found.value, found.low, found.high) == pytest.approx((value, low, high), abs=2e-5)


def test_the_warm_up_of_given_samples_stays() -> None:
    samples = np.concatenate([np.linspace(100, 10, 100), LOOSE[:900] / 5])

    assert [intervals.warmup(samples[:count]) for count in (1000, 250, 104, 99)] == [100, 100, 45, 0]


def test_a_slow_begin_is_left_out() -> None:
    random = np.random.default_rng(1)
    samples = np.concatenate([np.linspace(100, 10, 100), random.normal(10, 1, 900)])

    assert 80 <= intervals.warmup(samples) <= 130


def test_a_steady_begin_is_kept() -> None:
    samples = np.random.default_rng(1).normal(10, 1, 1000)

    assert intervals.warmup(samples) < 250
    assert intervals.warmup(samples[:20]) == 0
