"""Staying awake between the requests of a lone caller.

Where one caller asks one short request after the other, the server would go to sleep and be woken for each of them, and
that costs more than a short model computes: the processor has to leave its idle state, and its caches are cold. So the
event loop, and the workers of Python models, look for the next message again and again for a short while. With several
callers at once there is always something to do, and nobody polls.
"""

import asyncio
import os

from charonia.server.execution.clock import now_ns

ALONE_MIN = 32
"""Requests in a row of a lone caller, each soon after the one before, after which polling begins."""


class LoneCallerRule:
    """Decides from the times of requests whether it pays to stay awake for the next one. Pure.

    Args:
        limit_ns: Longest time between two requests up to which it does, 0 for never.

    Attributes:
        is_open: Whether it does.
    """

    __slots__ = ("_in_a_row", "_last_ns", "is_open", "limit_ns")

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self.is_open = False
        self._in_a_row = 0
        self._last_ns = 0

    def submitted(self, now_ns: int, *, is_alone: bool) -> None:
        """A request has come; `is_alone` when no other is in flight."""
        if is_alone and now_ns - self._last_ns <= self.limit_ns:
            self._in_a_row += 1
            self.is_open = self._in_a_row >= ALONE_MIN
        else:
            self._in_a_row = 0
            self.is_open = False
        self._last_ns = now_ns

    def until_ns(self) -> int:
        """Return until when to stay awake."""
        return self._last_ns + self.limit_ns


class BusyPoll:
    """Keeps the event loop from sleeping while its rule says so.

    Args:
        loop: The event loop.
        limit_ns: See `LoneCallerRule`.
    """

    __slots__ = ("_in_flight", "_is_polling", "_loop", "_rule", "_threads")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_ns: int) -> None:
        self._loop = loop
        self._rule = LoneCallerRule(limit_ns)
        self._in_flight = 0
        self._threads = 0
        self._is_polling = False

    @property
    def worker_ns(self) -> int:
        """How long a worker process is to stay awake for the next batch after its answer, 0 for not at all."""
        return self._rule.limit_ns if self._rule.is_open else 0

    def submitted(self, now_ns: int) -> None:
        """A request has come from outside; exactly one `answered` follows."""
        rule = self._rule
        rule.submitted(now_ns, is_alone=self._in_flight == 0)
        self._in_flight += 1
        if rule.is_open and not self._is_polling:
            self._begin()

    def answered(self) -> None:
        """A request has its last answer."""
        self._in_flight -= 1

    def thread_runs(self) -> None:
        """A thread of this process has begun to compute: it needs the interpreter, which a polling loop would keep."""
        self._threads += 1

    def thread_done(self) -> None:
        """It has finished."""
        self._threads -= 1
        if self._rule.is_open and not self._is_polling:
            self._begin()

    def _begin(self) -> None:
        self._is_polling = True
        self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """One round: what is scheduled now makes the loop look for events without waiting for them."""
        rule = self._rule
        if rule.is_open and not self._threads and now_ns() < rule.until_ns():
            os.sched_yield()  # whoever else wants this core gets it
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
