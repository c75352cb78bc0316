"""The request in the page's form, from which code samples are written. Pure."""

from charonia.config.model import ModelConfig
from charonia.wire.example_request import ExampleRequest
from charonia.wire.json_text import dump, parse_object, string_at
from charonia.wire.v2_request import InferDecoder

FILE = "file"
"""Parameter of an input whose value is a file of the user: the file's name."""


def edited_request(
    config: ModelConfig, body: bytes, json_size: int, *, version: str, url: str, has_key: bool, tensor_bytes_max: int
) -> ExampleRequest:
    """Return the request of a body of `infer`, whose inputs may be names of files.

    Args:
        config: The model's complete configuration.
        json_size: Bytes of JSON at its start.
        version: Version of the model, "" for the latest.
        url: URL of the server.
        has_key: Whether it requires a key.
        tensor_bytes_max: Largest size of a tensor in bytes.

    Raises:
        ServingError: INVALID_ARG for an invalid body.
    """
    document = parse_object(body[:json_size])
    entries, files = document.get("inputs"), dict[str, str]()
    if isinstance(entries, list):
        named = [entry for entry in entries if _file_of(entry) is not None]
        files = {string_at(entry, "name", required=True): str(_file_of(entry)) for entry in named}
        entries = [entry for entry in entries if entry not in named]
    parameters = document.get("parameters", {})
    head = dump({"inputs": entries, "parameters": parameters}, literals=True)
    call = InferDecoder(tensor_bytes_max).decode(config.name, "", head + body[json_size:], len(head))
    return ExampleRequest(
        config, call.request.inputs, version,
        url=url,
        files=files,
        parameters=parameters if isinstance(parameters, dict) else {},
        has_key=has_key,
    )  # fmt: skip


def _file_of(entry: object) -> object:
    """Return the name of an input's file, None for other inputs."""
    parameters = entry.get("parameters") if isinstance(entry, dict) else None
    return parameters.get(FILE) if isinstance(parameters, dict) else None
