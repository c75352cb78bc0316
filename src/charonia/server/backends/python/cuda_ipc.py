"""GPU tensors between the server and its workers, as CUDA IPC handles that are opened on first use.

A tensor that a worker has exported is a `WorkerContent`. Another worker gets the same handle; the export lasts until
both have released it. Tensors without a handle are copied through host memory.
"""

from collections.abc import Callable
from typing import Any

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, unavailable
from charonia.core.tensor import Array, DeviceContent, DeviceTensor
from charonia.server.backends.python.worker.channel import Incoming, Outgoing
from charonia.server.backends.python.worker.cuda_driver import CudaError
from charonia.server.backends.python.worker.cuda_ipc import GpuArray, imported_array
from charonia.server.backends.python.worker.regions import ChannelError


class WorkerContent:
    """A worker's tensor in GPU memory, for the server."""

    def __init__(self, array: GpuArray) -> None:
        self.array = array

    @property
    def is_lost(self) -> bool:
        """Whether the worker has ended before its memory was opened here."""
        exporter = self.array.imported.exporter
        return exporter is not None and exporter.is_closed and not self.array.imported.is_open

    @property
    def native(self) -> object:
        """The elements, with open memory. Raises UNAVAILABLE when it cannot be opened."""
        self._check()
        try:
            self.array.imported.open()
        except CudaError as error:
            raise _out_of_reach(error) from error
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def to_host(self) -> Array:
        """Return a copy in host memory. Raises UNAVAILABLE when the elements are lost."""
        self._check()
        try:
            return self.array.cpu()
        except CudaError as error:
            raise _out_of_reach(error) from error

    def _check(self) -> None:
        if self.is_lost:
            raise _gone()


def exported_place(tensor: DeviceTensor, outgoing: Outgoing) -> tuple[object, ...] | None:
    """Return the place of a tensor that is exported to a worker, None where it must be copied.

    Raises:
        ServingError: UNAVAILABLE when it is lost.
    """
    content = tensor.content
    if isinstance(content, WorkerContent):
        if content.is_lost:
            raise _gone()
        exporter = content.array.imported.exporter
        if exporter is not None and exporter.is_closed:
            return None  # open here only
        return outgoing.export(content.array, tensor.datatype.wire, content)
    return outgoing.export(content.native, tensor.datatype.wire, content, is_done=True)


def imported_tensor(entry: tuple[Any, ...], message: Incoming, release: Callable[[int], None]) -> DeviceTensor:
    """Return a tensor that a worker has exported, or sends back.

    Args:
        entry: Name, datatype, shape and place as received.
        message: The message.
        release: Called from any thread with the id of an export without references.

    Raises:
        ChannelError: The message is invalid.
    """
    name, wire, shape, place = entry
    found = imported_array(place, shape, wire, message.ours, release)
    if not isinstance(name, str):
        raise ChannelError(f"the name of a tensor is malformed: {name!r}")
    content: DeviceContent = WorkerContent(found) if isinstance(found, GpuArray) else found
    return DeviceTensor(name, BY_WIRE[wire], content)


def _gone() -> ServingError:
    return unavailable("a tensor in the memory of a GPU is gone: the worker process that made it has ended")


def _out_of_reach(error: CudaError) -> ServingError:
    return unavailable(
        f"a tensor in the memory of a GPU cannot be reached: {error}",
        hint="the server must see the GPUs that its workers use: CUDA_VISIBLE_DEVICES",
    )
