"""HTTP status of every error code."""

from charonia.core.errors import Code, RefusalKind, ServingError

STATUS: dict[Code, int] = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}
"""Source: the status table of Triton's HTTP endpoint."""


def status_of(error: ServingError) -> int:
    return 429 if error.retry_after_s else STATUS[error.code]


REFUSED: dict[RefusalKind, int] = {
    RefusalKind.RESTRICTED: 403,
    RefusalKind.UNAUTHENTICATED: 401,
    RefusalKind.FORBIDDEN: 403,
}
"""Status of a refused call."""

UNEXECUTED = (b"charonia-executed", b"no")
"""Header of an error, over gRPC trailing metadata, that means: no model has seen the request."""

REASONS: dict[int, str] = {
    100: "Continue",
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
}
"""Reason phrases of the statuses in use. Source: RFC 9110."""
