"""Requests and responses of the trace settings, as JSON and as gRPC messages.

Source: Triton's trace extension.
"""

from collections.abc import Mapping, Sequence

from charonia.core.errors import invalid
from charonia.core.trace_settings import Change, read_change
from charonia.protocol.grpc_framing import Buffer
from charonia.protocol.grpc_messages import new, parsed, serialized
from charonia.protocol.json_text import kind_of, parse_object

TraceTexts = Mapping[str, Sequence[str]]
"""Settings by name, each a list of texts."""


def decode_json(body: bytes | memoryview) -> Change:
    """Return the change that a body asks for.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED, as `charonia.core.trace_settings.read_change`.
    """
    texts: dict[str, Sequence[str] | None] = {}
    for name, value in (parse_object(body) if len(body) else {}).items():
        if value is None:
            texts[name] = None
        elif name == "trace_level":
            if type(value) is not list or any(type(level) is not str for level in value):
                raise invalid(f"'trace_level': expected a list of strings, got {kind_of(value)}")
            texts[name] = value
        elif type(value) in (str, int):
            texts[name] = [str(value)]
        else:
            raise invalid(f"'{name}': expected a string, got {kind_of(value)}")
    return read_change(texts)


def describe(settings: TraceTexts) -> dict[str, object]:
    """Return settings as the JSON document that answers."""
    return {name: list(texts) if name == "trace_level" else texts[0] for name, texts in settings.items()}


def decode_message(data: Buffer) -> tuple[str, Change]:
    """Return the model and the change that a `TraceSettingRequest` asks for.

    Raises:
        RpcError: INTERNAL when the bytes are no such message.
        ServingError: As `decode_json`.
    """
    request = parsed("inference.TraceSettingRequest", data)
    return request.model_name, read_change({name: list(s.value) for name, s in request.settings.items()})


def encode_message(settings: TraceTexts) -> bytes:
    """Return settings as a `TraceSettingResponse`."""
    response = new("inference.TraceSettingResponse")
    for name, texts in settings.items():
        response.settings[name].value.extend(texts)
    return serialized(response)
