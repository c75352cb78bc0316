"""A fake monotonic clock, which tests advance."""


class FakeClock:
    """Replaces a monotonic clock: pass the bound method `now_ns` where a clock is expected."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the current time in ns."""
        return self._now_ns

    def advance(self, by_ns: int) -> None:
        """Let time pass.

        Raises:
            ValueError: `by_ns` is negative: a monotonic clock does not go back.
        """
        if by_ns < 0:
            raise ValueError(f"by_ns: expected an integer >= 0, got {by_ns}")
        self._now_ns += by_ns
