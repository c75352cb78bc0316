"""The timers of a connection: handshake, keepalive, idleness, age."""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from charonia.server.grpc.call_table import CallTable
from charonia.server.grpc.limits import GrpcLimits
from charonia.server.listening import unsent_bytes

AGE_JITTER = 0.1
"""Random variation of the age limit, so that clients do not all reconnect at once."""


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

    __slots__ = ("_connection", "_handles", "_limits", "_loop", "_pings", "_sends", "active", "calls")

    calls: CallTable

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: GrpcLimits, connection: Timed) -> None:
        self._loop = loop
        self._limits = limits
        self._connection = connection
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._pings = 0
        self._sends = 0
        self.active = False

    def await_greeting(self) -> None:
        """Start the time limit for the client's first bytes."""
        self._arm("handshake", self._limits.handshake_timeout_s, self._connection.abort)

    def start(self) -> None:
        """Start keepalive, age and idleness: the client has sent its preface."""
        limits = self._limits
        self._disarm("handshake")
        self._arm("keepalive", limits.keepalive_time_s, self._keepalive)
        if limits.connection_age_max_s:
            jitter = random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            self._arm("age", limits.connection_age_max_s * jitter, self._too_old)
        self.call_count_changed()

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

    def call_count_changed(self) -> None:
        """Start or stop the idle timer."""
        if self._limits.connection_idle_max_s:
            self._disarm("idle")
            if not self.calls:
                self._arm("idle", self._limits.connection_idle_max_s, self._idle)

    def _arm(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._handles[name] = self._loop.call_later(delay_s, callback)

    def _disarm(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

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

    def _idle(self) -> None:
        if not self.calls:
            self._connection.retire(self._limits.connection_age_grace_s)
