"""Room for answers: calls with one request wait while their client does not take the answers of earlier ones.

They wait rather than fail, as requests over HTTP do: a client on a slow link that asks for more than the link carries
gets everything, later, and its deadlines hold meanwhile. The connection is read on, because the news that the client
has taken something come on it; what waiting calls have sent is not acknowledged, so that it stays within the windows.
"""

from charonia.server.grpc.calls import Call, Run, UnaryCall, Wire, internal_error
from charonia.server.grpc.http2 import ServerConnection
from charonia.wire.grpc_headers import CallHead


class HeldCall(UnaryCall):
    """A call that begins when there is room for its answer."""

    __slots__ = ("_held",)

    def __init__(self, wire: Wire, stream_id: int, name: str, head: CallHead, run: Run) -> None:
        super().__init__(wire, stream_id, name, head, run)
        self._held: list[tuple[bytes, bool]] | None = []

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the request: keep them while there is no room."""
        if self._held is None:
            super().receive(data, end)
        else:
            self._held.append((data, end))

    def resume(self) -> None:
        """Begin."""
        held, self._held = self._held or [], None
        try:
            for data, end in held:
                if self.is_over:
                    self.wire.consume(self, len(data))
                else:
                    super().receive(data, end)
        except Exception:  # those behind it want to begin, too
            self.fail(internal_error(self.name))

    def wind_down(self) -> None:
        """The server stops: begin, to be told so."""
        self.resume()

    def drop(self) -> None:
        """Acknowledge what was kept for nothing, and cancel the inference."""
        held, self._held = self._held or [], None
        self.wire.consume(self, sum(len(data) for data, _ in held))
        super().drop()


class Room:
    """How much of its answers a connection's client has not taken.

    Attributes:
        held: The calls that wait for room, by stream, oldest first.
        unsent_bytes_max: Bytes of answers to calls with one request that may wait for the client's windows.
    """

    __slots__ = ("_calls", "_endings", "_http2", "held", "unsent_bytes_max")

    def __init__(self, http2: ServerConnection, calls: dict[int, Call], unsent_bytes_max: int) -> None:
        self.held: dict[int, HeldCall] = {}
        self.unsent_bytes_max = unsent_bytes_max
        self._http2 = http2
        self._calls = calls
        self._endings: set[int] = set()

    def is_full(self) -> bool:
        """Whether more calls have to wait. To be asked when more waits on all streams than `unsent_bytes_max`.

        Responses of calls with streams do not count: they have limits of their own, and a caller may well make another
        call before it reads on.
        """
        unsent_bytes = self._http2.unsent_bytes
        streams = sum(unsent_bytes(call.stream_id) for call in self._calls.values() if call.is_begun)
        streams += sum(map(unsent_bytes, self._endings))
        return self._http2.waiting_bytes() - streams > self.unsent_bytes_max

    def hold(self, call: HeldCall) -> HeldCall:
        """Let a call wait."""
        self.held[call.stream_id] = call
        return call

    def release(self) -> None:
        """Begin the calls that there is room for now."""
        while self.held and not (self._http2.waiting_bytes() > self.unsent_bytes_max and self.is_full()):
            self.held.pop(next(iter(self.held))).resume()

    def ended(self, stream_id: int) -> None:
        """A call with streams has ended; its last responses may still wait for the client."""
        unsent_bytes = self._http2.unsent_bytes
        self._endings = {ending for ending in self._endings if unsent_bytes(ending)}
        self._endings.add(stream_id)
