import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.latency import RELATIVE_ERROR_MAX, LatencyHistogram, merged

DURATIONS = st.lists(st.integers(0, 2**44), min_size=1, max_size=60)


def nearest_rank(values: list[int], percent: float) -> int:
    return sorted(values)[int(percent / 100 * (len(values) - 1) + 0.5)]


@settings(max_examples=80)
@given(DURATIONS, st.floats(0, 100))
def test_a_percentile_is_within_the_promised_error_of_the_exact_one(values: list[int], percent: float) -> None:
    histogram = LatencyHistogram.of(values)

    exact = nearest_rank(values, percent)
    assert abs(histogram.percentile(percent) - exact) <= exact * RELATIVE_ERROR_MAX


@settings(max_examples=80)
@given(DURATIONS, DURATIONS)
def test_joining_two_histograms_is_counting_all_values_in_one(first: list[int], second: list[int]) -> None:
    joined = merged([LatencyHistogram.of(first), LatencyHistogram.of(second)])

    whole = LatencyHistogram.of(first + second)
    assert joined.buckets() == whole.buckets()
    assert (joined.count, joined.total, joined.minimum, joined.maximum) == (
        *(len(first) + len(second), sum(first) + sum(second)),
        *(min(first + second), max(first + second)),
    )
    assert joined.deviation == pytest.approx(whole.deviation, rel=1e-6, abs=1.0)


@settings(max_examples=80)
@given(DURATIONS)
def test_the_json_form_gives_the_same_histogram_back(values: list[int]) -> None:
    histogram = LatencyHistogram.of(values)

    assert LatencyHistogram.from_json(histogram.to_json()) == histogram


def test_short_durations_are_exact_and_longer_ones_share_a_bucket_of_their_octave() -> None:
    histogram = LatencyHistogram.of([0, 1, 127, 128, 255, 256, 257, 258, 511, 512])

    assert histogram.buckets() == [
        *((value, value + 1, 1) for value in (0, 1, 127, 128, 255)),
        *((256, 258, 2), (258, 260, 1), (510, 512, 1), (512, 516, 1)),
    ]


@given(st.integers(0, 2**45 - 1))
def test_a_value_lies_in_its_bucket(value: int) -> None:
    ((low, high, count),) = LatencyHistogram.of([value]).buckets()

    assert low <= value < high
    assert count == 1


def test_the_deviation_survives_values_whose_squares_overflow() -> None:
    values = [4_300_000_000, 8_300_000_000, 6_000_000_000] * 400

    assert LatencyHistogram.of(values).deviation == pytest.approx(np.std(values, ddof=1), rel=1e-9)


def test_an_empty_histogram_has_zeros() -> None:
    histogram = LatencyHistogram.of([])

    assert (histogram.mean, histogram.deviation, histogram.percentile(99)) == (0, 0, 0)
    assert histogram == merged([])


def test_values_out_of_range_count_at_the_ends() -> None:
    histogram = LatencyHistogram.of([-5, 2**60])

    assert (histogram.minimum, histogram.maximum) == (0, 2**45 - 1)


def test_a_percentile_outside_0_to_100_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected 0 to 100, got 101"):
        LatencyHistogram.of([1]).percentile(101)


@pytest.mark.parametrize(
    ("buckets", "counts", "message"),
    [([9_999_999], [1], "expected buckets"), ([3], [1, 2], "expected buckets"), ([3], [2], "add up to 2, expected 1")],
)
def test_the_json_of_something_else_is_refused(buckets: list[int], counts: list[int], message: str) -> None:
    data = LatencyHistogram.of([1]).to_json() | {"buckets": buckets, "counts": counts}

    with pytest.raises(ValueError, match=message):
        LatencyHistogram.from_json(data)


def test_it_is_not_hashed_and_says_what_it_holds() -> None:
    histogram = LatencyHistogram.of([3])

    assert repr(histogram) == "LatencyHistogram(count=1, mean=3, maximum=3)"
    assert histogram != 3
    with pytest.raises(TypeError):
        hash(histogram)
