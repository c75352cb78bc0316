"""gRPC status codes, the code table, and how a status travels in trailers.

Source: the gRPC status code list and "gRPC over HTTP/2" (`Status-Message` percent-encoding).
"""

from enum import IntEnum
from urllib.parse import quote_from_bytes

from charonia.core.errors import Code, RefusalKind, ServingError

MESSAGE_BYTES_MAX = 4096
"""Longer status messages are truncated, because clients reject trailers of more than 8 to 16 KiB."""


class Status(IntEnum):
    """A gRPC status code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


STATUS_BY_CODE: dict[Code, Status] = {
    Code.UNKNOWN: Status.UNKNOWN,
    Code.INTERNAL: Status.INTERNAL,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.INVALID_ARG: Status.INVALID_ARGUMENT,
    Code.UNAVAILABLE: Status.UNAVAILABLE,
    Code.UNSUPPORTED: Status.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.CANCELLED: Status.CANCELLED,
}
"""gRPC status by transport-neutral code."""


REFUSED: dict[RefusalKind, Status] = {
    RefusalKind.RESTRICTED: Status.UNAVAILABLE,
    RefusalKind.UNAUTHENTICATED: Status.UNAUTHENTICATED,
    RefusalKind.FORBIDDEN: Status.PERMISSION_DENIED,
}
"""Status of a refused call. Source of the first: Triton's restricted protocols."""


class RpcError(Exception):
    """A call that ends with a status other than OK.

    Attributes:
        message: One sentence for the caller.
        is_unexecuted: Whether no model has seen the request for certain.
    """

    def __init__(self, status: Status, message: str, *, is_unexecuted: bool = False) -> None:
        super().__init__(message)
        self.is_unexecuted = is_unexecuted
        self.status = status
        self.message = message


def rpc_error(error: ServingError) -> RpcError:
    """Return the gRPC error for an error of a lower layer."""
    status = Status.RESOURCE_EXHAUSTED if error.retry_after_s else STATUS_BY_CODE[error.code]
    return RpcError(status, str(error), is_unexecuted=error.is_unexecuted)


def percent_encoded(message: str) -> bytes:
    """Return a status message as a header value: printable ASCII except "%" unchanged, other UTF-8 bytes as %XX."""
    data = message.encode("utf-8", "replace")
    if len(data) > MESSAGE_BYTES_MAX:
        # Drop a character that the cut would split.
        data = data[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore").encode() + b"..."
    return quote_from_bytes(data, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode("ascii")
