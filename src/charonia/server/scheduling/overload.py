"""Overload: when clients leave before their requests run, newcomers that would share their fate are refused. Pure.

A queue that only grows helps no one: if clients wait for a second and the queue is longer than that, every request that
runs is one whose client is about to leave. Clients rarely say how long they wait, but they show it: they leave. So:

1. Nothing is refused before requests were *lost*: cancelled while they waited, although there was time to run them.
   Patient clients lose nothing, however many requests they send.
2. Time is divided into slices. A slice is bad if a request was lost in it for every `SERVED_PER_LOST` that ran, and
   more were lost than ran after a longer wait. After `BAD_SLICES` more bad slices than good ones, the queue *sheds*.
   So a single client that leaves, even one with a thousand requests at once, changes nothing.
3. The patience of clients is the moving average of the times after which requests were lost. What remains of it after
   the time that a batch runs can be spent in the queue.
4. While the queue sheds, a request is refused on arrival if it would wait longer than an eighth of that time, or than
   for the next batch, or than `QUEUED_MIN` others take; in any case if it would wait longer than 5/8 of that time. One
   that has waited for 7/8 of it is dropped when its turn comes.
5. A client that demonstrably waits longer is spared; see `RequestQueue`.
6. Shedding ends when nothing was lost or refused for `QUIET` times the patience.
"""

import sys
from collections import Counter

from charonia.core.flow import Flow
from charonia.server.scheduling.api import Submit

FLOWS_MAX = 256
"""Flows of a level that are told apart."""

PATIENCE_MIN_NS = 20_000_000
"""A request that is cancelled earlier was not lost to overload: its client may have asked elsewhere, too."""

SLICE_MIN_NS = 20_000_000
"""Shortest slice."""

SLICES_PER_PATIENCE = 32
"""Slices in the time that clients wait, where that is longer than their shortest length."""

BAD_SLICES = 8
"""More bad slices than good ones with which shedding begins."""

SERVED_PER_LOST = 64
"""Requests that run in a good slice for each one that is lost, and at least."""

QUEUED_MIN = 16
"""Requests that may wait even if they take longer than an eighth of the patience."""

QUIET = 10
"""Shedding ends after this multiple of the patience without a reason for it."""

RUNS_AVERAGED = 16
"""Runs after which the weight of earlier ones is halved."""


_NS_PER_US = 1000


class Pace:
    """How fast a busy model takes requests from its queue.

    Attributes:
        service_ns: How long a batch runs, averaged; 0 before that of one is known.
        run_ns: Time from one batch to the next, averaged; 0 before it is known.
        batch: Requests of a batch while there are enough.
    """

    __slots__ = ("_last_ns", "_runs", "_started_ns", "batch", "run_ns", "service_ns")

    def __init__(self, batch: int) -> None:
        self.service_ns = 0
        self.run_ns = 0.0
        self.batch = float(batch)
        self._runs = 0
        self._started_ns: dict[int, int] = {}  # by slot
        self._last_ns = 0

    def started(self, slot: int, count: int, left: int, now_ns: int) -> None:
        """A batch starts.

        Args:
            slot: Its slot.
            count: Its requests.
            left: Requests that still wait; -1 if those of the batch have not waited: perhaps a slot was idle.
            now_ns: The time.
        """
        if left >= 0 and self._last_ns:
            self._runs = min(self._runs + 1, RUNS_AVERAGED)
            self.run_ns += (now_ns - self._last_ns - self.run_ns) / self._runs
            if left:
                self.batch += (count - self.batch) / self._runs
        self._last_ns = self._started_ns[slot] = now_ns

    def ended(self, slot: int, now_ns: int) -> None:
        """The batch of a slot is done."""
        started_ns = self._started_ns.pop(slot, None)
        if started_ns is not None:
            took_ns = now_ns - started_ns
            self.service_ns += (took_ns - self.service_ns) // (8 if self.service_ns else 1)

    def wait_ns(self, ahead: float, now_ns: int) -> float:
        return (1 + ahead // self.batch) * self.run_ns - (now_ns - self._last_ns)


class Overload:
    """What the queue of a priority level has learned from clients that left.

    Attributes:
        patience_ns: How long clients wait, averaged over those that left.
        losses: Lost requests by flow.
    """

    __slots__ = (
        *("_bad", "_is_shedding", "_late", "_lost", "_reason_ns", "_served", "_slice_ends_ns", "losses"),
        "patience_ns",
    )

    def __init__(self) -> None:
        self.patience_ns = 0
        self.losses: Counter[Flow] = Counter()
        self._is_shedding = False
        self._bad = 0  # slices, less those that were good
        self._lost = self._served = self._late = 0  # in this slice
        self._slice_ends_ns = 0
        self._reason_ns = 0  # when a request was lost or refused

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self._reason_ns > QUIET * self.patience_ns

    def sheds(self, pace: Pace) -> bool:
        """Return whether to refuse requests that would wait too long."""
        return self._is_shedding and has_time(self.patience_ns, pace)

    def lost(self, flow: Flow, waited_ns: int, now_ns: int) -> None:
        """A request was cancelled after it has waited so long."""
        self._judge(now_ns)
        if flow in self.losses or len(self.losses) < FLOWS_MAX:
            self.losses[flow] += 1
        self.patience_ns += (waited_ns - self.patience_ns) // (8 if self.patience_ns else 1)
        self._lost += 1
        self._reason_ns = now_ns

    def served(self, waited_ns: int, now_ns: int) -> None:
        """A request starts that has waited so long."""
        self._judge(now_ns)
        self._served += 1
        self._late += 4 * waited_ns > 5 * self.patience_ns

    def refused(self, now_ns: int) -> None:
        """A request was refused or dropped because of overload."""
        self._reason_ns = now_ns

    def is_too_long(self, pace: Pace, wait_ns: float, patience_ns: int) -> bool:
        """Return whether to refuse a request that will wait so long.

        Args:
            pace: The pace of the model.
            wait_ns: The expected wait.
            patience_ns: How long the client of this very request waits at most, 0 if that is unknown.
        """
        spare_ns = min(patience_ns or self.patience_ns, self.patience_ns) - pace.service_ns
        needed_ns = max(1.0, QUEUED_MIN / pace.batch) * pace.run_ns
        return wait_ns > min(spare_ns * 5 / 8, max(spare_ns / 8, needed_ns))

    def is_hopeless(self, pace: Pace, waited_ns: int) -> bool:
        """Return whether to drop a request whose turn has come."""
        return (self.patience_ns - pace.service_ns) * 7 / 8 < waited_ns < 2 * self.patience_ns

    def _judge(self, now_ns: int) -> None:
        """Judge the slice if it is over, and begin the next one."""
        lost, served = self._lost, self._served
        if now_ns < self._slice_ends_ns or (not lost and served < SERVED_PER_LOST):
            return
        is_bad = lost * SERVED_PER_LOST > served and lost > self._late
        self._bad = self._bad + 1 if is_bad else max(0, self._bad - 1)
        self._is_shedding = self._is_shedding or self._bad >= BAD_SLICES
        self._lost = self._served = self._late = 0
        self._slice_ends_ns = now_ns + max(SLICE_MIN_NS, self.patience_ns // SLICES_PER_PATIENCE)


def waits_ns(request: Submit, now_ns: int) -> int:
    """Return how long the client of a request waits at most, 0 if that is unknown."""
    left_ns = request.timeout_us * _NS_PER_US
    return min(left_ns or sys.maxsize, max(1, request.deadline_ns - now_ns)) if request.deadline_ns else left_ns


def has_time(patience_ns: int, pace: Pace) -> bool:
    """Return whether a client that waits so long is served if the queue is short, and not only now and then."""
    return patience_ns >= PATIENCE_MIN_NS and 2 * patience_ns >= 3 * pace.service_ns
