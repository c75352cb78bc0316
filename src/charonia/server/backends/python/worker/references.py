"""Reference counts of shared memory at the worker's end of a channel: regions, and CUDA IPC handles.

Memory with references at this end must not change at the other end. So messages in both directions list the references
that their sender has dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ....channel import channel
from ....channel.cuda_driver import CudaError
from ....channel.cuda_ipc import GpuArray, imported_array
from ....channel.regions import Mappings, RegionPool
from .errors import TritonError
from .tensor import GpuTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ....channel.addresses import Mapped

FAILURE_LENGTH = 2
"""Length of what replaces the place of a tensor that cannot be had: number of the `TritonError` code, and why."""


class Refused(Exception):
    """A tensor is not available.

    Attributes:
        failure: The number of the `TritonError` code, and why.
    """

    def __init__(self, failure: tuple[Any, ...]) -> None:
        super().__init__(failure)
        self.failure: tuple[int, str] = (failure[0], failure[1])


class _HeldRegions(Mappings):
    """The server's regions. Messages no longer name those that were released, even if the model has kept an array."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()

    def may_name(self, mapped: Mapped) -> bool:
        return super().may_name(mapped) and mapped.id in self.held


class References:
    """The references between both ends.

    The thread that reads notes what comes. All that makes a message happens with the lock of the senders.

    Args:
        release_soon: Called, from any thread, when a handle waits to be released.

    Attributes:
        mappings: The server's regions.
        pool: This end's regions and exports. Belongs to the senders, but for looking up exports.
        released: Regions and handles of the server that nothing here refers to any more; any thread appends to it.
    """

    def __init__(self, release_soon: Callable[[], None]) -> None:
        self.mappings = _HeldRegions()
        self.released: list[int] = []
        self.pool = RegionPool(self.mappings)
        self._release_soon = release_soon
        self._returned: deque[Sequence[int]] = deque()  # regions of ours that the server no longer refers to
        self._freed: list[int] = []  # of these, those that were freed

    def note(self, released: Sequence[int], freed: Sequence[int]) -> None:
        """Note what came with a message: references to ours that were dropped, and regions that the server freed."""
        if released:
            self._returned.append(released)  # to the pool, which belongs to the senders
        if freed:
            self.mappings.drop(freed)

    def hold(self, regions: Sequence[int]) -> None:
        """Note that a message has come whose tensors lie in regions of the server."""
        self.mappings.held.update(regions)

    def counted(self, data: memoryview, region: int) -> memoryview:
        """Return a view of the same bytes that releases the region when the last array over it is gone."""
        # Views of an array keep what it was made over, and numpy does not look through a memoryview to find something
        # else to keep.
        holder = np.frombuffer(data, np.uint8)
        weakref.finalize(holder, self.released.append, region).atexit = False
        return memoryview(holder)  # type: ignore[arg-type] # an array is a buffer

    def open_handle(self, reader: str, entry: tuple[Any, ...]) -> GpuTensor:
        """Return a tensor that the server has sent as a CUDA IPC handle, opened, or one of this process that returns.

        Args:
            reader: Name of the instance, for errors.
            entry: Name, datatype, shape and place as they came.

        Raises:
            Refused: It cannot be had.
            ChannelError: The place leads nowhere.
        """
        name, datatype, shape, place = entry
        if len(place) == FAILURE_LENGTH:
            raise Refused(place)
        source = imported_array(place, shape, datatype, self.pool, self._release_handle)
        if isinstance(source, GpuArray):
            try:
                source.imported.open()
            except CudaError as error:
                reason = f"tensor '{name}' in the memory of a GPU cannot be reached from '{reader}': {error}"
                raise Refused((TritonError.UNAVAILABLE, reason)) from error
        return GpuTensor(name, datatype, source)

    def compose(self) -> channel.Outgoing:
        """Return an empty message; it can use the regions that the server has released."""
        while self._returned:
            self._freed += self.pool.release(self._returned.popleft())
        return channel.Outgoing(self.pool)

    def take(self) -> tuple[list[int], list[int]]:
        """Return what a message tells: references to the server's that were dropped, and ours that were freed."""
        freed, self._freed = self._freed, []
        if not self.released:
            return [], freed
        released = self.released.copy()
        del self.released[: len(released)]  # in place: finalizers append to it
        self.mappings.held.difference_update(released)
        return released, freed

    def _release_handle(self, export_id: int) -> None:
        self.released.append(export_id)
        self._release_soon()
