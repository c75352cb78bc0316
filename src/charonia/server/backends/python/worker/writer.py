"""The sending side of a worker's connection: messages are composed and written under one lock.

Any thread of the model may send, and a finalizer may interrupt a thread that holds the lock. Messages of finalizers are
therefore deferred: they are sent at once if the lock is free, else by the thread that holds it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from . import channel, datatypes
from .errors import TritonError, TritonModelException
from .reader import SERVER_GONE, Disconnected
from .references import References
from .regions import ChannelError
from .tensor import GpuTensor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from .host import Result
    from .tensor import Tensor


ELEMENT_BYTES_MAX = 4096
"""Largest string that travels in the header of a message, if it is the only element of its tensor."""


class ChannelWriter:
    """Writes messages to the server.

    Args:
        sock: The socket that the server reads from, blocking.

    Attributes:
        lock: To be held from composing a message until it is written.
        references: The shared memory that messages refer to.
        is_child: Whether this is a process that the model has forked, which must not write.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.references = References(partial(self.defer, self.release))
        self.is_child = False
        self._sock = sock
        self._deferred: deque[Callable[[], None]] = deque()

    def send(self, header: tuple[object, ...]) -> None:
        """Send a message without tensors.

        Raises:
            Disconnected: The server has gone.
            TritonModelException: The message cannot be sent.
        """
        with self.lock:
            self.write(header)
        self.run_deferred()

    def write(self, header: tuple[object, ...], outgoing: channel.Outgoing | None = None) -> None:
        """Send a message, with the lock. Raises as `send`."""
        if self.is_child:
            raise TritonModelException(
                "a process that a model has forked cannot reach the server; call other models and send responses in "
                "'execute' or in threads, and pass the results to the process"
            )
        outgoing = outgoing or self.references.compose()
        try:
            buffers = outgoing.frame(header)
        except ChannelError as error:
            outgoing.withdraw()
            raise TritonModelException(str(error)) from error
        try:
            channel.send_all(self._sock, buffers, outgoing.fds)
        except (BrokenPipeError, ConnectionResetError):
            raise Disconnected(SERVER_GONE) from None

    def encode(
        self, results: Sequence[Result | None], name: str
    ) -> tuple[list[tuple[object, ...] | None], channel.Outgoing]:
        """Return results as they travel, and the message that holds their tensors; with the lock.

        Args:
            results: Responses and failures; None stays None.
            name: Name of the instance, for errors.
        """
        outgoing = self.references.compose()
        try:
            return [None if result is None else _encode(result, outgoing) for result in results], outgoing
        except Exception as error:  # elements of a string tensor may be anything
            outgoing.withdraw()
            failure = (TritonError.INTERNAL, f"a response of model '{name}' cannot be sent: {error}")
            return [None if result is None else failure for result in results], self.references.compose()

    def encode_inputs(self, tensors: Sequence[Tensor]) -> tuple[list[tuple[object, ...]], channel.Outgoing]:
        """Return the inputs of a call as they travel, and the message that holds them; with the lock."""
        outgoing = self.references.compose()
        try:
            return [_encode_tensor(tensor, outgoing) for tensor in tensors], outgoing
        except BaseException:
            outgoing.withdraw()
            raise

    def export_tensors(self) -> None:
        """Send tensors of GPUs as CUDA IPC handles, which the server can open, from now on; before, they are copied."""
        self.references.pool.exports_gpu = True

    def release(self) -> None:
        """Tell the server of dropped references without waiting for another message, and free what it has released."""
        with self.lock:
            outgoing = self.references.compose()
            if self.references.released:
                self.write(("release", *self.references.take()), outgoing)

    def defer(self, action: Callable[[], None]) -> None:
        """Run an action that may send: now, unless a thread is sending, which then runs it afterwards."""
        if not self.is_child:
            self._deferred.append(action)
            self.run_deferred()

    def run_deferred(self) -> None:
        """Run deferred actions, unless a thread is sending."""
        while self._deferred and self.lock.acquire(False):
            self.lock.release()
            with contextlib.suppress(IndexError, Disconnected):  # another thread was faster; or the server has gone
                self._deferred.popleft()()

    def become_child(self) -> None:
        """In a process that the model has forked: leave the connection, which has one worker at its end, alone."""
        self.is_child = True
        self._sock.close()


def _encode_tensor(tensor: Tensor, outgoing: channel.Outgoing) -> tuple[object, ...]:
    """Return name, datatype, shape and place of a tensor, which is placed in a message.

    A short text is its own place.
    """
    if type(tensor) is GpuTensor and outgoing.pool.exports_gpu:
        exported = outgoing.export(tensor._source, tensor._datatype)
        if exported is not None:
            return (tensor._name, tensor._datatype, tuple(tensor.shape()), exported)
    array, datatype = tensor._array, tensor._datatype
    if datatype == "BYTES" and array.size == 1:
        element = array.item()
        if type(element) is bytes and len(element) <= ELEMENT_BYTES_MAX:
            return (tensor._name, datatype, array.shape, element)
    return (tensor._name, datatype, array.shape, outgoing.place(datatypes.bytes_of(datatype, array)))


def _encode(result: Any, outgoing: channel.Outgoing) -> tuple[object, ...]:
    if result[0] >= 0:
        return result  # type: ignore[no-any-return] # a failure
    tensors = []
    for tensor in result[1]:
        tensors.append(_encode_tensor(tensor, outgoing))  # noqa: PERF401
    return (-1, tensors, result[2])
