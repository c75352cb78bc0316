"""Tensors of GPUs between the server and its workers: passed on by their handles, and opened when somebody looks.

A tensor that a worker has lent is a `WorkerContent`. Another worker gets the same handle; the loan lasts until that one
has given it back, too. Where a handle cannot be had, tensors are copied by the memory of the CPU.
"""

from collections.abc import Callable
from typing import Any

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, unavailable
from charonia.core.tensor import Array, DeviceContent, DeviceTensor
from charonia.server.backends.python.worker.charonia_channel import Incoming, Outgoing
from charonia.server.backends.python.worker.charonia_cuda import CudaError
from charonia.server.backends.python.worker.charonia_gpu import GpuArray, borrowed_array
from charonia.server.backends.python.worker.charonia_regions import ChannelError


class WorkerContent:
    """What a worker has in the memory of a GPU, for the server."""

    def __init__(self, array: GpuArray) -> None:
        self.array = array

    @property
    def is_lost(self) -> bool:
        """Whether the worker is gone, and with it whatever is not open here."""
        lender = self.array.borrowed.lender
        return lender is not None and lender.is_closed and not self.array.borrowed.is_open

    @property
    def native(self) -> object:
        """The elements, opened. Raises UNAVAILABLE when that cannot be."""
        self._check()
        try:
            self.array.borrowed.open()
        except CudaError as error:
            raise _out_of_reach(error) from error
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return self.array.shape

    def to_host(self) -> Array:
        """Return a copy in the memory of the CPU. Raises UNAVAILABLE when the elements cannot be had."""
        self._check()
        try:
            return self.array.cpu()
        except CudaError as error:
            raise _out_of_reach(error) from error

    def _check(self) -> None:
        if self.is_lost:
            raise _gone()


def lend(tensor: DeviceTensor, outgoing: Outgoing) -> tuple[object, ...] | None:
    """Return the place of a tensor that is lent to a worker, None where it must be copied.

    Raises:
        ServingError: UNAVAILABLE when it is gone.
    """
    content = tensor.content
    if isinstance(content, WorkerContent):
        if content.is_lost:
            raise _gone()
        lender = content.array.borrowed.lender
        if lender is not None and lender.is_closed:
            return None  # open here only
        return outgoing.lend(content.array, tensor.datatype.wire, content)
    return outgoing.lend(content.native, tensor.datatype.wire, content, is_done=True)


def borrowed(entry: tuple[Any, ...], message: Incoming, give_back: Callable[[int], None]) -> DeviceTensor:
    """Return a tensor that a worker has lent, or sends back.

    Args:
        entry: Name, datatype, shape and place as they came.
        message: The message.
        give_back: Called with the id of a loan when nobody looks at it any more, from any thread.

    Raises:
        ChannelError: The message says what cannot be.
    """
    name, wire, shape, place = entry
    found = borrowed_array(place, shape, wire, message.ours, give_back)
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
