"""Tensors of GPUs that the server has lent, as the worker's end of a connection takes and gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker.charonia_cuda import CudaError
    from charonia.server.backends.python.worker.charonia_errors import TritonError
    from charonia.server.backends.python.worker.charonia_gpu import GpuArray, borrowed_array
    from charonia.server.backends.python.worker.charonia_tensor import GpuTensor
else:  # siblings of the worker's script; the package is not there
    from charonia_cuda import CudaError
    from charonia_errors import TritonError
    from charonia_gpu import GpuArray, borrowed_array
    from charonia_tensor import GpuTensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from charonia.server.backends.python.worker.charonia_accounts import RegionAccounts

FAILURE_LENGTH = 2
"""Length of what stands in the place of a tensor that cannot be had: number of the `TritonError` code, and why."""


class Refused(Exception):
    """A tensor cannot be had.

    Attributes:
        failure: The number of the `TritonError` code, and why.
    """

    def __init__(self, failure: tuple[Any, ...]) -> None:
        super().__init__(failure)
        self.failure: tuple[int, str] = (failure[0], failure[1])


class GpuLoans:
    """What the server has lent.

    Args:
        accounts: The regions and loans of both ends.
        soon: Called, from any thread, when there is something to give back.
    """

    def __init__(self, accounts: RegionAccounts, soon: Callable[[], None]) -> None:
        self._accounts = accounts
        self._soon = soon

    def take(self, reader: str, entry: tuple[Any, ...]) -> GpuTensor:
        """Return a tensor that the server has lent, opened, or one of this process that comes back.

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
        source = borrowed_array(place, shape, datatype, self._accounts.pool, self._give_back)
        if isinstance(source, GpuArray):
            try:
                source.borrowed.open()
            except CudaError as error:
                reason = f"tensor '{name}' in the memory of a GPU cannot be reached from '{reader}': {error}"
                raise Refused((TritonError.UNAVAILABLE, reason)) from error
        return GpuTensor(name, datatype, source)

    def _give_back(self, loan: int) -> None:
        self._accounts.released.append(loan)
        self._soon()
