"""JSON parsing and writing, with the extensions that clients of this protocol use.

The literals NaN, Infinity and -Infinity are read and written although standard JSON has none, and a byte order mark
before the document is skipped. Everything else is strict: UTF-8, nothing after the document, limited nesting. orjson
does the parsing; only documents that it rejects or that contain one of the literals go to the slower standard library.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from math import isfinite
from typing import Final

import orjson

from charonia.core.errors import ServingError, invalid

NESTING_MAX: Final = 100
"""Deepest nesting of arrays and objects in a document."""

UINT64_MAX: Final = 2**64 - 1
INT64_MIN: Final = -(2**63)

Object = dict[str, object]
"""A JSON object."""

_KINDS: Final = {
    type(None): "nothing",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def parse_object(text: bytes | memoryview, array_as: str = "") -> Object:
    """Parse a JSON object.

    Args:
        text: The text.
        array_as: Member of an object that an array of objects stands for, "" to refuse arrays.

    Raises:
        ServingError: INVALID_ARG when the text is not an object, or is nested too deeply.
    """
    text = bytes(text)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        document = _parse_leniently(text, error)
    if array_as and type(document) is list and document and all(type(each) is dict for each in document):
        document = {array_as: document}
    if type(document) is not dict:
        raise invalid(f"failed to parse the request JSON buffer: expected an object, got {kind_of(document)}")
    _check_nesting(text, document)
    return document


def dump(document: object, *, literals: bool = False) -> bytes:
    """Return the text of a document that may hold numpy arrays, which must be contiguous.

    Args:
        document: What to write.
        literals: Whether it may hold non-finite numbers, which costs time. Without it these become null.
    """
    if not literals:
        try:
            return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:  # text with a lone surrogate, or a number of more than 64 bits
            pass
    return json.dumps(document, separators=(",", ":"), default=lambda array: array.tolist()).encode()


def is_literal(value: object) -> bool:
    """Whether a value is a number that JSON has no text for."""
    return isinstance(value, float) and not isfinite(value)


def encode_error(error: ServingError) -> bytes:
    return dump({"error": str(error)})


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def string_at(document: Mapping[str, object], key: str, *, required: bool = False) -> str:
    """Return a member that must be a string; an optional one that is absent is "".

    Raises:
        ServingError: INVALID_ARG when it is something else.
    """
    value = document.get(key)
    if value is None and not required:
        return ""
    if type(value) is not str:
        raise invalid(f"Unable to parse '{key}': expected a string, got {kind_of(value)}")
    return value


def boolean(key: str, value: object) -> bool:
    """Return a parameter's value that must be a boolean.

    Raises:
        ServingError: INVALID_ARG when it is something else.
    """
    if type(value) is not bool:
        raise invalid(f"parameter '{key}': expected a boolean, got {kind_of(value)}")
    return value


def unsigned(key: str, value: object) -> int:
    """Return a parameter's value that must be a non-negative integer of 64 bits.

    Raises:
        ServingError: INVALID_ARG when it is something else.
    """
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        shown = value if type(value) in (int, float) else kind_of(value)
        raise invalid(f"parameter '{key}': expected a non-negative integer, got {shown}")
    return value


def _parse_leniently(text: bytes, error: Exception) -> object:
    if text.startswith(BOM_UTF8):
        text = text.removeprefix(BOM_UTF8)
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as without_mark:
            error = without_mark
    if b"NaN" in text or b"Infinity" in text:
        try:
            document = json.loads(text.decode())
            if b"\\u" in text:
                json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate is not valid text
        except (ValueError, RecursionError) as second:
            error = second
        else:
            return document
    raise invalid(f"failed to parse the request JSON buffer: {error}")


def _check_nesting(text: bytes, document: Object) -> None:
    # Nesting is at most the number of opening brackets, so most documents need no second check.
    if text.count(b"[") + text.count(b"{") <= NESTING_MAX:
        return
    level: list[object] = [document]
    for _ in range(NESTING_MAX):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)  # type: ignore[attr-defined]
            if type(child) is list or type(child) is dict
        ]
        if not level:
            return
    raise invalid(f"JSON nesting depth exceeds maximum allowed limit ({NESTING_MAX})")
