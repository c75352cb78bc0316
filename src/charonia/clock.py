"""The engine's clock, and a timer with microsecond resolution where the system has one."""

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

now_ns: Callable[[], int] = time.monotonic_ns
"""Monotonic time in ns; all of the engine uses this clock."""

_CLOCK_MONOTONIC: Final = 1
_TFD_NONBLOCK_CLOEXEC: Final = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME: Final = 1
_TIMER_SPEC: Final = struct.Struct("@qqqq")
_SECOND_NS: Final = 1_000_000_000


class WakeTimer:
    """Calls back once at a monotonic time; setting it again replaces the time.

    Timers of event loops have a resolution of a millisecond, which would turn a queue delay of 100 us into one of 1000.
    On Linux this is a timerfd that the loop watches; elsewhere the loop's own timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
            if self._fd >= 0:
                loop.add_reader(self._fd, self._expired)

    def set(self, at_ns: int | None) -> None:
        """Call back at `at_ns` (immediately if that has passed), or not at all if None."""
        if self._fd >= 0:
            # A zero time would disarm the timer, and monotonic time 0 is always in the past.
            at = 0 if at_ns is None else max(at_ns, 1)
            spec = _TIMER_SPEC.pack(0, 0, at // _SECOND_NS, at % _SECOND_NS)
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None)
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if at_ns is not None:
            self._handle = self._loop.call_later(max(0, at_ns - now_ns()) / _SECOND_NS, self._callback)

    def close(self) -> None:
        """Never call back again. Safe to call twice."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # the timer was set again between the wake-up and this call
            return
        self._callback()
