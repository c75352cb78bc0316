"""One request and the place where its response goes."""

from typing import Protocol

from charonia.core.errors import Code, ServingError
from charonia.engine.api import Ticket
from charonia.protocol.http_status import REASONS, STATUS
from charonia.protocol.v2_json import encode_error

JSON_TYPE = b"application/json"

_REASON_BYTES = {status: reason.encode() for status, reason in REASONS.items()}


class Outlet(Protocol):
    """Where a finished exchange is written: its connection."""

    def answered(self, exchange: "Exchange") -> None:
        """The exchange has its response."""
        ...


class Exchange:
    """A request as received, and its response once it is there.

    Attributes:
        method: Request method.
        url: Request target as sent.
        headers: Header fields by lower-case name; the last one of a name counts.
        body: Request body.
        keep_alive: Whether the connection lives on afterwards.
        response: Parts of the complete response, None until it is there.
        status: Status of the response, 0 until it is there.
        ticket: The inference in flight, where there is one.
        model: Model name, for the access log.
        version: Model version, for the access log.
        outcome: What the engine answered, for the access log.
        received_ns: When the request was complete; 0 where nobody asks.
    """

    __slots__ = (
        "_outlet",
        "body",
        "headers",
        "keep_alive",
        "method",
        "model",
        "outcome",
        "received_ns",
        "response",
        "status",
        "ticket",
        "url",
        "version",
    )

    def __init__(
        self, outlet: Outlet, method: bytes, url: bytes, headers: dict[bytes, bytes], keep_alive: bool
    ) -> None:
        self._outlet = outlet
        self.method = method
        self.url = url
        self.headers = headers
        self.body: bytes | memoryview = b""
        self.keep_alive = keep_alive
        self.response: list[bytes | memoryview] | None = None
        self.status = 0
        self.ticket: Ticket | None = None
        self.model = ""
        self.version = ""
        self.outcome: object = None
        self.received_ns = 0

    def header(self, name: bytes) -> str:
        """Return a header field by its lower-case name, "" where there is none."""
        return self.headers.get(name, b"").decode("latin-1")

    def respond(
        self,
        status: int,
        body: list[bytes | memoryview],
        content_type: bytes = JSON_TYPE,
        extra: bytes = b"",
    ) -> None:
        """Answer, once.

        Args:
            status: HTTP status.
            body: Parts of the body.
            content_type: Its content type; left out for an empty body.
            extra: Further header lines, each with its line end.
        """
        if self.response is not None:
            return
        length = sum([len(part) for part in body])
        head = b"HTTP/1.1 %d %b\r\n" % (status, _REASON_BYTES.get(status, b""))
        if length:
            head += b"Content-Type: %b\r\n" % content_type
        if not self.keep_alive:
            head += b"Connection: close\r\n"
        head += b"%bContent-Length: %d\r\n\r\n" % (extra, length)
        self.status = status
        self.response = [head, *body] if self.method != b"HEAD" else [head]
        self._outlet.answered(self)

    def fail(self, error: ServingError) -> None:
        """Answer with an error."""
        extra = b"Accept-Encoding: gzip, deflate\r\n" if error.code is Code.UNSUPPORTED else b""
        self.outcome = error
        self.respond(STATUS[error.code], [encode_error(error)], extra=extra)
