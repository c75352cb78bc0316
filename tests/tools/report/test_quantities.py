import pytest

from charonia.tools.report.quantities import clock, duration, number, percent, signed_percent, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (0.9995, "1.00"),
        (9.996, "10.0"),
        (9.994, "9.99"),
        (99.94, "99.9"),
        (99.96, "100"),
        (-99.96, "-100"),
        (12345.6, "12,346"),
    ],
)
def test_a_number_has_three_digits_and_never_fewer_than_its_whole_part(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (999.9, "1.00 µs"), (470_000, "470 µs"), (999_900, "1.00 ms"), (2.5e9, "2.50 s")],
)
def test_a_duration_has_the_unit_that_fits(nanoseconds: float, text: str) -> None:
    assert duration(nanoseconds) == text


def test_sizes_are_binary() -> None:
    expected = {12: "12 B", 1023: "1023 B", 2048: "2.00 KiB", 2**20 - 1: "1.00 MiB", 150 * 2**20: "150 MiB"}
    assert {value: size(value) for value in [*expected, 3 * 2**40]} == {**expected, 3 * 2**40: "3.00 TiB"}


def test_a_share_is_zero_only_if_there_is_none() -> None:
    assert [percent(value) for value in (0, 1e-7, 0.0005, 0.5, 1)] == [
        "0 %",
        "< 0.001 %",
        "0.050 %",
        "50.0 %",
        "100 %",
    ]


def test_a_change_has_its_sign() -> None:
    assert [signed_percent(value) for value in (0.1234, -0.004)] == ["+12.3 %", "-0.4 %"]


def test_a_time_to_wait_is_in_whole_seconds() -> None:
    assert [clock(value) for value in (-1, 42.4, 185, 3720)] == ["0 s", "42 s", "3 min 05 s", "1 h 02 min"]
    assert [clock(value) for value in (59, 60, 3599, 3600)] == ["59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min"]
