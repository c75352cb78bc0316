"""The bodies of repository requests. An empty body says nothing, as does an empty object.

Source: KServe v2 model repository extension, with Triton's load and unload parameters.
"""

from base64 import b64decode
from binascii import Error as Base64Error

from charonia.core.errors import invalid
from charonia.protocol.json_text import Object, kind_of, parse_object

FILE_PREFIX = "file:"


def decode_index(body: bytes | memoryview) -> bool:
    """Return whether only ready models are asked for.

    Raises:
        ServingError: INVALID_ARG for a body that says something else.
    """
    ready = _document(body).get("ready", False)
    if type(ready) is not bool:
        raise invalid(f"Invalid value for 'ready': expected a boolean, got {kind_of(ready)}")
    return ready


def decode_load(body: bytes | memoryview) -> tuple[str | None, dict[str, bytes]]:
    """Return the configuration to use instead of the model's own, and the files, by path, to use instead of its folder.

    Raises:
        ServingError: INVALID_ARG for a body that says something else.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in _parameters(body).items():
        if type(value) is not str:
            raise invalid(f"load parameter '{key}': expected a string, got {kind_of(value)}")
        if key == "config":
            config = value
        elif key.startswith(FILE_PREFIX):
            try:
                files[key.removeprefix(FILE_PREFIX)] = b64decode(value, validate=True)
            except (Base64Error, ValueError) as error:
                raise invalid(f"load parameter '{key}': the value is not base64: {error}") from error
        else:
            raise invalid(f"unrecognized load parameter '{key}'", hint="known are 'config' and 'file:<path>'")
    return config, files


def decode_unload(body: bytes | memoryview) -> bool:
    """Return whether the models that an ensemble is made of are to be unloaded with it.

    Raises:
        ServingError: INVALID_ARG for a body that says something else.
    """
    dependents = _parameters(body).get("unload_dependents", False)
    if type(dependents) is not bool:
        raise invalid(f"unload parameter 'unload_dependents': expected a boolean, got {kind_of(dependents)}")
    return dependents


def _parameters(body: bytes | memoryview) -> Object:
    parameters = _document(body).get("parameters", {})
    if type(parameters) is not dict:
        raise invalid(f"'parameters' must be an object, got {kind_of(parameters)}")
    return parameters


def _document(body: bytes | memoryview) -> Object:
    return parse_object(body) if len(body) else {}
