"""The requests of a front end that wait while the engine is away. `reconnect.py` decides about them."""

import asyncio
import time
from collections.abc import Callable

from charonia.core.calls import Reply
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.server.front_ends.reconnect import Cancel, Connected, Event, Leave, Lost, Reconnect, Send, Submit, Tick


class HeldRequests:
    """Requests that wait for the engine.

    Args:
        send: Sends a request, given with its number, to the engine.

    Attributes:
        is_away: Whether the engine is being started again.
    """

    def __init__(self, send: Callable[[int, InferRequest, Reply], None]) -> None:
        self.is_away = False
        self._send = send
        self._reconnect = Reconnect()
        self._held: dict[int, tuple[InferRequest, Reply]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, number: int, request: InferRequest, reply: Reply) -> None:
        """Keep a request until the engine is back, or refuse it."""
        self._held[number] = (request, reply)
        self._handle(Submit(number, size_of(request)))

    def cancel(self, number: int) -> None:
        """Drop a request, unless it is not held."""
        if self._held.pop(number, None) is not None:
            self._handle(Cancel(number))

    def engine_lost(self) -> None:
        self._handle(Lost())

    def engine_back(self) -> None:
        """The engine is there, and its models are known."""
        self._handle(Connected())

    def leave(self) -> None:
        """Refuse everything: the front end leaves."""
        self._handle(Leave())

    def _handle(self, event: Event) -> None:
        now_ns = time.monotonic_ns()
        commands = self._reconnect.handle(event, now_ns)
        self.is_away = self._reconnect.is_away
        for command in commands:
            request, reply = self._held.pop(command.id)
            if isinstance(command, Send):
                self._send(command.id, request, reply)
            else:
                reply(command.error, True)
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self._reconnect.wake_at()
        if wake_at is not None:
            delay_s = max(0, wake_at - now_ns) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())


def size_of(request: InferRequest) -> int:
    """Return the bytes of a request's tensors."""
    size = 0
    for tensor in request.inputs.values():
        if tensor.datatype is DataType.BYTES:
            elements: list[bytes] = tensor.array.ravel().tolist()
            size += sum(map(len, elements))
        else:
            size += tensor.array.nbytes
    return size
