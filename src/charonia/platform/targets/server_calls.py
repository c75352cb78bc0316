"""Calls of the platform to the servers of a deployment, for example about traffic."""

import json
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from charonia.config import pbtxt
from charonia.core.errors import Code, ServingError, invalid, not_found, unavailable
from charonia.http_call import NO_ANSWER, HttpAnswer, http_call, no_answer_reason
from charonia.platform.targets.api import Workload
from charonia.wire.traffic import SETTINGS

ANSWER_S_MAX = 10.0
ANSWER_BYTES_MAX = 16 * 2**20
HEALTH_S_MAX = 2.0


def ask(
    address: str, path: str, *, key: str = "", body: Mapping[str, Any] | None = None, method: str | None = None
) -> Any:
    """Call a server and return its JSON answer.

    Args:
        key: An API key, "" for none.
        body: The JSON body, None for none.
        method: The method; POST by default where there is a body, else GET.
    """
    data = None if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["X-Api-Key"] = key  # a proxy takes `Authorization` for itself
    try:
        answer = http_call(
            method, f"{address}{path}", headers, data, timeout_s=ANSWER_S_MAX, bytes_max=ANSWER_BYTES_MAX
        )
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return json.loads(answer.body or b"null")
    except NO_ANSWER as error:
        text = f"the server at {address} does not answer: {no_answer_reason(error)}"
        raise unavailable(text, hint="the log says more") from None
    raise _refusal(answer)


def server_is_ready(address: str) -> bool:
    """Whether a server answers and all of its models are ready."""
    try:
        answer = http_call("GET", f"{address}/v2/health/ready", timeout_s=HEALTH_S_MAX, bytes_max=0)
        return answer.status == HTTPStatus.OK
    except NO_ANSWER:
        return False


def model_path(model: str, what: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{what}"


def _refusal(answer: HttpAnswer) -> ServingError:
    try:
        text = str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"the server answers {answer.status} {answer.reason}"
    if answer.status == HTTPStatus.NOT_FOUND:
        return not_found(text)
    return invalid(text) if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else unavailable(text)


TRAFFIC = "traffic"
"""The model parameter."""


def traffic_of(config: str) -> Mapping[str, Any]:
    """Return the traffic split of a configuration, {} if it has none."""
    traffic: Mapping[str, Any] = json.loads(pbtxt.parse(config).parameters.get(TRAFFIC, "{}"))
    return traffic


def without_traffic(config: str) -> str:
    """Return a configuration without its traffic split."""
    parsed = pbtxt.parse(config)
    rest = {name: value for name, value in parsed.parameters.items() if name != TRAFFIC}
    return pbtxt.render(replace(parsed, parameters=rest))


def reset_split(address: str, key: str, model: str) -> None:
    """Reset the traffic split of a model to its configuration, discarding earlier calls."""
    try:
        ask(address, model_path(model, "traffic"), key=key, method="DELETE")
    except ServingError as error:
        if error.code is Code.UNAVAILABLE:  # otherwise it has no such model, or no traffic
            raise


def change_traffic(address: str, key: str, model: str, traffic: Mapping[str, Any]) -> None:
    """Set the traffic split of a model; omitted settings are reset."""
    ask(address, model_path(model, "traffic"), key=key, body={name: traffic.get(name) for name in SETTINGS})


def content_of(workload: Workload) -> list[list[Any]]:
    """Return the models of a workload without their traffic: equal for interchangeable servers."""
    return [
        [model.name, sorted((str(n), digest) for n, digest in model.digests.items()), without_traffic(model.config)]
        for model in sorted(workload.models, key=lambda model: model.name)
    ]
