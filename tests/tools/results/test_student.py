"""The quantiles of Student's distribution."""

import math

import pytest

from charonia.tools.results.records import student


@pytest.mark.parametrize(
    ("confidence", "freedom", "exact", "found"),
    [
        (0.95, 1, 12.7062, 12.706205),
        (0.95, 2, 4.3027, 4.302653),
        (0.95, 3, 3.1824, 3.158993),
        (0.95, 5, 2.5706, 2.567765),
        (0.95, 9, 2.2622, 2.261901),
        (0.95, 19, 2.0930, 2.093012),
        (0.95, 63, 1.9983, 1.998340),
        (0.99, 4, 4.6041, 4.546893),
        (0.90, 30, 1.6973, 1.697260),
        (0.95, math.inf, 1.9600, 1.959964),
        (0.99, math.inf, 2.5758, 2.575829),
    ],
)
def test_the_quantile_is_students(confidence: float, freedom: float, exact: float, found: float) -> None:
    assert student(confidence, freedom) == pytest.approx(found, abs=1e-6)
    assert found == pytest.approx(exact, rel=1e-3 if freedom >= 9 else 0.013)
