"""Whether to ask a server that may be down. Pure."""

FAILURES_MAX = 3
"""Failures in a row after which it counts as down."""

PAUSE_S = 1.0
"""Pause before it is tried again; it doubles with every try that fails."""

PAUSE_S_MAX = 30.0


class Circuit:
    """Counts failures in a row.

    Attributes:
        is_up: Whether it is asked.
    """

    __slots__ = ("_failures", "_pause_s", "is_up")

    def __init__(self) -> None:
        self.is_up = False
        self._failures = 0
        self._pause_s = PAUSE_S

    def succeeded(self) -> None:
        """It answered."""
        self._failures = 0

    def failed(self) -> bool:
        """It did not; return whether it counts as down from now on."""
        self._failures += 1
        if self.is_up and self._failures >= FAILURES_MAX:
            self.is_up = False
            return True
        return False

    def connected(self) -> None:
        """A try to reach it has succeeded."""
        self.is_up = True
        self._failures = 0
        self._pause_s = PAUSE_S

    def pause_s(self) -> float:
        """A try to reach it has failed; return the time to wait before the next one."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return pause
