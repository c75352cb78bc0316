"""Headers of a gRPC call: parses request headers, and builds the headers of each kind of response.

Source: "gRPC over HTTP/2".
"""

from collections.abc import Set
from typing import Final

from charonia.wire.grpc_framing import ENCODINGS
from charonia.wire.grpc_status import RpcError, Status, percent_encoded
from charonia.wire.http_status import UNEXECUTED
from charonia.wire.orca import FORMAT_HEADER

Header = tuple[bytes, bytes]
Headers = tuple[Header, ...]

HEADER_OVERHEAD_BYTES: Final = 32
"""What HTTP/2 adds for each header when it computes the size of a list."""

ACCEPT_ENCODING: Final[Header] = (b"grpc-accept-encoding", b",".join(ENCODINGS))
OK_TRAILERS: Final[Headers] = ((b"grpc-status", b"0"),)

NONE_SINGULAR: Final[Set[bytes]] = frozenset()

_STATUS_200: Final[Header] = (b":status", b"200")
_CONTENT_TYPE: Final[Header] = (b"content-type", b"application/grpc")

RESPONSE_HEAD: Final[dict[bytes, Headers]] = {
    b"identity": (_STATUS_200, _CONTENT_TYPE),
    **{name: (_STATUS_200, _CONTENT_TYPE, (b"grpc-encoding", name)) for name in ENCODINGS if name != b"identity"},
}
"""Headers of a response by the encoding of its messages."""

_UNIT_NS: Final = {
    ord("H"): 3_600_000_000_000,
    ord("M"): 60_000_000_000,
    ord("S"): 1_000_000_000,
    ord("m"): 1_000_000,
    ord("u"): 1_000,
    ord("n"): 1,
}
_TIMEOUT_DIGITS_MAX: Final = 8
_CONTENT_TYPES: Final = (b"application/grpc+proto", b"application/grpc;")


class NotGrpcError(Exception):
    """A request that is not a gRPC call.

    Attributes:
        status: HTTP status of the response.
        headers: Headers that name the accepted content types.
    """

    def __init__(self, status: int, *headers: Header) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.headers: Headers = ((b":status", str(status).encode()), *headers)


class CallHead:
    """The parsed headers of a call.

    Attributes:
        path: "/package.Service/Method".
        timeout_ns: Time that the caller waits, in ns; 0 for no limit.
        encoding: Encoding of the request's compressed messages.
        accepts: Encodings that the caller accepts.
        wants_grpc_errors: Whether an error ends an inference stream with its status (`triton_grpc_error: true`).
        load_format: Requested format of the server's load report; b"" for none.
        headers: All of them, in order.
    """

    __slots__ = ("accepts", "encoding", "headers", "load_format", "path", "timeout_ns", "wants_grpc_errors")

    def __init__(self) -> None:
        self.path = b""
        self.timeout_ns = 0
        self.encoding = b"identity"
        self.accepts: tuple[bytes, ...] = ()
        self.wants_grpc_errors = False
        self.load_format = b""
        self.headers: Headers = ()

    def header(self, name: bytes) -> bytes | None:
        """Return the last header of a lower-case name, None if there is none."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


def parse_head(headers: Headers, size_max: int, singular: Set[bytes] = NONE_SINGULAR) -> CallHead:
    """Parse the headers of a request.

    Args:
        headers: All of them, in order.
        size_max: Largest accepted size, as HTTP/2 computes it.
        singular: Headers that must not be there twice with different values.

    Raises:
        NotGrpcError: The request is not a gRPC call.
        RpcError: It is a gRPC call, but an invalid one.
    """
    size = sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in headers)
    if size > size_max:
        raise RpcError(Status.RESOURCE_EXHAUSTED, f"request headers: at most {size_max} bytes are accepted, got {size}")
    check_singular(headers, singular)
    head = CallHead()
    head.headers = headers
    method = content_type = timeout = b""
    for name, value in headers:
        if name == b":path":
            head.path = value
        elif name == b":method":
            method = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout = value
        elif name == b"grpc-encoding":
            head.encoding = value
        elif name == b"grpc-accept-encoding":
            head.accepts = tuple(part.strip() for part in value.split(b","))
        elif name == b"triton_grpc_error":
            head.wants_grpc_errors = value == b"true"
        elif name == FORMAT_HEADER:
            head.load_format = value
    if method != b"POST":
        raise NotGrpcError(405, (b"allow", b"POST"))
    if content_type != b"application/grpc" and not content_type.startswith(_CONTENT_TYPES):
        raise NotGrpcError(415, (b"accept-post", b"application/grpc"))
    if timeout:
        head.timeout_ns = parse_timeout(timeout)
    if head.encoding not in ENCODINGS:
        raise RpcError(
            Status.UNIMPLEMENTED,
            f"grpc-encoding '{head.encoding.decode('ascii', 'replace')}' is not supported: "
            f"expected one of {', '.join(name.decode() for name in ENCODINGS)}",
        )
    return head


def check_singular(headers: Headers, singular: Set[bytes]) -> None:
    """Check that no header of these names is there twice with different values.

    Raises:
        RpcError: INVALID_ARGUMENT where one is.
    """
    for name in singular:
        if len({value for key, value in headers if key == name}) > 1:
            raise RpcError(Status.INVALID_ARGUMENT, f"the headers have more than one '{name.decode('latin-1')}'")


def parse_timeout(value: bytes) -> int:
    """Return the nanoseconds of a `grpc-timeout`, at least 1.

    Raises:
        RpcError: INVALID_ARGUMENT for anything but 1 to 8 digits and a unit.
    """
    digits = value[:-1]
    unit = _UNIT_NS.get(value[-1]) if value else None
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS_MAX:
        text = value.decode("ascii", "replace")
        raise RpcError(
            Status.INVALID_ARGUMENT, f"grpc-timeout: expected 1 to 8 digits and a unit of HMSmun, got '{text}'"
        )
    return max(int(digits) * unit, 1)


def error_trailers(error: RpcError) -> Headers:
    """Return the trailers of a call that fails after its response has begun."""
    trailers = ((b"grpc-status", b"%d" % error.status), (b"grpc-message", percent_encoded(error.message)))
    return (*trailers, UNEXECUTED) if error.is_unexecuted else trailers


def error_head(error: RpcError) -> Headers:
    """Return the combined headers and trailers of a call that fails before its response has begun."""
    head = (_STATUS_200, _CONTENT_TYPE, *error_trailers(error))
    return (*head, ACCEPT_ENCODING) if error.status is Status.UNIMPLEMENTED else head
