"""Equal requests in flight: one runs, the others get its answer. Pure.

A flight is a request that is looked up or runs, and those that are equal to it. Its first call leads: it is the one
that runs. When it goes without an answer, the next one leads; after `FAILURES_MAX` that failed, the others run by
themselves.
"""

from typing import Generic, TypeVar

from charonia.server.response_cache.api import KeptResponse, Key

FAILURES_MAX = 2
"""Calls of a flight that fail before those left stop waiting for one another."""

FOLLOWERS_MAX = 16_384
"""Most calls of a flight; what comes beyond that runs by itself."""

_C = TypeVar("_C")


class Flight(Generic[_C]):
    """Equal requests.

    Attributes:
        key: What they are equal in.
        priority: Their priority.
        calls: Those that have no answer yet, in the order in which they came.
        leader: The one that runs, None while none does.
        answer: The response, while it is being kept.
        lookup_ns: Time that looking it up took.
        failures: How many of its calls failed.
    """

    __slots__ = ("answer", "calls", "failures", "key", "leader", "lookup_ns", "priority")

    def __init__(self, key: Key, priority: int, call: _C) -> None:
        self.key = key
        self.priority = priority
        self.calls: dict[_C, None] = {call: None}
        self.leader: _C | None = None
        self.answer: KeptResponse | None = None
        self.lookup_ns = 0
        self.failures = 0

    def lead(self) -> _C | None:
        """Return the call that is to run now, None where there is none left."""
        self.leader = next(iter(self.calls), None)
        return self.leader

    def leave(self, call: _C) -> None:
        """A call has its answer, or does not wait any more."""
        self.calls.pop(call, None)
        if self.leader is call:
            self.leader = None

    @property
    def is_hopeless(self) -> bool:
        """Whether those left should not wait for one another."""
        return self.failures >= FAILURES_MAX


class SingleFlight(Generic[_C]):
    """The flights of one model version, by what requests must have in common to share one."""

    def __init__(self) -> None:
        self._flights: dict[tuple[Key, int], Flight[_C]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, key: Key, priority: int, call: _C) -> tuple[Flight[_C], bool]:
        """Return the flight of a call, and whether it is new. A request never waits for one of another priority."""
        flight = self._flights.get((key, priority))
        if flight is None:
            flight = self._flights[key, priority] = Flight(key, priority, call)
            return flight, True
        if len(flight.calls) >= FOLLOWERS_MAX:
            return Flight(key, priority, call), True
        flight.calls[call] = None
        return flight, False

    def end(self, flight: Flight[_C]) -> None:
        """A flight takes no more calls."""
        if self._flights.get((flight.key, flight.priority)) is flight:
            del self._flights[flight.key, flight.priority]
