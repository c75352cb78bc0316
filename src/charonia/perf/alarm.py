"""A timer that rings within microseconds. The event loop's own timers are rounded to milliseconds.

On Linux it is the system's timer as a file descriptor; elsewhere the event loop's timer has to do, and requests of an
open loop are up to a millisecond late. Their latency counts from the intended time all the same.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE = 1
_SECOND_NS = 1_000_000_000


class _Time(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """The system's timer (Linux).

    Args:
        loop: The event loop that watches it.
        ring: What is called when the time has come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._time = _Time()
        loop.add_reader(self._descriptor, self._rings)

    def set(self, at_ns: int) -> None:
        """Ring once at this time of the monotonic clock, at once if it is over."""
        self._time.value_s, self._time.value_ns = divmod(max(at_ns, 1), _SECOND_NS)
        self._library.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(self._time), None)

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _rings(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # set anew since it rang
        self._ring()


class LoopTimer:
    """The event loop's timer.

    Args:
        loop: The event loop.
        ring: What is called when the time has come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        """Ring once at this time of the loop's clock, which is the monotonic one."""
        self.close()
        self._handle = self._loop.call_at(at_ns / _SECOND_NS, self._ring)

    def close(self) -> None:
        """Never ring again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


Alarm = TimerFd | LoopTimer


def alarm(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Alarm:
    """Return the most precise timer there is here."""
    return TimerFd(loop, ring) if sys.platform == "linux" else LoopTimer(loop, ring)
