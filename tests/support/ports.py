"""Ports for programs that cannot bind port 0 and report which one they got.

A port that was bound and closed can go to any other process. These ports lie below the range that the system assigns,
and a locked file reserves each of them for the process that asked, until it exits.
"""

import atexit
import fcntl
import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

_FIRST = 16_384
_held = ExitStack()
atexit.register(_held.close)


def free_port() -> int:
    """Return a port that no other test gets while this process runs."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and the last of so many consecutive ports, each reserved as by `free_port`.

    Raises:
        RuntimeError: The tests that run now hold too many of them.
    """
    folder = Path(tempfile.gettempdir()) / f"charonia-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    blocks = (_assigned_from() - _FIRST) // count
    for step in range(blocks):
        first = _FIRST + (os.getpid() + step) % blocks * count
        with ExitStack() as locks:
            if all(_reserve(folder, port, locks) for port in range(first, first + count)):
                _held.push(locks.pop_all())
                return first, first + count - 1
    raise RuntimeError(f"no {count} consecutive ports are free between {_FIRST} and {_assigned_from()}")


def _assigned_from() -> int:
    """Return the first port that the system assigns to sockets without one."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # other systems begin at 49152
        return 32_768


def _reserve(folder: Path, port: int, locks: ExitStack) -> bool:
    lock = locks.enter_context((folder / str(port)).open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
