"""A request with its response, and the tasks of requests that are answered later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Set
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote

from charonia.config.model import ModelConfig
from charonia.config.parameters import HTTP_REQUEST, RECEIVED
from charonia.core.errors import ServingError, internal
from charonia.core.request import Flow, InferRequest
from charonia.core.response import Outcome, Reply, Ticket
from charonia.core.statistics import TokenUsage
from charonia.server.facade import Engine, Services, SingleResponse
from charonia.server.http.parser import Request
from charonia.server.tracing.requests import EventNames, begin
from charonia.wire.compression import ACCEPTED, decompress
from charonia.wire.http_status import REASONS, UNEXECUTED, status_of
from charonia.wire.json_text import dump, encode_error
from charonia.wire.openai_answer import PATHS, encode_openai_error, openai_status

_log = logging.getLogger(__name__)

JSON_TYPE: Final = b"application/json"
CONTENT_ENCODING: Final = b"content-encoding"

JOIN_BELOW_BYTES: Final = 16 * 1024
"""Responses with a body smaller than this are written in one piece."""

CLIENT_GONE: Final = 499
"""Status in the access log of a request whose client left before the response. Never sent."""

BEGIN_STREAM_S: Final = 1.0
"""Time after which a streamed response begins without its first event; an error before has its HTTP status."""

_COMMENT: Final = b": keep-alive\n\n"

RETRY_AFTER_S: Final = 1
"""Time after which a client may retry a request refused for lack of capacity or time."""

_FURTHER_LINES: Final = {
    401: b"WWW-Authenticate: Bearer\r\n",
    501: b"Accept-Encoding: %b\r\n" % ACCEPTED.encode(),
    503: b"Retry-After: %d\r\n" % RETRY_AFTER_S,
}
_UNEXECUTED: Final = b"%b: %b\r\n" % UNEXECUTED


def retry_after(error: ServingError) -> bytes:
    """Return the header line with the time after which a limit permits more, b"" for other errors."""
    return b"Retry-After: %d\r\n" % error.retry_after_s if error.retry_after_s else b""


def _unnamed(status: int) -> bytes:
    """Return the status line of a status that only functions choose."""
    return b"HTTP/1.1 %d \r\n" % status


_STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %b\r\n%b" % (status, reason.encode(), _FURTHER_LINES.get(status, b""))
    for status, reason in REASONS.items()
}
"""First lines of a response: its status, and the header fields that belong to it."""


class ResponseTransport(Protocol):
    """The connection of an exchange, which writes its response.

    Attributes:
        flow: The flow of its client's address.
    """

    flow: Flow

    def answered(self, exchange: "Exchange") -> None:
        """The exchange has its response."""

    def progressed(self, exchange: "Exchange") -> None:
        """The exchange has another part of its response."""

    def unsent_bytes(self) -> int:
        """Return the size of the connection's write buffer."""


class Reshaped(NamedTuple):
    """A response before its header is written; the fields are the arguments of `Exchange.respond`."""

    status: int
    body: list[bytes | memoryview]
    content_type: bytes
    extra: bytes


class Stream(Protocol):
    """The sender of a streamed response."""

    def stop(self, error: ServingError, status: int = 0) -> None:
        """End the response with an error, and cancel its inference; `status` as in `Exchange.fail`."""


class Exchange:
    """A request as received, and its response once it is ready.

    Attributes:
        connection: The `Connection` header line of the response, b"" for none.
        headers: Additional header lines of every response to it, each with its line end.
        keep_alive: Whether the connection stays open afterwards.
        load_line: Returns the header line with the server's load; None if the request needs none.
        receive: Gets what arrives after the request, None for nothing: of a request that changes the protocol.
        progress_file: Where a function reports its progress, "" for nowhere.
        reshape: Changes the response before it is sent; None for no change.
        response: Parts of the complete response, None until it is ready; of a streamed response, the rest.
        is_open: Whether the client still waits for the response, or the rest of it.
        has_begun: Whether the response is streamed and its header is written.
        status: Status of the response, 0 until it is ready.
        bytes_out: Size of the response's body.
        ticket: The inference in flight, if any.
        is_over: Whether the inference has had its last outcome: there is nothing left to cancel.
        single: Collects the only response of a model that may send any number.
        model: Model name, for the access log.
        version: Model version, for the access log.
        request_id: The caller's id, for the access log.
        stream: The sender of a streamed response while it is open, None for any other.
        outcome: The engine's answer, for the access log.
        usage: Tokens that a language model was given and has made, for the access log; None where it is not known.
        begun_ns: When the request's first byte was read; 0 without tracing.
        received_ns: When the request was complete; 0 without an access log.
        first_ns: When the first event of a stream was there, for the access log; 0 for none.
        is_kserve: Whether errors have the form of KServe's protocols although the path begins like OpenAI's API.
    """

    __slots__ = (
        "_timer",
        "_transport",
        "_unwritten",
        "_unwritten_bytes",
        "begun_ns",
        "bytes_out",
        "connection",
        "first_ns",
        "has_begun",
        "headers",
        "is_kserve",
        "is_open",
        "is_over",
        "keep_alive",
        "load_line",
        "model",
        "outcome",
        "progress_file",
        "receive",
        "received_ns",
        "request",
        "request_id",
        "reshape",
        "response",
        "single",
        "status",
        "stream",
        "ticket",
        "usage",
        "version",
    )

    def __init__(self, transport: ResponseTransport, request: Request) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self.request = request
        self.connection = b""
        self.headers = b""
        self.keep_alive = True
        self.load_line: Callable[[], bytes] | None = None
        self.receive: Callable[[bytes], None] | None = None
        self.reshape: Callable[[Reshaped], Reshaped] | None = None
        self.progress_file = ""
        self.has_begun = False
        self.is_kserve = False
        self.is_open = True
        self.is_over = False
        self.response: list[bytes | memoryview] | None = None
        self.status = 0
        self.bytes_out = 0
        self.ticket: Ticket | None = None
        self.single: SingleResponse | None = None
        self.stream: Stream | None = None
        self.model = ""
        self.version = ""
        self.request_id = ""
        self.outcome: Outcome = None
        self.usage: TokenUsage | None = None
        self.begun_ns = 0
        self.first_ns = 0
        self.received_ns = 0
        if not request.keep_alive:
            self.end_connection()
        elif not request.knows_chunks:
            self.connection = b"Connection: keep-alive\r\n"

    def end_connection(self) -> None:
        """Close the connection after this exchange, and announce that in its response if its header is not written."""
        self.keep_alive = False
        self.connection = b"Connection: close\r\n"

    def respond(
        self,
        status: int,
        body: list[bytes | memoryview],
        content_type: bytes = JSON_TYPE,
        extra: bytes = b"",
    ) -> None:
        """Send the response. Only the first call counts.

        Args:
            status: HTTP status.
            body: Parts of the body.
            content_type: Its content type; left out for an empty body.
            extra: More header lines, each with its line end.
        """
        if not self.is_open or self.has_begun:
            return
        if self.reshape is not None:
            status, body, content_type, extra = self.reshape(Reshaped(status, body, content_type, extra))
        if self.load_line is not None:
            extra += self.load_line()
        if self.request.method == b"HEAD" and status != 200:
            body = []
        length = 0
        for part in body:
            length += len(part)
        if length:
            extra += b"Content-Type: %b\r\n" % content_type
        line = _STATUS_LINES.get(status) or _unnamed(status)
        if status in _FURTHER_LINES and _FURTHER_LINES[status].partition(b":")[0].lower() in extra.lower():
            line = line.removesuffix(_FURTHER_LINES[status])  # a function has set the field itself
        lines = (line, self.headers, extra, self.connection, length)
        head = b"%b%b%b%bContent-Length: %d\r\n\r\n" % lines
        if self.request.method == b"HEAD":
            body, length = [], 0  # the client would read it as the next response
        self.status = status
        self.bytes_out = length
        if length < JOIN_BELOW_BYTES:
            self.response = [b"".join((head, *body))]
        else:
            self.response = [head, *body]
        self.is_open = False
        self.ticket = None
        self._stop_timer()
        self._transport.answered(self)

    def begin(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        """Begin a streamed response: call `send` for each piece, then `end`. Arguments as in `respond`."""
        if self.load_line is not None:
            extra += self.load_line()
        framing = b"Transfer-Encoding: chunked\r\n"
        if not self.request.knows_chunks:
            framing = b""
            self.end_connection()  # which marks the end of the body
        extra = self.headers + extra
        head = b"%b%bContent-Type: %b\r\n%b%b\r\n"
        self._begin(status, head % (_STATUS_LINES[status], extra, content_type, self.connection, framing))

    def _begin(self, status: int, head: bytes) -> None:
        self.status = status
        self.has_begun = True
        self._unwritten = [head]
        self._unwritten_bytes = len(head)
        self._transport.progressed(self)

    def keep_streaming(self, begin: Callable[[], None], interval_s: float) -> None:
        """Begin a stream of events after `BEGIN_STREAM_S` if it has not, then send comments while it has no events.

        Args:
            begin: Calls `begin`.
            interval_s: Longest time without an event or a comment; 0 for never.
        """
        if not interval_s or not self.is_open:
            return

        def tick(bytes_out: int) -> None:
            if not self.has_begun:
                begin()
            if bytes_out == self.bytes_out:
                self.send(_COMMENT)
            self._timer = loop.call_later(interval_s / 2, tick, self.bytes_out)

        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(BEGIN_STREAM_S, interval_s), tick, 0)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forward(self, status: int, fields: bytes, *, is_chunked: bool = False) -> None:
        """Begin the response of another server, as `begin`.

        Args:
            status: Its status.
            fields: Its header lines, with a length unless `is_chunked`; of a protocol upgrade, all that it has sent.
            is_chunked: Whether the length of its body is not known.
        """
        framing = b""
        if self.request.is_upgrade:
            self.request.knows_chunks = False
            self._begin(status, fields)
            return
        if not is_chunked:
            self.request.knows_chunks = False  # the pieces are sent as they are
        elif self.request.knows_chunks:
            framing = b"Transfer-Encoding: chunked\r\n"
        else:
            self.end_connection()
        line = _STATUS_LINES.get(status) or _unnamed(status)
        self._begin(status, b"%b%b%b%b%b\r\n" % (line, self.headers, fields, self.connection, framing))

    def send(self, data: bytes) -> None:
        """Send a piece, which must not be empty."""
        if self.has_begun and self.is_open:
            piece = b"%x\r\n%b\r\n" % (len(data), data) if self.request.knows_chunks else data
            self.bytes_out += len(data)
            self._unwritten.append(piece)
            self._unwritten_bytes += len(piece)
            self._transport.progressed(self)

    def end(self) -> None:
        """End a streamed response."""
        if self.has_begun and self.is_open:
            self.response = [*self._unwritten, b"0\r\n\r\n" if self.request.knows_chunks else b""]
            self.is_open = False
            self.ticket = None
            self.stream = None
            self._stop_timer()
            self._transport.answered(self)

    def take_unwritten(self) -> list[bytes]:
        """Return the unwritten part of a streamed response, and count it as written."""
        parts, self._unwritten = self._unwritten, []
        self._unwritten_bytes = 0
        return parts

    @property
    def unsent_bytes(self) -> int:
        """Size of the part of a streamed response that waits for the client, or for exchanges ahead."""
        return self._unwritten_bytes + self._transport.unsent_bytes()

    def fail(self, error: ServingError, status: int = 0) -> None:
        """Respond with an error, in the form of the API that was called; `status` 0 means the status of its code."""
        # The frames that it passed refer to this exchange and to the body: they would live until garbage is collected.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.outcome = error
        status = status or (openai_status(error) if self._is_openai else status_of(error))
        extra = _UNEXECUTED if error.is_unexecuted else b""
        self.respond(status, [self.error_body(error, status)], extra=extra + retry_after(error))

    def error_body(self, error: ServingError, status: int) -> bytes:
        return encode_openai_error(error, status) if self._is_openai else encode_error(error)

    @property
    def peer(self) -> Flow:
        return self._transport.flow

    @property
    def _is_openai(self) -> bool:
        return self.request.url.startswith(PATHS) and not self.is_kserve

    def abandon(self) -> None:
        """The client has gone: cancel the inference and drop its outcome."""
        if self.is_open:
            self.response = []
            self.is_open = False
            self.status = CLIENT_GONE
            self.stream = None
            self._stop_timer()
            if self.ticket is not None:
                self.ticket.cancel()
                self.ticket = None


Target = TypeVar("Target")


class Tasks:
    """Asynchronous work of handlers: tasks that answer exchanges, and decompression of bodies."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._running: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, work: Coroutine[object, object, None]) -> None:
        """Run the coroutine that answers an exchange as a task; an exception fails only the exchange."""
        task = asyncio.get_running_loop().create_task(_guarded(exchange, work))
        self._running.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._running.discard)

    def document(self, work: Callable[[Exchange, Target], Awaitable[object]]) -> Callable[[Exchange, Target], None]:
        """Return a handler that answers with the JSON document that `work` returns, with an empty body for None."""

        async def answer(exchange: Exchange, target: Target) -> None:
            found = await work(exchange, target)
            exchange.respond(200, [] if found is None else [dump(found)])

        return lambda exchange, target: self.start(exchange, answer(exchange, target))

    async def body(self, request: Request) -> bytes | memoryview:
        """Return the body of a request, decompressed.

        Raises:
            ServingError: It is too large, or its encoding is unknown.
        """
        coding = request.headers.get(CONTENT_ENCODING)
        if coding is None:
            return request.body
        return await asyncio.to_thread(decompress, request.body, coding.decode("latin-1"), self._body_bytes_max)


async def _guarded(exchange: Exchange, work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except ServingError as error:
        exchange.fail(error)
    except Exception as fault:  # a bug: it must not end the server
        _log.exception("%s failed", exchange.request.url.decode("latin-1"))
        exchange.fail(internal(f"the request failed: {type(fault).__name__}"))


TRACED: Final = EventNames("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")


def _described(exchange: Exchange, hidden: Set[bytes]) -> str:
    """Return the HTTP request as JSON, without the fields that authorize it."""
    request = exchange.request
    path, _, query = request.url.decode("latin-1").partition("?")
    found = {
        "method": request.method.decode(),
        "path": unquote(path),
        "query": dict(parse_qsl(query, keep_blank_values=True)),
        "headers": {k.decode("latin-1"): v.decode("latin-1") for k, v in request.headers.items() if k not in hidden},
        "client": exchange.peer.name,
        "progress_file": exchange.progress_file,
    }
    return dump(found).decode()


class Submitter:
    """Passes the inference requests of exchanges to the engine."""

    def __init__(self, engine: Engine, services: Services) -> None:
        self._engine = engine
        self._tracer, self._request_log = services.tracer, services.request_log
        self._forward = services.http_headers
        self._services = services
        self._traffic = services.traffic
        self._names_flows = services.has_named_flows

    def submit(
        self, exchange: Exchange, request: InferRequest, reply: Reply, config: ModelConfig | None = None
    ) -> None:
        """Pass on the only request of an exchange. `reply` keeps `exchange.is_over` up to date.

        Args:
            config: Configuration of the model, which may need the HTTP request; None where it gets tensors only.
        """
        if config is not None and HTTP_REQUEST in config.parameters:
            gate = self._services.http_gate
            request.parameters[RECEIVED] = _described(exchange, gate.singular if gate is not None else frozenset())
        ticket = self.infer(exchange, request, reply)
        if exchange.is_open:
            exchange.ticket = ticket
        elif not exchange.is_over:
            ticket.cancel()

    def flow(self, exchange: Exchange) -> Flow:
        """Return the flow of the requests of an exchange."""
        if not self._names_flows:
            return exchange.peer
        return self._services.flow(exchange.peer, self._services.http_gate, exchange.request.headers.get)

    def infer(self, exchange: Exchange, request: InferRequest, reply: Reply) -> Ticket:
        """Pass on one of the requests of an exchange."""
        if self._forward is not None:
            names = exchange.request.names or {}
            fields = exchange.request.headers.items()
            request.parameters.update(self._forward.parameters((names.get(key, key), value) for key, value in fields))
        if self._traffic is not None and self._traffic.sticky:
            request.affinity = self._services.affinity(request.model_name, exchange.request.headers.get)
        request.flow = self.flow(exchange)
        exchange.request_id = request.id
        if self._request_log is not None:
            header = exchange.request.headers.get
            reply = self._request_log.begin("http", request, reply, header, self._forward)
        if self._tracer is not None:
            headers = exchange.request.headers.get
            reply = begin(self._tracer, request, reply, names=TRACED, received_ns=exchange.begun_ns, headers=headers)
        return self._engine.infer(request, reply)
