"""Histograms count every value once, in the first bucket whose bound it does not exceed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.stats.histogram import Histogram


def test_a_value_on_the_bound_belongs_to_the_bucket_below() -> None:
    histogram = Histogram((10, 20))
    for value in (9, 10, 11, 20, 21):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 71


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 5))))
def test_every_value_is_counted_once(values: list[tuple[int, int]]) -> None:
    histogram = Histogram((5, 50))
    for value, times in values:
        histogram.observe(value, times)
    assert histogram.count == sum(times for _, times in values)
    assert histogram.total == sum(value * times for value, times in values)


@pytest.mark.parametrize("bounds", [(), (2, 1), (1, 1)])
def test_bounds_must_ascend(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Histogram(bounds)
