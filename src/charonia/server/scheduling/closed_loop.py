"""An estimate of the closed loop: how many clients there are, which spares a lone one the batching delay. Pure.

Clients mostly run closed loops: each sends a request, waits for the answer, sends the next one. Then the most requests
that were inside (queued or running) at once in the recent past is the number of clients, and once that many are queued,
waiting longer brings no other request. The rule is that simple:

1. A period lasts from one batch sent to the next. Its peak is the most requests inside at any moment of it.
2. `RECENT_PERIODS` peaks are remembered, and that of the period that runs.
3. All clients are here when at least as many requests are queued as the highest of these peaks.
4. Before so many periods have passed nothing is known, and more clients are expected.

For a lone client all peaks are 1, so it waits `RECENT_PERIODS` times and then no more. When a request arrives while
another one is queued or running, the peak is 2 at once, and a single request waits again. A guess that is wrong costs
little: too high, and a request waits for the configured delay, as it would have anyhow; too low, and a batch is smaller
in a moment in which requests did not even overlap. Nothing here knows a rate or a clock: an event log replays exactly.
"""

from collections import deque

RECENT_PERIODS = 3
"""Batches that must be sent without company before a request stops waiting for it."""


class ClosedLoop:
    """Counts the requests inside, and remembers the peaks."""

    __slots__ = ("_inside", "_peak", "_recent", "_running")

    def __init__(self) -> None:
        self._inside = 0
        self._peak = 0
        self._recent: deque[int] = deque(maxlen=RECENT_PERIODS)
        self._running: dict[int, int] = {}  # requests by slot

    @property
    def inside(self) -> int:
        """Number of requests that are queued or run."""
        return self._inside

    @property
    def running(self) -> int:
        """Number of requests that run."""
        return sum(self._running.values())

    def arrived(self) -> None:
        """A request came in."""
        self._inside += 1
        if self._inside > self._peak:
            self._peak = self._inside

    def left_queue(self, count: int) -> None:
        """So many requests were refused or cancelled while they were queued."""
        self._inside -= count

    def sent(self, slot: int, count: int) -> None:
        """A batch of so many requests went to a slot: a period ends, the next begins."""
        self._running[slot] = count
        self._recent.append(self._peak)
        self._peak = self._inside

    def slot_ended(self, slot: int) -> None:
        """What the slot ran, if anything, is over."""
        self._inside -= self._running.pop(slot, 0)

    def all_clients_queued(self, queued: int) -> bool:
        """Return whether no request beyond those queued is to be expected."""
        return len(self._recent) == RECENT_PERIODS and queued >= self._peak and queued >= max(self._recent)
