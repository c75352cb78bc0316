"""The time limits of a connection: keepalive and age have timers, all others are checked once in a while (`check`).

A check costs requests nothing. It ends what a client has begun and does not finish: a frame, a message, an idle time.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from charonia.server.grpc.call_table import CallTable
from charonia.server.grpc.limits import GrpcLimits
from charonia.server.listening import unsent_bytes

AGE_JITTER = 0.1
"""Random variation of the age limit, so that clients do not all reconnect at once."""


_FRAME = 0
"""In place of a stream: a frame that is no part of a call yet."""


class Timed(Protocol):
    """What timers do with their connection. See `GrpcConnection`."""

    def send_ping(self) -> None: ...

    def retire(self, grace_s: float) -> int | None:
        """Ask the client to reconnect, and close once its calls are done, or after `grace_s` (0: no limit)."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...


class Timers:
    """The timers of one connection.

    Reads do not touch timers: they set the flag `active`, which each keepalive period checks.

    Attributes:
        active: Set whenever data is received.
        calls: The connection's calls.
    """

    __slots__ = (
        "_connection",
        "_handles",
        "_limits",
        "_loop",
        "_newest_stream",
        "_pings",
        "_quiet_since_s",
        "_sends",
        "_unfinished",
        "active",
        "calls",
    )

    calls: CallTable

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: GrpcLimits, connection: Timed) -> None:
        self._loop = loop
        self._limits = limits
        self._connection = connection
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._pings = 0
        self._sends = 0
        self._newest_stream = -1
        self._quiet_since_s = 0.0
        self._unfinished: dict[int, tuple[float, int]] = {}
        self.active = False

    def start(self) -> None:
        """Start keepalive and age: the client has begun its preface."""
        limits = self._limits
        self._arm("keepalive", limits.keepalive_time_s, self._keepalive)
        if limits.connection_age_max_s:
            jitter = random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            self._arm("age", limits.connection_age_max_s * jitter, self._too_old)

    def stop(self) -> None:
        """Cancel all timers."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
        del self._connection  # breaks a reference cycle

    def await_end(self, transport: asyncio.WriteTransport) -> None:
        """Start the time limit for closing: the client may have stopped reading the remaining output."""
        left = unsent_bytes(transport)
        self._arm("end", self._limits.keepalive_timeout_s, lambda: self._check_end(transport, left))

    def excuse(self) -> None:
        """Begin again with the time for unfinished messages: the server does not read."""
        self._unfinished = {}

    def check(self, now_s: float, newest_stream: int, *, is_cut: bool) -> None:
        """End the calls and the connection of a client that takes too long.

        Args:
            now_s: Time of the event loop.
            newest_stream: The newest stream with a request.
            is_cut: Whether what the client has sent ends within a frame.
        """
        limits, calls, before = self._limits, self.calls, self._unfinished
        unfinished = calls.unfinished()
        if is_cut and not calls:
            unfinished[_FRAME] = 0
        self._unfinished = {}
        for stream_id, received in unfinished.items():
            since_s, earlier = before.get(stream_id, (now_s, received))
            if received < earlier:  # of a further message
                since_s = now_s
            self._unfinished[stream_id] = since_s, received
            limit_s = limits.body_timeout_s + received / limits.body_bytes_per_s_min
            if stream_id == _FRAME and now_s - since_s > limits.header_timeout_s:
                self._connection.retire(limits.connection_age_grace_s)
            elif stream_id != _FRAME and now_s - since_s > limit_s:
                calls.time_out(stream_id, limit_s)
        if calls or newest_stream != self._newest_stream:
            self._newest_stream, self._quiet_since_s = newest_stream, now_s
        elif limits.connection_idle_max_s and now_s - self._quiet_since_s > limits.connection_idle_max_s:
            self._connection.retire(limits.connection_age_grace_s)

    def _arm(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._handles[name] = self._loop.call_later(delay_s, callback)

    def _keepalive(self) -> None:
        limits = self._limits
        is_due = not self.active and (limits.keepalive_without_calls or len(self.calls) > 0)
        self.active = False
        if self.calls.sends != self._sends:
            self._sends = self.calls.sends
            self._pings = 0
        if is_due and (limits.pings_without_data_max == 0 or self._pings < limits.pings_without_data_max):
            self._pings += 1
            self._connection.send_ping()
            self._arm("keepalive", limits.keepalive_timeout_s, self._unanswered)
        else:
            self._arm("keepalive", limits.keepalive_time_s, self._keepalive)

    def _unanswered(self) -> None:
        if self.active:
            self._arm("keepalive", self._limits.keepalive_time_s, self._keepalive)
        else:
            self._connection.abort()

    def _check_end(self, transport: asyncio.WriteTransport, before: int) -> None:
        if unsent_bytes(transport) < before:
            self.await_end(transport)
        else:
            self._connection.abort()

    def _too_old(self) -> None:
        self._connection.retire(self._limits.connection_age_grace_s)
