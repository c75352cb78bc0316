"""Arguments of an engine that a configuration gives as parameters. Pure."""

import json
from collections.abc import Collection
from typing import Any

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.server.backends.python.backend import START_SECONDS
from charonia.server.backends.python.environment import ENVIRONMENT

_WORDS = {"true": True, "false": False}


def arguments_of(config: ModelConfig, others: Collection[str]) -> dict[str, Any]:
    """Return the parameters that belong to the engine, by name: those in lower case.

    A value is read as JSON, and is text where it is none: `8`, `0.5`, `true`, `{"a": 1}`, `auto`.

    Args:
        config: The configuration.
        others: Names in lower case that are the backend's own.
    """
    left_out = {*SERVER_PARAMETERS, START_SECONDS, ENVIRONMENT, *others}
    return {
        name: _value(text) for name, text in config.parameters.items() if name == name.lower() and name not in left_out
    }


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text
