"""An estimate of the number of closed-loop clients, which spares a single client the batching delay. Pure.

Most clients run a closed loop: each sends a request, waits for the response and sends the next one. The highest number
of requests in the system (queued or running) in the recent past is then the number of clients, and once that many are
queued, no other request will join by waiting. The rules:

1. A period lasts from one batch to the next. Its peak is the highest number of requests in the system.
2. The estimate is the highest peak of the last `RECENT_PERIODS` periods and the current one.
3. When at least that many requests are queued, all clients are waiting.
4. Until `RECENT_PERIODS` periods have passed there is no estimate, and more clients are expected.

For a single client all peaks are 1, so it waits `RECENT_PERIODS` times and never again. When a request arrives while
another one is queued or running, the peak becomes 2 at once, and a single request waits again. A wrong estimate costs
little: if too high, a request waits for the configured delay, as it would without the rule; if too low, a batch is
smaller while requests hardly overlap. The rules use neither rates nor a clock, so an event log replays exactly.
"""

from collections import deque

RECENT_PERIODS = 3
"""Number of recent periods that the estimate covers."""


class ClosedLoop:
    """Counts the requests in the system and keeps the recent peaks."""

    __slots__ = ("_inside", "_peak", "_recent", "_running")

    def __init__(self) -> None:
        self._inside = 0
        self._peak = 0
        self._recent: deque[int] = deque(maxlen=RECENT_PERIODS)
        self._running: dict[int, int] = {}  # requests by slot

    @property
    def inside(self) -> int:
        """Number of requests in the system: queued or running."""
        return self._inside

    @property
    def running(self) -> int:
        return sum(self._running.values())

    def arrived(self) -> None:
        """A request arrived."""
        self._inside += 1
        if self._inside > self._peak:
            self._peak = self._inside

    def left_queue(self, count: int) -> None:
        self._inside -= count

    def sent(self, slot: int, count: int) -> None:
        """A batch of so many requests was sent to a slot: a period ends and the next one begins."""
        self._running[slot] = count
        self._recent.append(self._peak)
        self._peak = self._inside

    def slot_ended(self, slot: int) -> None:
        self._inside -= self._running.pop(slot, 0)

    def all_clients_queued(self, queued: int) -> bool:
        """Return whether no more requests are expected beyond those queued."""
        return len(self._recent) == RECENT_PERIODS and queued >= self._peak and queued >= max(self._recent)
