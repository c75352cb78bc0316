"""What the platform asks of the server of a deployment, and does at it, for example to its traffic."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from charonia.config import pbtxt
from charonia.core.errors import Code, ServingError, invalid, not_found, unavailable

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


TRAFFIC = "traffic"
"""The model parameter."""

SETTINGS = ("weights", "sticky", "shadow")


def traffic_of(config: str) -> Mapping[str, Any]:
    """Return how a configuration splits traffic, {} if it says nothing."""
    traffic: Mapping[str, Any] = json.loads(pbtxt.parse(config).parameters.get(TRAFFIC, "{}"))
    return traffic


def without_traffic(config: str) -> str:
    """Return a configuration without how it splits traffic."""
    parsed = pbtxt.parse(config)
    rest = {name: value for name, value in parsed.parameters.items() if name != TRAFFIC}
    return pbtxt.render(replace(parsed, parameters=rest))


def forget_changes(address: str, key: str, model: str) -> None:
    """Let a server split the traffic of a model as its configuration says, whatever was asked for before.

    Raises:
        ServingError: UNAVAILABLE if it does not answer.
    """
    try:
        ask(address, model_path(model, "traffic"), key=key, method="DELETE")
    except ServingError as error:
        if error.code is Code.UNAVAILABLE:  # else it has no such model, or no traffic
            raise


def change_traffic(address: str, key: str, model: str, traffic: Mapping[str, Any]) -> None:
    """Let a server split the traffic of a model so; what is not given is reset.

    Raises:
        ServingError: INVALID_ARG or NOT_FOUND if it refuses; UNAVAILABLE if it does not answer.
    """
    ask(address, model_path(model, "traffic"), key=key, body={name: traffic.get(name) for name in SETTINGS})
