"""Bodies of `generate` that are no JSON: forms, CSV, and the content of a file with everything else in the query.

Each field of a form, each file in it and each parameter of the query is a member of the object that JSON would have.
An input of text or bytes takes it unchanged, any other as JSON; a name that occurs several times is an array.
Any other body is the only input of text or bytes that the model requires.

Source: RFC 7578 (multipart/form-data), WHATWG URL (application/x-www-form-urlencoded).
"""

import json
from email.message import Message
from urllib.parse import parse_qsl

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.wire.json_text import Object
from charonia.wire.plain_values import CONTENT, PlainValues, Schema, plain_values
from charonia.wire.tables import CSV, csv_columns, plain_inputs

MULTIPART = "multipart/form-data"
URL_ENCODED = "application/x-www-form-urlencoded"
FIELDS_MAX = 1000
"""Most fields of a form."""

_PLAIN_JSON = (b"", b"application/json")
_JSON_TYPES = ("", "application/json", "text/json", "text/plain", URL_ENCODED)  # what clients call JSON


def form_document(config: ModelConfig, content_type: bytes, url: bytes, body: bytes | memoryview) -> Object | None:
    """Return the object that a body and its URL stand for, None for a body that is JSON.

    Args:
        config: The model's configuration.
        content_type: The header field, b"" for none.
        url: The request target.
        body: The body.

    Raises:
        ServingError: INVALID_ARG for a form that cannot be read, or a value that does not fit its input.
    """
    if content_type in _PLAIN_JSON:
        return None  # without the parser of header fields, which takes longer than a small request
    header = Message()
    header["Content-Type"] = content_type.decode("latin-1")
    kind = header.get_content_type() if content_type else ""
    is_json = bytes(body[:64]).lstrip()[:1] in (b"{", b"[") or (kind == URL_ENCODED and b"=" not in bytes(body))
    if kind.endswith("+json") or (kind in _JSON_TYPES and is_json):
        return None
    fields: list[tuple[str, str | bytes]]
    if kind == MULTIPART:
        boundary = header.get_param("boundary")
        fields = _parts(str(boundary).encode("latin-1") if boundary else b"", bytes(body))
    elif kind == URL_ENCODED:
        fields = list(_pairs(bytes(body)))
    else:
        raw = _only_text(config)
        if kind == CSV.decode() and (raw is None or len(config.input) > 1):
            return plain_inputs(config, csv_columns(config, bytes(body)))
        if kind in _JSON_TYPES[:3] or raw is None:
            return None
        fields = [(raw, bytes(body))]
    return _document(config, [*fields, *_pairs(url.partition(b"?")[2])])


def query_document(config: ModelConfig, url: bytes) -> Object:
    """Return the object that the query of a URL stands for. Raises as `form_document`."""
    return _document(config, list(_pairs(url.partition(b"?")[2])))


def _document(config: ModelConfig, fields: list[tuple[str, str | bytes]]) -> Object:
    inputs = {tensor.name: tensor for tensor in config.input}
    schemas = plain_values(config) or PlainValues()
    values: dict[str, list[object]] = {}
    for name, text in fields:
        if isinstance(text, bytes) and name not in inputs:
            names = ", ".join(inputs)
            raise invalid(f"model '{config.name}' has no input '{name}' for a file", hint=f"its inputs are {names}")
        values.setdefault(name, []).append(_value(name, inputs.get(name), schemas.inputs.get(name, {}), text))
    return {name: found[0] if len(found) == 1 else found for name, found in values.items()}


def _value(name: str, model_input: ModelInput | None, schema: Schema, text: str | bytes) -> object:
    if model_input is not None and model_input.data_type is DataType.BYTES and CONTENT not in schema:
        return text
    try:
        return json.loads(text)
    except ValueError:
        if isinstance(text, str) and (model_input is None or CONTENT in schema):
            return text
    shown = f"'{text[:40]}'" if isinstance(text, str) else f"{len(text)} bytes"
    raise invalid(f"'{name}': expected JSON, such as 1 or [1, 2], got {shown}")


def _only_text(config: ModelConfig) -> str | None:
    """Return the name of the only required input of text or bytes."""
    schemas = plain_values(config) or PlainValues()
    names = [
        tensor.name
        for tensor in config.input
        if tensor.data_type is DataType.BYTES
        and not tensor.optional
        and CONTENT not in schemas.inputs.get(tensor.name, {})
    ]
    return names[0] if len(names) == 1 else None


def _pairs(text: bytes) -> list[tuple[str, str | bytes]]:
    try:
        return [*parse_qsl(text.decode(), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)]
    except ValueError as error:
        raise invalid(f"the form or the query of the URL cannot be read: {error}") from error


def _parts(boundary: bytes, body: bytes) -> list[tuple[str, str | bytes]]:
    """Return name and content of each part: text of fields, bytes of files."""
    if not boundary:
        raise _malformed("its type names no boundary")
    segments = (b"\r\n" + body).split(b"\r\n--" + boundary, FIELDS_MAX + 2)
    if len(segments) > FIELDS_MAX + 2:
        raise _malformed(f"it has more than {FIELDS_MAX} parts")
    if len(segments) < 2 or not segments[-1].startswith(b"--"):
        raise _malformed("it does not end with its boundary")
    fields: list[tuple[str, str | bytes]] = []
    for segment in segments[1:-1]:
        head, separator, content = segment.partition(b"\r\n\r\n")
        part = Message()
        for line in head.split(b"\r\n"):
            field, _, value = line.decode("utf-8", "replace").partition(":")
            if field.strip().lower() == "content-disposition":
                part["Content-Disposition"] = value.strip()
        name = part.get_param("name", header="Content-Disposition")
        if not separator or not isinstance(name, str):
            raise _malformed("a part of it has no name")
        if part.get_filename() is not None:
            fields.append((name, content))
            continue
        try:
            fields.append((name, content.decode()))
        except UnicodeDecodeError:
            fields.append((name, content))
    return fields


def _malformed(reason: str) -> ServingError:
    return invalid(f"the form cannot be read: {reason}")
