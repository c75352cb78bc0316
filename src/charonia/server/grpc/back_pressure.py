"""Back-pressure on unary calls: they are deferred while their client does not read the responses of earlier ones.

They wait rather than fail, as requests over HTTP do: a client that requests more than its link can carry gets every
response, only later, and its deadlines still apply. The connection is still read, because window updates arrive on it;
the data of deferred calls is not acknowledged, so that it stays within the flow-control windows.
"""

from charonia.server.grpc.calls import GrpcCall, Run, Table, UnaryCall
from charonia.server.grpc.http2 import ServerConnection
from charonia.wire.grpc_headers import CallHead


class DeferredCall(UnaryCall):
    """A call that begins when its client reads responses again."""

    __slots__ = ("_received",)

    def __init__(self, table: Table, stream_id: int, name: str, head: CallHead, run: Run) -> None:
        super().__init__(table, stream_id, name, head, run)
        self._received: list[tuple[bytes, bool]] | None = []

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the request, and keep them while the call is deferred."""
        if self._received is None:
            super().receive(data, end)
        else:
            self._received.append((data, end))

    def resume(self) -> None:
        """Begin, with the data that was kept."""
        received, self._received = self._received or [], None
        try:
            for data, end in received:
                if self.is_over:
                    self.table.consume(self, len(data))
                else:
                    super().receive(data, end)
        except Exception:  # the calls deferred behind it begin, too
            self.table.fault(self)

    def unfinished_bytes(self) -> int | None:
        # A client whose call is deferred may have to wait itself.
        return super().unfinished_bytes() if self._received is None else None

    def wind_down(self) -> None:
        """The server is shutting down: begin, which answers with that error."""
        self.resume()

    def drop(self) -> None:
        """Acknowledge the data that was kept, and cancel the inference."""
        received, self._received = self._received or [], None
        self.table.consume(self, sum(len(data) for data, _ in received))
        super().drop()


class BackPressure:
    """Defers calls while more bytes wait for a client's flow-control windows than the limit.

    Attributes:
        deferred: The deferred calls by stream, oldest first.
        unsent_bytes_max: Bytes of responses to unary calls that may wait for the client's windows.
    """

    __slots__ = ("_calls", "_endings", "_http2", "deferred", "unsent_bytes_max")

    def __init__(self, http2: ServerConnection, calls: dict[int, GrpcCall], unsent_bytes_max: int) -> None:
        self.deferred: dict[int, DeferredCall] = {}
        self.unsent_bytes_max = unsent_bytes_max
        self._http2 = http2
        self._calls = calls
        self._endings: set[int] = set()

    def applies(self) -> bool:
        """Return whether a new unary call must be deferred, behind those that already are.

        Call this only when more than `unsent_bytes_max` waits on all streams together.
        """
        return bool(self.deferred) or self._is_above_limit()

    def defer(self, call: DeferredCall) -> DeferredCall:
        """Defer a call."""
        self.deferred[call.stream_id] = call
        return call

    def release(self) -> None:
        """Begin deferred calls as far as the limit permits."""
        while self.deferred and not (self._http2.waiting_bytes() > self.unsent_bytes_max and self._is_above_limit()):
            self.deferred.pop(next(iter(self.deferred))).resume()

    def stream_ended(self, stream_id: int) -> None:
        """Note that a streaming call has ended; its last responses may still wait for the client."""
        unsent_bytes = self._http2.unsent_bytes
        self._endings = {ending for ending in self._endings if unsent_bytes(ending)}
        self._endings.add(stream_id)

    def _is_above_limit(self) -> bool:
        """Return whether unary calls exceed the limit; call this only when all calls together do.

        Responses of streaming calls do not count: they have limits of their own, and a caller may make another call
        before it continues to read.
        """
        unsent_bytes = self._http2.unsent_bytes
        streams = sum(unsent_bytes(call.stream_id) for call in self._calls.values() if call.is_begun)
        streams += sum(map(unsent_bytes, self._endings))
        return self._http2.waiting_bytes() - streams > self.unsent_bytes_max
