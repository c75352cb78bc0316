"""gRPC calls that another gRPC server has received: messages in, messages out, without a connection."""

import logging
from collections.abc import Callable, Iterable

from charonia.core.request import NO_FLOW
from charonia.server.access.rules import METHODS
from charonia.server.grpc.call_table import server_fault
from charonia.server.grpc.calls import GrpcCall, Service, Table, UnaryCall
from charonia.server.grpc.methods import Method
from charonia.server.grpc.streams import StreamCall
from charonia.wire.grpc_framing import PREFIX_BYTES, Buffer, prefix
from charonia.wire.grpc_headers import CallHead, Header, check_singular
from charonia.wire.grpc_status import REFUSED, RpcError

_log = logging.getLogger(__name__)

Send = Callable[[bytes], None]
"""Takes a response message."""

End = Callable[[RpcError | None], None]
"""Called once, at the end of the call: with its error, or None."""


class DetachedCall(Table):
    """One call, from its metadata to its status; the `Table` of that call. All on the server's event loop.

    Attributes:
        service: State that all calls of the front end share.
    """

    def __init__(
        self,
        service: Service,
        method: Method,
        metadata: Iterable[Header],
        *,
        send: Send,
        end: End,
        consumed: Callable[[int], None] | None = None,
    ) -> None:
        """Begin a call, or refuse it.

        Args:
            service: The front end.
            metadata: The caller's metadata, with names in lower case.
            send: Takes response messages.
            end: Called at the end.
            consumed: Called with a number of bytes of messages that no longer wait in the call; None for no callback.
        """
        self.service = service
        self.flow = NO_FLOW  # the other server knows the client
        self._send = send
        self._end = end
        self._consumed = consumed
        head = CallHead()
        head.headers = tuple(metadata)
        head.wants_grpc_errors = head.header(b"triton_grpc_error") == b"true"
        self._call: GrpcCall
        if method.run is None:
            assert method.make_handler is not None
            self._call = StreamCall(self, 0, method.name, head, method.make_handler)
        else:
            self._call = UnaryCall(self, 0, method.name, head, method.run)
        service.request_count += 1
        gate = service.gate
        try:
            if gate is not None:
                check_singular(head.headers, gate.singular)
                refusal = gate.check(METHODS[method.name], head.header)
                if refusal is not None:
                    raise RpcError(REFUSED[refusal.kind], refusal.message)
        except RpcError as error:
            self._call.fail(error)

    def receive(self, message: bytes, end: bool = True) -> None:
        """Take a request message; `end` means that it is the last."""
        self._receive(prefix(len(message)) + message, end)

    def end(self) -> None:
        self._receive(b"", True)

    def abandon(self) -> None:
        self._call.abandon()

    def _receive(self, data: bytes, end: bool) -> None:
        if self._call.is_over:
            return
        try:
            self._call.receive(data, end)
        except Exception:  # a bug: the caller would wait forever
            self.fault(self._call)

    # The call's calls.

    def respond(self, call: GrpcCall, body: list[Buffer]) -> None:
        """Send a whole response."""
        self.send(call, body)
        self._end(None)

    def reject(self, call: GrpcCall, error: RpcError) -> None:
        self._end(error)

    def send(self, call: GrpcCall, body: list[Buffer]) -> None:
        """Send a response message."""
        first, *rest = body
        self._send(b"".join((memoryview(first)[PREFIX_BYTES:], *rest)))

    def complete(self, call: GrpcCall) -> None:
        self._end(None)

    def fault(self, call: GrpcCall) -> None:
        _log.exception("%s: the call failed for a fault of the server", call.name)
        call.fail(server_fault(call.name))

    def consume(self, call: GrpcCall, amount: int) -> None:
        if self._consumed is not None:
            self._consumed(amount)

    def unsent_bytes(self, call: GrpcCall) -> int:
        """Return 0: the other server takes everything."""
        return 0

    def wait_until_sent(self, call: GrpcCall) -> None:
        """Never called: nothing waits."""
