"""Busy polling between the requests of a single closed-loop client.

When one client sends one short request after the other, the server would sleep and wake up for each of them. That costs
more than a short execution: the core has to leave its idle state, and its caches are cold. So the event loop and the
workers of Python models poll for the next message for a short while. With several concurrent requests there is always
work, and no polling.

A process that polls occupies a core, which a neighbour may need: with clients at several processes, each process would
see a lone caller, and all would poll.
"""

import asyncio
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from charonia.clock import now_ns

PAGE_NAME: Final = "requests"
"""File with the time of the latest request of each process, in the private folder of the server."""

PAGE_BYTES: Final = 8192
"""Its size: 8 bytes for each of 1024 processes."""

AWAKE_NS: Final = 20_000_000
"""Time after a request for which a process needs a core: long enough for one that had to wait for it."""

_TIME: Final = struct.Struct("@q")


def has_spare_core_now(latest_ns: Iterable[int], now_ns: int, cores: int) -> bool:
    """Whether a core is left if this process polls. Pure.

    With one process, two cores are enough; each neighbour that had a request lately needs one more.
    """
    return 1 + sum(bool(at_ns) and now_ns - at_ns <= AWAKE_NS for at_ns in latest_ns) < cores


class SiblingProcesses:
    """The processes of a server, as one of them sees them.

    Args:
        folder: The private folder of the server.
        own: The number of this process, from 0 on.
        count: Number of processes.
        cores: Cores that they share.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, own: int, count: int, cores: int) -> None:
        file = os.open(folder / PAGE_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, PAGE_BYTES)  # each process does; it has to be the same size for all
            self._page = mmap.mmap(file, PAGE_BYTES)
        finally:
            os.close(file)
        self._own = own * _TIME.size
        self._others = [at for at in range(0, count * _TIME.size, _TIME.size) if at != self._own]
        self._cores = cores

    def record_request(self, now_ns: int) -> None:
        _TIME.pack_into(self._page, self._own, now_ns)

    def has_spare_core(self, now_ns: int) -> bool:
        """Whether a core is left if this process polls."""
        latest_ns = (_TIME.unpack_from(self._page, at)[0] for at in self._others)
        return has_spare_core_now(latest_ns, now_ns, self._cores)


ALONE_MIN: Final = 32
"""Requests in a row of a single client, in quick succession, after which polling starts."""


class LoneCallerRule:
    """Decides from the times of requests whether to poll for the next one. Pure.

    Attributes:
        is_open: Whether to poll.
        in_a_row: Requests of a lone caller so far, in quick succession.
    """

    __slots__ = ("_last_ns", "in_a_row", "is_open", "limit_ns")

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self.is_open = False
        self.in_a_row = 0
        self._last_ns = 0

    def submitted(self, now_ns: int, *, is_alone: bool) -> None:
        """A request arrived; `is_alone` if no other one is in flight or arrived with it."""
        if is_alone and now_ns - self._last_ns <= self.limit_ns:
            self.in_a_row += 1
            self.is_open = self.in_a_row >= ALONE_MIN
        else:
            self.in_a_row = 0
            self.is_open = False
        self._last_ns = now_ns

    def until_ns(self) -> int:
        return self._last_ns + self.limit_ns


def make_busy_poll(limit_us: int, cores: int, siblings: SiblingProcesses | None = None) -> "BusyPoll | None":
    """Return what keeps the running event loop awake, None for nothing.

    Args:
        limit_us: Longest time between two requests in us, 0 for no polling.
        cores: Cores of this process; with a single one, polling would starve the thread that it waits for.
        siblings: The other processes of the server, None where it has one.
    """
    return BusyPoll(asyncio.get_running_loop(), limit_us * 1000, siblings) if limit_us and cores > 1 else None


class BusyPoll:
    """Keeps the event loop awake while the rule decides so.

    A client that waits for its answer sends one request in a turn of the event loop. A request in place is answered
    before the loop continues, so with many clients no request finds another in flight, but several come in one turn.

    Args:
        loop: The event loop.
        limit_ns: See `LoneCallerRule`.
        siblings: The other processes of the server, None where it has one: none of them is kept from running.
    """

    __slots__ = ("_has_come", "_in_flight", "_is_polling", "_loop", "_rule", "_siblings", "_threads")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit_ns: int, siblings: SiblingProcesses | None = None
    ) -> None:
        self._loop = loop
        self._siblings = siblings
        self._rule = LoneCallerRule(limit_ns)
        self._has_come = False  # a request, in this turn of the loop; known while they come in quick succession
        self._in_flight = 0
        self._threads = 0
        self._is_polling = False

    @property
    def worker_ns(self) -> int:
        return self._rule.limit_ns if self._may_poll(now_ns()) else 0

    def submitted(self, now_ns: int) -> None:
        """A client's request arrived; exactly one `answered` follows."""
        rule = self._rule
        rule.submitted(now_ns, is_alone=not (self._in_flight or self._has_come))
        self._in_flight += 1
        if rule.in_a_row and not self._has_come:
            self._has_come = True
            if not self._is_polling:
                self._loop.call_soon(self._turn_over)
        if self._siblings is not None:
            self._siblings.record_request(now_ns)
        if rule.is_open and not self._is_polling and self._may_poll(now_ns):
            self._begin()

    def ran_at_once(self, now_ns: int, count: int = 1) -> None:
        """This many requests of clients arrived together; nothing else happens until they are answered."""
        self._in_flight += count - 1
        self.submitted(now_ns)
        self._in_flight -= count

    def answered(self) -> None:
        self._in_flight -= 1

    def thread_runs(self) -> None:
        self._threads += 1

    def thread_done(self) -> None:
        self._threads -= 1
        if self._rule.is_open and not self._is_polling and self._may_poll(now_ns()):
            self._begin()

    def _turn_over(self) -> None:
        self._has_come = False

    def _may_poll(self, now_ns: int) -> bool:
        return self._rule.is_open and (self._siblings is None or self._siblings.has_spare_core(now_ns))

    def _begin(self) -> None:
        self._is_polling = True
        self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Poll once: a scheduled callback makes the loop check for events without blocking."""
        self._has_come = False
        now = now_ns()
        if not self._threads and now < self._rule.until_ns() and self._may_poll(now):
            os.sched_yield()  # let another process use this core
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
