"""The clock of tests."""

import pytest

from charonia.testing.clock import FakeClock


def test_the_clock_moves_only_when_told_to_and_never_back() -> None:
    clock = FakeClock(start_ns=5)

    clock.advance(0)
    clock.advance(10)

    assert clock.now_ns() == 15
    with pytest.raises(ValueError, match="got -1"):
        clock.advance(-1)
