"""Clients: an HTTP/1.1 and an HTTP/2 connection, whose calls end with exactly one outcome."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import httptools
import ngh2
from tests.simulation.network import End, Network
from tests.support.grpc_memory import frame, request_headers

from charonia.schema.pool import message_class

INFER_REQUEST: Any = message_class("inference.ModelInferRequest")
INFER_RESPONSE: Any = message_class("inference.ModelInferResponse")
STREAM_RESPONSE: Any = message_class("inference.ModelStreamInferResponse")


class Outcome(NamedTuple):
    """How a call ended.

    Attributes:
        status: "ok", "error", "broken" for a cut connection, "refused" for no connection, "left" where the client left.
        code: Status of the protocol.
        body: Body, or message.
    """

    status: str
    code: int = 0
    body: Any = b""


BROKEN = Outcome("broken")


class _Client(asyncio.Protocol):
    end: End | None
    is_open: bool

    def leave(self) -> None:
        """Close in the middle of the calls."""
        self.is_open = False
        if self.end is not None:
            self.end.abort()

    def eof_received(self) -> None:
        self.connection_lost(None)


class HttpClient(_Client):
    """A connection whose calls are answered in their order.

    Attributes:
        problems: Responses that nobody has asked for.
    """

    def __init__(self, network: Network, port: int, problems: list[str]) -> None:
        self.problems = problems
        self.is_closing = False
        self._futures: deque[asyncio.Future[Outcome]] = deque()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self.end = network.connect(port, self)
        self.is_open = self.end is not None

    async def call(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Outcome:
        if self.end is None or not self.is_open:
            return Outcome("refused")
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        self.end.write(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode()
            + body
        )
        return await future

    def leave(self) -> None:
        self._settle(Outcome("left"))
        super().leave()

    def _settle(self, outcome: Outcome, count: int | None = None) -> None:
        """Give the next calls an outcome, all that are left unless a count is given."""
        for _ in range(len(self._futures) if count is None else min(count, len(self._futures))):
            future = self._futures.popleft()
            if not future.done():
                future.set_result(outcome)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._settle(BROKEN)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problems.append(f"a response is not HTTP: {error} {data[:80]!r}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"connection" and value.lower() == b"close":
            self.is_closing = True

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        code = self._parser.get_status_code()
        if not self._futures and self.is_open and code not in (408, 503):
            self.problems.append(f"a response without a request: {code} {body[:80]!r}")
        self._settle(Outcome("ok" if code == 200 else "error", code, body), 1)
        if self.is_closing:
            self.is_open = False
            self._settle(Outcome("left"))  # what is behind the last response is not looked at


class _Call:
    def __init__(self) -> None:
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.data = bytearray()
        self.status: int | None = None
        self.message = ""
        self.futures: deque[asyncio.Future[Outcome]] = deque()  # of the requests of an open stream

    def take_messages(self) -> list[bytes]:
        """Return the messages that are complete."""
        messages = []
        while len(self.data) >= 5 and len(self.data) >= (end := 5 + int.from_bytes(self.data[1:5], "big")):
            messages.append(bytes(self.data[5:end]))
            del self.data[:end]
        return messages


class GrpcClient(_Client):
    """A connection with any number of calls."""

    def __init__(self, network: Network, port: int) -> None:
        self._http2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=True))
        self._calls: dict[int, _Call] = {}
        self._open = -1  # the stream that stays open for further requests
        self.end = network.connect(port, self)
        self.is_open = self.end is not None
        if self.is_open:
            self._http2.initiate_connection(None)
            self._flush()

    async def call(self, method: str, messages: list[bytes], *headers: tuple[bytes, bytes]) -> Outcome:
        """Return the outcome, whose body is the list of messages received."""
        if self.end is None or not self.is_open or not self._http2.can_send_request:
            return Outcome("refused")
        stream = self._http2.send_request(request_headers(method, *headers))
        call = self._calls[stream] = _Call()
        self._http2.send_data(stream, b"".join(map(frame, messages)), end_stream=True)
        self._flush()
        try:
            return await call.future
        except asyncio.CancelledError:
            if self._calls.pop(stream, None) is not None:
                self._http2.reset_stream(stream, 8)
                self._flush()
            raise

    async def ask(self, message: bytes) -> Outcome:
        """Send a request on a stream that stays open; its answers come in the order of the requests, one for each."""
        if self._open not in self._calls:
            if self.end is None or not self.is_open or not self._http2.can_send_request:
                return Outcome("refused")
            self._open = self._http2.send_request(request_headers("ModelStreamInfer"))
            self._calls[self._open] = _Call()
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._calls[self._open].futures.append(future)
        self._http2.send_data(self._open, frame(message))
        self._flush()
        return await future

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        for stream in list(self._calls):
            self._settle(stream, BROKEN)

    def data_received(self, data: bytes) -> None:
        with suppress(ngh2.ConnectionStateError):  # nothing can follow the last GOAWAY
            self._http2.receive_data(data)
        for event in self._http2.events():
            match event:
                case ngh2.ResponseReceived() | ngh2.TrailersReceived():
                    call = self._calls.get(event.stream_id)
                    for name, value in event.headers if call is not None else ():
                        if name == b"grpc-status":
                            call.status = int(value)  # type: ignore[union-attr]
                        elif name == b"grpc-message":
                            call.message = value.decode()  # type: ignore[union-attr]
                case ngh2.DataReceived():
                    if event.stream_id in self._calls:
                        call = self._calls[event.stream_id]
                        call.data += event.data
                        for each in call.take_messages() if call.futures else ():
                            answered = call.futures.popleft()
                            if not answered.done():
                                answered.set_result(Outcome("ok", 0, [each]))
                case ngh2.StreamReset() | ngh2.StreamClosed():
                    self._end(event.stream_id)
                case ngh2.GoAwayReceived():
                    self.is_open = False
        self._flush()

    def _end(self, stream: int) -> None:
        call = self._calls.get(stream)
        if call is None:
            return
        if call.status is None:
            self._settle(stream, BROKEN)
        elif call.status:
            self._settle(stream, Outcome("error", call.status, call.message.encode()))
        else:
            self._settle(stream, Outcome("ok", 0, call.take_messages()))

    def _settle(self, stream: int, outcome: Outcome) -> None:
        call = self._calls.pop(stream, None)
        for future in (call.future, *call.futures) if call is not None else ():
            if not future.done():
                future.set_result(outcome)

    def _flush(self) -> None:
        data = self._http2.data_to_send()
        if data and self.end is not None and not self.end.is_gone:
            self.end.write(data)
