"""How traffic is split in a server that runs, and in the configuration of its models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from charonia.config import pbtxt
from charonia.core.errors import Code, ServingError
from charonia.platform.targets.server_calls import ask, model_path

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
