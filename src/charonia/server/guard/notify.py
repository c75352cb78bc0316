"""A service's messages to its parent: the protocol of systemd's sd_notify, and its watchdog.

A message is a datagram of lines `NAME=value` to the Unix socket that NOTIFY_SOCKET names. The guard accepts the same
messages from its processes, so a server sends the same to the guard and to systemd.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from charonia.server.metrics.processes import ProcessRecord, from_text, to_text

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"
HANDED_OVER = "X_CHARONIA_HANDED_OVER=1"
"""An engine's message to its guard: its front ends send it no new requests."""

MESSAGE_BYTES_MAX = 4096

PINGS_PER_LIMIT = 3
"""Heartbeats in the time after which one that is missing counts as a hang."""

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def status(text: str) -> str:
    """Return the message that shows a sentence as the service's state."""
    return "STATUS=" + " ".join(text.split())[: MESSAGE_BYTES_MAX // 8]


def reloading(now_ns: int) -> tuple[str, ...]:
    """Return the fields that inform systemd of a reload of the service, until `READY`.

    Args:
        now_ns: Now, on the machine's monotonic clock.
    """
    return "RELOADING=1", f"MONOTONIC_USEC={now_ns // 1000}"


def socket_address(name: str) -> str:
    """Return the address of a socket as NOTIFY_SOCKET spells it, "" for a form that is not supported.

    That of an abstract socket begins with "@" there, and with NUL for the system.
    """
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def watchdog_s(microseconds: str, pid: str, own_pid: int) -> float:
    """Return the longest time between two heartbeats in seconds, 0 for no watchdog."""
    if pid and pid != str(own_pid):
        return 0.0
    return int(microseconds) / 1e6 if microseconds.isdecimal() else 0.0


class Notifier:
    """Sends messages to the parent of this process, if it has requested them.

    Args:
        address: Address of its socket, "" for none.
        limit_s: Longest time between two heartbeats in seconds, 0 for no heartbeats.
    """

    def __init__(self, address: str = "", limit_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._address = address

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Return the notifier of this process, and remove its variables: workers are not the service."""
        name, microseconds, pid = (environment.pop(variable, "") for variable in _VARIABLES)
        return cls(socket_address(name), watchdog_s(microseconds, pid, os.getpid()))

    def send(self, *fields: str) -> None:
        """Send a message of these fields. One that cannot be sent is lost."""
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.setblocking(False)
                sending.sendto("\n".join(fields).encode()[:MESSAGE_BYTES_MAX], self._address)

    async def ping(self) -> None:
        """Send heartbeats until cancelled, so that a hang of this event loop is noticed."""
        while self.limit_s:
            self.send(WATCHDOG)
            await asyncio.sleep(self.limit_s / PINGS_PER_LIMIT)


RECORD_VARIABLE = "CHARONIA_PROCESSES"
"""Environment variable of the processes of a server: path of the file."""


def write_record(path: Path, records: Sequence[ProcessRecord]) -> None:
    """Replace the record. On a full disk the file stays unchanged: that costs metrics, not the server."""
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(to_text(records), encoding="utf-8")
        new.replace(path)


def read_record() -> tuple[ProcessRecord, ...]:
    """Return the record of the guard that started this process; nothing if there is none."""
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return ()
    try:
        return from_text(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the guard has ended, and so will this process
        return ()


def write_finish(folder: Path, name: str, finish_s: float) -> None:
    """Write how long a stopping front end has for its connections; 0 where the whole server stops."""
    with contextlib.suppress(OSError):
        (folder / f"{name}.finish").write_text(str(finish_s), encoding="utf-8")


def read_finish(folder: Path, name: str) -> float | None:
    """Return what `write_finish` wrote; None if another program stops the front end, or it cannot be read."""
    try:
        return float((folder / f"{name}.finish").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the front end must stop in any case
        return None
