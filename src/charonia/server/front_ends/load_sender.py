"""Sends the engine's load to a front end: immediately when a request needs it, then with responses."""

from collections.abc import Callable

from charonia.server.execution.clock import now_ns
from charonia.server.facade import LoadReports

LOAD_AGE_NS = 50_000_000
"""Shortest time between two reports to a front end, in nanoseconds."""

LOAD_WANTED_NS = 60_000_000_000
"""Time for which a front end gets reports after a request that needed one, in nanoseconds."""


class LoadSender:
    """Sends the engine's load to a front end while its requests need it.

    Args:
        load: The load; None where it is not reported.
        send: Sends a message.

    Attributes:
        is_wanted: Whether to call `send` before a response.
    """

    __slots__ = ("_load", "_send", "_sent_ns", "_until_ns", "is_wanted")

    def __init__(self, load: LoadReports | None, send: Callable[[tuple[object, ...]], None]) -> None:
        self.is_wanted = False
        self._load = load
        self._send = send
        self._sent_ns = 0
        self._until_ns = 0

    def wanted(self) -> None:
        """A request of the front end needs a report."""
        self.is_wanted = self._load is not None
        self._until_ns = now_ns() + LOAD_WANTED_NS
        self.send()

    def send(self) -> None:
        """Send a report if it is still needed and the last one is old."""
        now = now_ns()
        if now >= self._until_ns:
            self.is_wanted = False
        elif now - self._sent_ns >= LOAD_AGE_NS and self._load is not None:
            self._sent_ns = now
            self._send(("load", dict(self._load.latest())))
