"""Values of functions as plain JSON, by the model parameter `JSON_SCHEMA`: a JSON schema for each input and output.

A schema with `contentSchema` is that of a tensor of strings with JSON text: in a body, the value itself takes its
place. Every other value has the shape of its tensor; a tensor of one element whose schema is not that of an array is a
number, a boolean or a string. A model with a batch dimension takes one value or a list of them, and answers alike.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import lru_cache
from math import nan
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from charonia.config.model import ModelConfig
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.tensor import Array, Tensor, from_bfloat16
from charonia.wire.json_text import dump

MISSING: Final = b"\xff"
"""A missing text in a tensor: no text in UTF-8 has this byte."""

BASE64: Final = "b64"
"""The only key of an object that stands for bytes."""

CONTENT: Final = "contentSchema"
"""Keyword of JSON Schema: the schema of the JSON text in a string."""

Schema = Mapping[str, Any]
"""A JSON schema."""


class PlainValues(NamedTuple):
    """The schemas of a function's inputs and outputs by name."""

    inputs: Mapping[str, Schema] = {}
    outputs: Mapping[str, Schema] = {}


def plain_values(config: ModelConfig) -> PlainValues | None:
    """Return the schemas of a model, None for one that is no function."""
    text = config.parameters.get(JSON_SCHEMA)
    return None if text is None else _parsed(text)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> PlainValues | None:
    try:
        return PlainValues(**json.loads(text))
    except (ValueError, TypeError):  # written into a config.pbtxt by hand
        return None


def json_texts(content: Schema, value: object, *, has_batch: bool) -> tuple[list[object], tuple[int, ...]]:
    """Return the JSON text of a value, or of each one of a list of them, and the shape of the list.

    A string is such a text already, unless the schema permits strings.
    """
    is_array = content.get("type") == "array"
    is_list = has_batch and type(value) is list
    if is_list and is_array:
        is_list = bool(value) and all(type(each) is list for each in value)  # type: ignore[attr-defined] # a list
    values: list[object] = value if is_list else [value]  # type: ignore[assignment] # a list
    has_text = content.get("type", "string") != "string"
    texts: list[object] = [
        each if has_text and type(each) is str else dump(each, literals=True).decode() for each in values
    ]
    return texts, (len(texts),) if is_list else ()


def from_base64(name: str, value: object) -> object:
    """Return the value of an input of strings with bytes in place of the objects `{"b64": "..."}`.

    Raises:
        ServingError: INVALID_ARG for text that is not base64.
    """
    if type(value) is list:
        return [from_base64(name, each) for each in value]
    if type(value) is not dict or value.keys() != {BASE64} or type(value[BASE64]) is not str:
        return value
    try:
        return b64decode(value[BASE64], validate=True)
    except ValueError as error:
        raise invalid(f"input '{name}': '{BASE64}': expected base64, got {error}") from error


def is_nullable(schema: Schema) -> bool:
    """Return whether a value may be null, which the tensor has as `MISSING` or NaN."""
    return "null" in schema.get("type", ())


def type_of(schema: Schema) -> str:
    """Return the type of a value, the first one where there are several."""
    kind = schema.get("type", "string")
    return kind if isinstance(kind, str) else next(iter(kind), "string")


def titles_of(schema: Schema) -> tuple[str, ...]:
    """Return the names of the elements of an array, empty where they have none."""
    items = schema.get("prefixItems", ())
    return tuple(item["title"] for item in items) if items and all("title" in item for item in items) else ()


def labels_of(config: ModelConfig, output: str) -> tuple[str, ...]:
    """Return the names of the elements of an output, such as the classes of probabilities; empty where it has none."""
    return titles_of((plain_values(config) or PlainValues()).outputs.get(output, {}))


def facts_of(schema: Schema) -> dict[str, object]:
    """Return what metadata says of a tensor: names of its "columns", the "values" of its elements, or "examples"."""
    found = {"columns": list(titles_of(schema)), "values": schema.get("enum"), "examples": schema.get("examples")}
    return {name: value for name, value in found.items() if value}


def with_missing(schema: Schema, datatype: DataType, value: object) -> object:
    """Return a value of an input in the elements of its tensor; null elements are missing.

    Numbers of a matrix of texts become text; booleans and categories become numbers where the tensor has numbers.
    """
    items = schema.get("prefixItems")
    if items is None and isinstance(schema.get("type", ""), str):
        return value
    if type(value) is list:
        if items is not None and len(items) == len(value) and not any(type(each) is list for each in value):
            return [_element(item, datatype, each) for item, each in zip(items, value, strict=True)]
        return [with_missing(schema, datatype, each) for each in value]
    return _element(schema, datatype, value)


def _element(schema: Schema, datatype: DataType, value: object) -> object:
    if datatype.numpy.kind == "f" and "enum" in schema:  # a category stands for its number
        return float(schema["enum"].index(value)) if value is not None and value in schema["enum"] else nan
    if value is None and is_nullable(schema):
        return MISSING if datatype is DataType.BYTES else nan
    if type(value) is bool and datatype.numpy.kind == "f" and "boolean" in schema.get("type", ()):
        return float(value)
    if type(value) in (int, float) and datatype is DataType.BYTES and type_of(schema) in ("number", "integer"):
        return repr(value)
    return value


def text_or_base64(element: bytes) -> object:
    """Return bytes as JSON has them: text, or an object with base64 where they are not UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {BASE64: b64encode(element).decode()}


def plain_output(config: ModelConfig, schema: Schema, tensor: Tensor, *, is_list: bool) -> object:
    """Return an output of a function as JSON has it.

    Args:
        config: The model's configuration.
        schema: Schema of the output.
        tensor: The output.
        is_list: Whether the request had a list of values, which makes a difference for a batch of one.
    """
    array = json_array(tensor)
    if config.max_batch_size == 0:
        return _plain(schema, array)
    rows = [_plain(schema, row) for row in array]
    return rows if is_list or len(rows) != 1 else rows[0]


def json_array(tensor: Tensor) -> Array:
    """Return the numbers of a tensor in a dtype that JSON has."""
    if tensor.datatype is DataType.BF16:
        return from_bfloat16(tensor.array)
    dtype = np.dtype(np.float32) if tensor.datatype is DataType.FP16 else tensor.datatype.numpy
    return np.ascontiguousarray(tensor.array, dtype)


def _plain(schema: Schema, array: Array) -> object:
    is_array = schema.get("type") == "array" or array.shape != (1,)
    titles = titles_of(schema)
    if titles and array.shape == (len(titles),):
        return dict(zip(titles, array.tolist(), strict=True))
    if array.dtype != object:
        return array if is_array else array[0]
    read = orjson.loads if CONTENT in schema else text_or_base64
    values = np.empty(array.size, object)
    values[:] = [read(bytes(element)) for element in array.ravel().tolist()]
    nested: list[object] = values.reshape(array.shape).tolist()
    return nested if is_array else nested[0]
