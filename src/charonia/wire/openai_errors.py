"""Errors in the form of OpenAI's API.

An error whose message begins with the name of a member of the request and a colon, such as `temperature: expected ...`,
names it as `param`.

Source: OpenAI's API reference, "Error codes".
"""

import re

from charonia.core.errors import Code, ServingError, TooLargeError
from charonia.wire.http_status import STATUS
from charonia.wire.json_text import dump

PATHS = b"/v1/"
"""Beginning of the paths whose errors have this form."""

_STATUS = STATUS | {Code.UNSUPPORTED: 400}  # clients of this API try again what fails with 500 and more

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 403: "insufficient_permissions"}
_PARAM = re.compile(r"([a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z][a-z0-9_]*)*): ")


def openai_status(error: ServingError) -> int:
    """Return the HTTP status of an error. A body that is too large has its own."""
    return 413 if isinstance(error, TooLargeError) else _STATUS[error.code]


def error_object(error: ServingError, status: int = 0) -> dict[str, object]:
    """Return an error as an object.

    Args:
        error: The error.
        status: Its HTTP status, 0 for that of its code.
    """
    status = status or openai_status(error)
    match = _PARAM.match(error.message)
    param = match[1] if match is not None else None
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if status == 404 and param == "model" else _CODES.get(status)
    return {"message": str(error), "type": kind, "param": param, "code": code}


def encode_openai_error(error: ServingError, status: int = 0) -> bytes:
    """Return the body of an error response, or the data of an event. Arguments as in `error_object`."""
    return dump({"error": error_object(error, status)})
