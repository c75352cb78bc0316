"""The statistics of the figures of language models."""

import numpy as np
import pytest

from charonia.tools.results.language import FIGURES, NAMES, LanguageFigures, Spread


def test_percentiles_lie_between_neighbouring_values() -> None:
    spread = Spread.of(np.arange(0, 1001, dtype=np.float64))

    assert spread is not None
    assert (spread.p50, spread.p90, spread.p95, spread.p99) == (500, 900, 950, 990)
    assert (spread.minimum, spread.maximum, spread.mean, spread.count) == (0, 1000, 500, 1001)


def test_a_single_value_has_no_deviation_and_no_value_no_spread() -> None:
    spread = Spread.of(np.array([3.0]))

    assert spread is not None
    assert (spread.deviation, spread.p50, spread.p99) == (0.0, 3.0, 3.0)
    assert Spread.of(np.empty(0)) is None


def test_times_are_shown_in_milliseconds() -> None:
    assert 5_000_000 * FIGURES["first_token"].factor == pytest.approx(5)
    assert FIGURES["output_tokens"].factor == 1


def test_every_name_leads_to_a_figure_that_the_records_have() -> None:
    assert set(NAMES.values()) == set(FIGURES)
    assert FIGURES.keys() <= set(LanguageFigures.__slots__)
