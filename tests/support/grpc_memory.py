"""A gRPC client that talks to a front end's connection in memory: no socket, every byte in the test's hands."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import ngh2

SERVICE = "/inference.GRPCInferenceService/"

Headers = Sequence[tuple[bytes, bytes]]


def request_headers(method: str, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a call; `method` is a full path, or the name of a method of the inference service."""
    path = method if method.startswith("/") else SERVICE + method
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]


def frame(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


class MemoryTransport(asyncio.Transport):
    """What a connection writes to.

    Attributes:
        is_closed: Whether the connection was closed from the server's side.
        is_stuck: Whether the client does not read, so that closing has to wait for it.
        may_end: Whether the sending side can be ended alone, which it cannot with TLS.
        peername: Address and port of the client, None for none.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self.peername: tuple[str, int] | None = None
        self.written = bytearray()
        self.is_closed = False
        self.is_reading_on = True
        self.is_stuck = False
        self.may_end = False
        self.is_ended = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return the client's address where it is asked for."""
        return self.peername if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes."""
        if self.is_ended:
            raise RuntimeError("written behind the end")
        self.written += data

    def take(self) -> bytes:
        """Return what was written since the last time."""
        data, self.written = bytes(self.written), bytearray()
        return data

    def close(self) -> None:
        if not self.is_stuck:
            self.abort()

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None:
        self.is_reading_on = False

    def resume_reading(self) -> None:
        self.is_reading_on = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        """Whether the sending side can be ended alone."""
        return self.may_end

    def write_eof(self) -> None:
        self.is_ended = True

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not taken."""
        return len(self.written)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore: the test decides when writing pauses."""


@dataclass
class MemoryResponse:
    """What came back on one stream.

    Attributes:
        headers: Response headers, those of a trailers-only response included.
        reset_code: Code of a reset by the server, None without one.
    """

    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    reset_code: int | None = None
    is_closed: bool = False

    @property
    def status(self) -> int | None:
        """The gRPC status, None while there is none."""
        value = self.trailers.get(b"grpc-status", self.headers.get(b"grpc-status"))
        return int(value) if value is not None else None

    @property
    def message(self) -> str:
        """The gRPC status message as it was sent."""
        return self.trailers.get(b"grpc-message", self.headers.get(b"grpc-message", b"")).decode()

    @property
    def messages(self) -> list[bytes]:
        """The messages of the body, as they were sent."""
        found = []
        position = 0
        while position < len(self.data):
            end = position + 5 + int.from_bytes(self.data[position + 1 : position + 5], "big")
            found.append(self.data[position + 5 : end])
            position = end
        return found


class MemoryClient:
    """The client's end of a connection.

    Attributes:
        http2: The client's HTTP/2 state: send on it, then `exchange`.
        responses: What came back, by stream.
        goaways: Code and debug data of each GOAWAY.
    """

    def __init__(
        self,
        protocol: asyncio.Protocol,
        settings: dict[int, int] | None = None,
        *,
        opens_window: bool = True,
        rounds: int = 4,
        peername: tuple[str, int] | None = None,
    ) -> None:
        """Connect; to be called on the event loop.

        Args:
            protocol: The server's end, new.
            settings: HTTP/2 settings of the client.
            opens_window: Whether what was received makes room for more.
            rounds: Rounds of the event loop in which an answer comes.
        """
        self.protocol = protocol
        self.transport = MemoryTransport(protocol)
        self.transport.peername = peername
        self.http2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=opens_window))
        self.responses: dict[int, MemoryResponse] = {}
        self.goaways: list[tuple[int, bytes]] = []
        self.pings = 0
        self._rounds = rounds
        protocol.connection_made(self.transport)
        self.http2.initiate_connection(settings)
        self.exchange()

    def start(self, method: str, message: bytes | None = None, *more: tuple[bytes, bytes], end: bool = True) -> int:
        """Begin a call and return its stream; `message` goes with it, and by default nothing after it."""
        stream_id = self.http2.send_request(request_headers(method, *more))
        self.responses[stream_id] = MemoryResponse()
        if message is not None:
            self.http2.send_data(stream_id, frame(message), end_stream=end)
        self.exchange()
        return stream_id

    async def call(self, method: str, message: bytes = b"", *more: tuple[bytes, bytes]) -> MemoryResponse:
        stream_id = self.start(method, message, *more)
        await self.settle()
        return self.responses[stream_id]

    async def settle(self, rounds: int = 0) -> None:
        """Let the loop run what is ready, and take what came of it."""
        for _ in range(rounds or self._rounds):
            await asyncio.sleep(0)
            self.exchange()

    def feed(self, data: bytes) -> None:
        """Hand the server bytes, as long as it is there."""
        if data and not self.transport.is_closed:
            self.protocol.data_received(data)

    def exchange(self) -> None:
        """Hand over what either side has to send, until neither has."""
        while True:
            data = self.http2.data_to_send()
            self.feed(data)
            answer = self.transport.take()
            if answer:
                self._receive(answer)
            elif not data:
                return

    def _receive(self, data: bytes) -> None:
        try:
            self.http2.receive_data(data)
        except ngh2.ConnectionStateError:
            return  # after the last GOAWAY nothing can follow
        for event in self.http2.events():
            self._note(event)

    def _note(self, event: ngh2.Event) -> None:
        match event:
            case ngh2.ResponseReceived():
                self.responses[event.stream_id].headers = dict(event.headers)
            case ngh2.DataReceived():
                self.responses[event.stream_id].data += event.data
            case ngh2.TrailersReceived():
                self.responses[event.stream_id].trailers = dict(event.headers)
            case ngh2.StreamReset():
                self.responses[event.stream_id].reset_code = event.error_code
            case ngh2.StreamClosed():
                self.responses[event.stream_id].is_closed = True
            case ngh2.GoAwayReceived():
                self.goaways.append((event.error_code, event.debug_data))
            case ngh2.PingReceived():
                self.pings += 1
