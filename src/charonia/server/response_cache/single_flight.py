"""Single flight: of identical requests in flight one runs, and the others get its response. Pure.

A flight is a request that is being looked up or computed, with the requests identical to it. Its first call is the
leader, which runs. If the leader is cancelled or fails, the next call becomes the leader; after `FAILURES_MAX`
failures the remaining calls run individually.
"""

from typing import Generic, TypeVar

from charonia.server.response_cache.api import CachedResponse, CacheKey

FAILURES_MAX = 2
"""Failed calls of a flight after which the remaining ones run individually."""

FOLLOWERS_MAX = 16_384
"""Most calls of a flight; later calls run individually."""

_C = TypeVar("_C")


class Flight(Generic[_C]):
    """Identical requests in flight.

    Attributes:
        key: Their key.
        priority: Their priority.
        calls: Calls without a response yet, in order of arrival.
        leader: The running call, None while none runs.
        response: The response, while the cache stores it.
        lookup_ns: Duration of the look-up.
        failures: How many of its calls failed.
    """

    __slots__ = ("calls", "failures", "key", "leader", "lookup_ns", "priority", "response")

    def __init__(self, key: CacheKey, priority: int, call: _C) -> None:
        self.key = key
        self.priority = priority
        self.calls: dict[_C, None] = {call: None}
        self.leader: _C | None = None
        self.response: CachedResponse | None = None
        self.lookup_ns = 0
        self.failures = 0

    def lead(self) -> _C | None:
        """Choose and return the next leader, None if no call is left."""
        self.leader = next(iter(self.calls), None)
        return self.leader

    def leave(self, call: _C) -> None:
        """A call was answered or cancelled, or runs individually."""
        self.calls.pop(call, None)
        if self.leader is call:
            self.leader = None

    @property
    def has_failed(self) -> bool:
        return self.failures >= FAILURES_MAX


class SingleFlight(Generic[_C]):
    """The flights of one model version, by key and priority."""

    def __init__(self) -> None:
        self._flights: dict[tuple[CacheKey, int], Flight[_C]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, key: CacheKey, priority: int, call: _C) -> tuple[Flight[_C], bool]:
        """Return the flight for a call, and whether it is new. Requests of different priorities share none."""
        flight = self._flights.get((key, priority))
        if flight is None:
            flight = self._flights[key, priority] = Flight(key, priority, call)
            return flight, True
        if len(flight.calls) >= FOLLOWERS_MAX:
            return Flight(key, priority, call), True
        flight.calls[call] = None
        return flight, False

    def end(self, flight: Flight[_C]) -> None:
        if self._flights.get((flight.key, flight.priority)) is flight:
            del self._flights[flight.key, flight.priority]
