"""Histograms count every value once, in the first bucket whose bound it does not exceed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.metrics.metric_families import Histogram


def test_a_value_on_the_bound_belongs_to_the_bucket_below() -> None:
    histogram = Histogram((10, 20))
    for value in (10, 11):
        assert histogram.add(value) == value
    assert histogram.counts == [1, 1, 0]

    histogram = Histogram((10, 20))
    assert histogram.observe(np.array([9, 10, 11, 20, 21])) == 71
    assert histogram.observe(np.array([], np.int64)) == 0
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 71


@given(st.lists(st.lists(st.integers(0, 100))))
def test_every_value_is_counted_once(rounds: list[list[int]]) -> None:
    histogram = Histogram((5, 50))
    for values in rounds:
        histogram.observe(np.array(values, np.int64))
    everything = [value for values in rounds for value in values]
    assert histogram.count == len(everything)
    assert histogram.total == sum(everything)
    assert histogram.counts[0] == sum(value <= 5 for value in everything)
    assert histogram.counts[2] == sum(value > 50 for value in everything)


@pytest.mark.parametrize("bounds", [(), (2, 1), (1, 1)])
def test_bounds_must_ascend(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Histogram(bounds)
