"""Who looks at which shared memory, as the worker's end of a connection knows it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker import charonia_channel as channel
    from charonia.server.backends.python.worker.charonia_regions import Mappings, RegionPool
else:  # siblings of the worker's script; the package is not there
    import charonia_channel as channel
    from charonia_regions import Mappings, RegionPool

if TYPE_CHECKING:
    from collections.abc import Sequence


class _HeldRegions(Mappings):
    """The server's regions. Those that were given back are not named in messages any more, whoever kept an array."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()

    def id_at(self, address: int) -> int:
        region = super().id_at(address)
        return region if region in self.held else 0


class RegionAccounts:
    """The regions of both ends.

    What comes is noted by the thread that reads. All that makes a message happens with the lock of those who send.

    Attributes:
        mappings: The server's regions.
        pool: This end's. Belongs to those who send, but for a look at what was lent.
        released: Those that nobody here looks at any more, to be given back; appended to by any thread.
    """

    def __init__(self) -> None:
        self.mappings = _HeldRegions()
        self.released: list[int] = []
        self.pool = RegionPool(self.mappings)
        self._returned: deque[Sequence[int]] = deque()  # regions of ours that the server no longer looks at
        self._dropped: list[int] = []  # of these, those that were given up

    def given_back(self, released: Sequence[int], dropped: Sequence[int]) -> None:
        """Note what came with a message: regions of ours that are free again, and regions that the server gave up."""
        if released:
            self._returned.append(released)  # to the pool, which belongs to those who send
        if dropped:
            self.mappings.drop(dropped)

    def hold(self, regions: Sequence[int]) -> None:
        """Note that a message has come whose tensors lie in regions of the server."""
        self.mappings.held.update(regions)

    def leased(self, data: memoryview, region: int) -> memoryview:
        """Return the same bytes such that the region is given back when the last array over them is gone."""
        # Views of an array keep what it was made over, and numpy does not look through a memoryview to find something
        # else to keep.
        holder = np.frombuffer(data, np.uint8)
        weakref.finalize(holder, self.released.append, region).atexit = False
        return memoryview(holder)  # type: ignore[arg-type] # an array is a buffer

    def compose(self) -> channel.Outgoing:
        """Return an empty message; what the server has given back can be used for it."""
        while self._returned:
            self._dropped += self.pool.release(self._returned.popleft())
        return channel.Outgoing(self.pool)

    def take(self) -> tuple[list[int], list[int]]:
        """Return what is to be told with a message: regions of the server to give back, and ours that were given up."""
        dropped, self._dropped = self._dropped, []
        if not self.released:
            return [], dropped
        released = self.released.copy()
        del self.released[: len(released)]  # in place: finalizers append to it
        self.mappings.held.difference_update(released)
        return released, dropped
