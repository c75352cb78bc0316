"""Calls with any number of requests and responses: reading, bounds and the end. What is said is a `Conversation`'s.

Bytes of requests are not acknowledged while the conversation has as much in flight as it may, or while too much of the
response waits for the caller: the caller's window closes, and it is the caller who waits.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.server.grpc.calls import Call, Wire
from charonia.wire.grpc_framing import Buffer, MessageReader
from charonia.wire.grpc_headers import CallHead
from charonia.wire.grpc_status import RpcError, Status


class Conversation(Protocol):
    """What is said on a stream."""

    def start(self, message: Buffer) -> None:
        """Take a request.

        Raises:
            RpcError: The stream cannot go on.
        """
        ...

    def in_flight(self) -> int:
        """Return the number of requests that are not answered yet."""
        ...

    def drop(self) -> None:
        """Cancel everything in flight."""
        ...


class StreamCall(Call):
    """A call on which both sides send messages."""

    __slots__ = ("_conversation", "_is_ending", "_is_pumping", "_is_winding_down", "_reader", "_unconsumed_bytes")

    def __init__(
        self, wire: Wire, stream_id: int, name: str, head: CallHead, converse: "Callable[[StreamCall], Conversation]"
    ) -> None:
        super().__init__(wire, stream_id, name, head)
        self._reader = MessageReader(head.encoding, wire.service.limits.message_bytes_max)
        self._conversation = converse(self)
        self._unconsumed_bytes = 0
        self._is_ending = False
        self._is_pumping = False
        self._is_winding_down = False

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the requests."""
        self._unconsumed_bytes += len(data)
        self._is_ending = self._is_ending or end
        try:
            self._reader.feed(data)
        except RpcError as error:
            self.fail(error)
        self.resume()

    def resume(self) -> None:
        """Start the requests that may start, and end the call where all is said."""
        if self._is_pumping or self.is_over:
            return
        self._is_pumping = True
        try:
            is_held = self._pump()
            if self._is_ending and not is_held and not self.is_over:
                if self._reader.pending_bytes:
                    raise RpcError(Status.INTERNAL, f"{self.name}: the stream ended within a message")
                if self._conversation.in_flight() == 0:
                    self._close()
                    self.wire.complete(self)
        except RpcError as error:
            self.fail(error)
        finally:
            self._is_pumping = False
        if self._is_winding_down:
            self.wind_down()

    def send(self, parts: list[Buffer]) -> None:
        """Send a response message."""
        if not self.is_over:
            self.wire.send(self, self.framed(parts))

    def wind_down(self) -> None:
        """The server stops: end when nothing is in flight."""
        self._is_winding_down = True
        if self._conversation.in_flight() == 0:
            self.fail(RpcError(Status.UNAVAILABLE, f"{self.name}: the server is shutting down"))

    def drop(self) -> None:
        """Cancel everything in flight, and let other calls have the part of the window that this one has taken."""
        self._conversation.drop()
        self._consume(self._unconsumed_bytes)

    def _pump(self) -> bool:
        """Start requests; return whether some have to wait."""
        limits = self.wire.service.limits
        conversation = self._conversation
        while not self.is_over:
            if conversation.in_flight() >= limits.stream_inflight_max:
                break
            if self.wire.unsent_bytes(self) > limits.stream_unsent_bytes_max:
                self.wire.wait_until_sent(self)
                break
            message = self._reader.next_message()
            if message is None:
                # Whatever is left is a part of a message, and the rest of it may need the whole window.
                self._consume(self._unconsumed_bytes)
                return False
            conversation.start(message)
        self._consume(self._unconsumed_bytes - self._reader.pending_bytes)
        return not self.is_over

    def _consume(self, amount: int) -> None:
        if amount > 0:
            self._unconsumed_bytes -= amount
            self.wire.consume(self, amount)
