"""Figures as people read them."""

import pytest

from charonia.platform.console import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.01234, "0.0123"), (4.5678, "4.57"), (999.4, "999"), (12345.6, "12,346"), (0.00001234, "0.000012")],
)
def test_a_number_has_three_digits_that_count(value: float, shown: str) -> None:
    assert text.figure(value) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(1, "1 byte"), (999, "999 bytes"), (98_000_000, "98 MB"), (999_900, "1 MB")]
)
def test_a_size_has_the_unit_that_fits(size: int, shown: str) -> None:
    assert text.size_text(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(4000, "1 h 6 min"), (185, "3 min 5 s"), (600, "10 min"), (42, "42 s"), (0.0123, "12.3 ms"), (5e-6, "5 µs")],
)
def test_a_duration_has_the_units_that_fit(seconds: float, shown: str) -> None:
    assert text.duration_text(seconds) == shown


@pytest.mark.parametrize(
    ("age", "shown"),
    [(3, "just now"), (60, "1 min ago"), (3600, "1 hour ago"), (7200, "2 hours ago"), (3 * 86400, "3 days ago")],
)
def test_an_age_is_said_in_words(age: float, shown: str) -> None:
    assert text.ago_text(1000.0, 1000.0 + age) == shown


def test_what_was_long_ago_is_a_date() -> None:
    assert text.ago_text(0.0, 1e9) == "1970-01-01"


def test_a_name_is_escaped_and_breaks_after_its_separators() -> None:
    assert text.breakable("a_<b>/c") == "a_<wbr>&lt;b&gt;/<wbr>c"
