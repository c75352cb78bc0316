"""What the platform asks of the server of a deployment, and does at it."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from charonia.core.errors import ServingError, invalid, not_found, unavailable

ANSWER_S_MAX = 10.0
ANSWER_BYTES_MAX = 16 * 2**20


def ask(
    address: str, path: str, *, key: str = "", body: Mapping[str, Any] | None = None, method: str | None = None
) -> Any:
    """Call a server and return its JSON answer.

    Args:
        address: Address of its HTTP endpoint.
        path: Path of the call.
        key: An API key, "" for none.
        body: What is sent, None for nothing.
        method: The method; POST by default where there is a body, else GET.

    Raises:
        ServingError: INVALID_ARG or NOT_FOUND with the server's words; UNAVAILABLE when it does not answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"}, method=method)
    if key:
        request.add_header("X-Api-Key", key)  # a proxy takes `Authorization` for itself
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as response:
            return json.loads(response.read(ANSWER_BYTES_MAX) or b"null")
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise unavailable(f"the server at {address} does not answer: {reason}", hint="the log says more") from None


def model_path(model: str, what: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{what}"


def _refusal(error: urllib.error.HTTPError) -> ServingError:
    try:
        text = str(json.loads(error.read(ANSWER_BYTES_MAX))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        text = f"the server answers {error.code} {error.reason}"
    if error.code == http.client.NOT_FOUND:
        return not_found(text)
    return invalid(text) if error.code < http.client.INTERNAL_SERVER_ERROR else unavailable(text)
