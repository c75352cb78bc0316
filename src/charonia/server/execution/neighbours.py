"""The time of the last request in each process of a server, shared among them.

A process that polls occupies a core, which a neighbour may need: with clients at several processes, each process would
see a lone caller, and all would poll.
"""

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

PAGE_NAME = "requests"
"""File with the time of the latest request of each process, in the private folder of the server."""

PAGE_BYTES = 8192
"""Its size: 8 bytes for each of 1024 processes."""

AWAKE_NS = 20_000_000
"""Time after a request for which a process needs a core: long enough for one that had to wait for it."""

_TIME = struct.Struct("@q")


def leaves_a_core(latest_ns: Iterable[int], now_ns: int, cores: int) -> bool:
    """Whether a core is left if this process polls. Pure.

    With one process, two cores are enough; each neighbour that had a request lately needs one more.

    Args:
        latest_ns: When each of the neighbours had its latest request, monotonic time, 0 for never.
        now_ns: Monotonic time.
        cores: Cores that the processes share.
    """
    return 1 + sum(bool(at_ns) and now_ns - at_ns <= AWAKE_NS for at_ns in latest_ns) < cores


class Neighbours:
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

    def note(self, now_ns: int) -> None:
        _TIME.pack_into(self._page, self._own, now_ns)

    def leave_a_core(self, now_ns: int) -> bool:
        """Whether a core is left if this process polls."""
        latest_ns = (_TIME.unpack_from(self._page, at)[0] for at in self._others)
        return leaves_a_core(latest_ns, now_ns, self._cores)
