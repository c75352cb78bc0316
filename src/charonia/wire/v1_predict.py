"""KServe's v1 protocol: rows or columns of plain JSON, turned into tensors by the model's configuration.

`{"instances": [...]}` has a row for each element of the batch: the value of the only input, or an object with a value
for each. `{"inputs": ...}` has columns: the whole tensor of the only input, or an object of tensors. `{"b64": "..."}`
stands for bytes. The answer is `{"predictions": ...}`, rows for rows and columns for columns.

Source: KServe's v1 protocol, "Predict"; for columns and `b64`, TensorFlow Serving's REST API.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from itertools import chain
from math import prod

import numpy as np

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor, from_bfloat16, to_bfloat16
from charonia.wire.json_text import Object, dump, kind_of, parse_object
from charonia.wire.v2_data import decode_data

ROWS = "instances"
COLUMNS = "inputs"
BASE64 = "b64"
"""The only key of an object that stands for bytes."""


def decode_predict(config: ModelConfig, body: bytes | memoryview, tensor_bytes_max: int) -> tuple[InferRequest, bool]:
    """Return the request in a body, and whether it has rows.

    Args:
        config: The model's configuration.
        body: A JSON object.
        tensor_bytes_max: Largest size of a tensor in bytes.

    Raises:
        ServingError: INVALID_ARG, with the problem.
    """
    document = parse_object(body)
    if (ROWS in document) == (COLUMNS in document):
        given = f"both '{ROWS}' and '{COLUMNS}'" if ROWS in document else ", ".join(document) or "an empty object"
        raise invalid(f"expected either '{ROWS}' (rows) or '{COLUMNS}' (columns), got {given}")
    inputs = {each.name: each for each in config.input}
    is_rows = ROWS in document
    columns = _columns_of_rows(document[ROWS], inputs) if is_rows else _columns(document[COLUMNS], inputs)
    tensors = {}
    for name, value in columns.items():
        if name not in inputs:
            raise invalid(f"model '{config.name}' has no input '{name}'", hint=f"its inputs are {', '.join(inputs)}")
        tensors[name] = _tensor(config, inputs[name], value, is_rows, tensor_bytes_max)
    return InferRequest(config.name, tensors), is_rows


def encode_predictions(response: InferResponse, is_rows: bool) -> bytes:
    """Return the body for a response.

    Raises:
        ServingError: INVALID_ARG when the outputs cannot be divided into rows.
    """
    arrays = {output.name: _plain(output) for output in response.outputs}
    literals = any(each.dtype.kind == "f" and not np.isfinite(each).all() for each in arrays.values())
    predictions: object
    if len(arrays) == 1:
        predictions = _values(next(iter(arrays.values())))
    elif is_rows:
        counts = {name: len(each) if each.ndim else 0 for name, each in arrays.items()}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
            raise invalid(
                f"the outputs of model '{response.model_name}' have no common number of rows: {sizes}",
                hint=f"send columns, '{COLUMNS}', to get them as columns",
            )
        columns = [_values(each) for each in arrays.values()]
        predictions = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        predictions = {name: _values(each) for name, each in arrays.items()}
    return dump({"predictions": predictions}, literals=literals)


def _columns_of_rows(rows: object, inputs: Mapping[str, ModelInput]) -> Object:
    if type(rows) is not list or not rows:
        raise invalid(f"'{ROWS}': expected an array of at least one row, got {_shown(rows)}")
    if not _is_named(rows[0]):
        return {_only(inputs, ROWS): rows}
    names = rows[0].keys()
    for index, row in enumerate(rows):
        if type(row) is not dict or row.keys() != names:
            raise invalid(f"'{ROWS}': row {index} has other members than the first one, {', '.join(names)}")
    return {name: [row[name] for row in rows] for name in names}


def _columns(columns: object, inputs: Mapping[str, ModelInput]) -> Object:
    if _is_named(columns):
        assert type(columns) is dict
        return columns
    return {_only(inputs, COLUMNS): columns}


def _only(inputs: Mapping[str, ModelInput], key: str) -> str:
    required = [name for name, given in inputs.items() if not given.optional]
    if len(required) != 1:
        raise invalid(f"'{key}': expected objects with the inputs {', '.join(inputs)}, got plain values")
    return required[0]


def _is_named(value: object) -> bool:
    return type(value) is dict and value.keys() != {BASE64}


def _tensor(config: ModelConfig, given: ModelInput, value: object, is_rows: bool, bytes_max: int) -> Tensor:
    datatype = given.data_type
    assert datatype is not None  # of a model that is loaded
    flat, shape = _flat(given.name, value)
    rank = len(given.dims) + (config.max_batch_size > 0)
    if is_rows and len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]  # the model has no batches: the row is the whole tensor
    shape += (1,) * (rank - len(shape))  # a number for an input of one element
    if datatype is DataType.BYTES:
        flat = [_bytes(given.name, element) for element in flat]
        strings = np.empty(len(flat), object)
        strings[:] = flat
        return Tensor(given.name, datatype, strings.reshape(shape))
    if datatype not in (DataType.FP16, DataType.BF16):
        return decode_data(given.name, datatype, shape, flat, bytes_max)
    wide = decode_data(given.name, DataType.FP32, shape, flat, bytes_max).array
    if datatype is DataType.FP16:
        with np.errstate(over="ignore"):  # to infinity, as with other datatypes
            return Tensor(given.name, datatype, wide.astype(np.float16))
    return Tensor(given.name, datatype, to_bfloat16(wide))


def _flat(name: str, value: object) -> tuple[list[object], tuple[int, ...]]:
    """Return the elements of nested arrays, and their shape."""
    level, shape = [value], list[int]()
    while level and any(type(each) is list for each in level):
        sizes = {len(each) if type(each) is list else None for each in level}
        if len(sizes) > 1:
            raise invalid(f"input '{name}': its arrays differ in size, and a tensor has rows of one size")
        shape.append(len(level[0]))  # type: ignore[arg-type] # a list
        level = list(chain.from_iterable(level))  # type: ignore[arg-type] # all are lists
    assert prod(shape) == len(level)
    return level, tuple(shape)


def _bytes(name: str, element: object) -> bytes:
    if type(element) is str:
        return element.encode()
    if type(element) is dict and type(element.get(BASE64)) is str and len(element) == 1:
        try:
            return b64decode(element[BASE64], validate=True)
        except ValueError as error:
            raise invalid(f"input '{name}': '{BASE64}': expected base64, got {error}") from error
    raise invalid(f"input '{name}': expected a string or {{'{BASE64}': ...}}, got {kind_of(element)}")


def _plain(output: Tensor) -> Array:
    """Return an output in a dtype that JSON has."""
    if output.datatype is DataType.BF16:
        return from_bfloat16(output.array)
    return output.array.astype(np.float32) if output.datatype is DataType.FP16 else output.array


def _values(array: Array) -> list[object]:
    if array.dtype.kind != "O":
        values: list[object] = array.tolist()
        return values
    texts = np.empty(array.shape, object)
    for index, element in np.ndenumerate(array):
        texts[index] = _text(bytes(element))  # type: ignore[call-overload] # BYTES tensors hold bytes
    decoded: list[object] = texts.tolist()
    return decoded


def _text(element: bytes) -> object:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {BASE64: b64encode(element).decode()}


def _shown(value: object) -> str:
    return "an empty one" if value == [] else kind_of(value)
