"""KServe's v1 protocol: rows or columns of plain JSON, turned into tensors by the model's configuration.

`{"instances": [...]}` has a row for each element of the batch: the value of the only input, or an object with a value
for each. `{"inputs": ...}` has columns: the whole tensor of the only input, or an object of tensors. `{"b64": "..."}`
stands for bytes. The answer is `{"predictions": ...}`, rows for rows and columns for columns.

Source: KServe's v1 protocol, "Predict"; for columns and `b64`, TensorFlow Serving's REST API.
"""

from collections.abc import Mapping

import numpy as np

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor, to_bfloat16
from charonia.wire.json_text import Object, dump, kind_of, parse_object
from charonia.wire.plain_values import (
    BASE64,
    CONTENT,
    PlainValues,
    Schema,
    from_base64,
    json_array,
    json_texts,
    plain_output,
    plain_values,
    text_or_base64,
)
from charonia.wire.v2_data import decode_data, flat_and_nesting

ROWS = "instances"
COLUMNS = "inputs"


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
    schemas = plain_values(config) or PlainValues()
    tensors = {}
    for name, value in columns.items():
        if name not in inputs:
            raise invalid(f"model '{config.name}' has no input '{name}'", hint=f"its inputs are {', '.join(inputs)}")
        if value is None and inputs[name].optional:
            continue
        schema = schemas.inputs.get(name, {})
        tensors[name] = _tensor(config, inputs[name], schema, value, is_rows, tensor_bytes_max)
    return InferRequest(config.name, tensors), is_rows


def encode_predictions(response: InferResponse, is_rows: bool, config: ModelConfig | None = None) -> bytes:
    """Return the body for a response; `config` says whether the model is a function, whose values have their own form.

    Raises:
        ServingError: INVALID_ARG when the outputs cannot be divided into rows.
    """
    schemas = plain_values(config) if config is not None else None
    if config is not None and schemas is not None:
        is_one = is_rows and config.max_batch_size == 0
        found = {
            each.name: plain_output(config, schemas.outputs.get(each.name, {}), each, is_list=True)
            for each in response.outputs
        }
        values = {name: [each] if is_one else each for name, each in found.items()}
        literals = False
    else:
        arrays = {each.name: json_array(each) for each in response.outputs}
        values = {name: _values(each) for name, each in arrays.items()}
        literals = any(each.dtype.kind == "f" and not np.isfinite(each).all() for each in arrays.values())
    predictions: object
    if len(values) == 1:
        predictions = next(iter(values.values()))
    elif is_rows:
        counts = {name: len(each) if isinstance(each, list) else 0 for name, each in values.items()}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
            raise invalid(
                f"the outputs of model '{response.model_name}' have no common number of rows: {sizes}",
                hint=f"send columns, '{COLUMNS}', to get them as columns",
            )
        predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    else:
        predictions = values
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


def _tensor(
    config: ModelConfig, given: ModelInput, schema: Schema, value: object, is_rows: bool, bytes_max: int
) -> Tensor:
    datatype = given.data_type
    assert datatype is not None  # of a model that is loaded
    rank = len(given.dims) + (config.max_batch_size > 0)
    if CONTENT in schema:
        rows = value if is_rows and type(value) is list else [value]
        value = [json_texts(schema[CONTENT], row, has_batch=False)[0][0] for row in rows]
    elif datatype is DataType.BYTES:
        value = from_base64(given.name, value)
    flat, shape = flat_and_nesting(given.name, datatype, value)
    if is_rows and len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]  # the model has no batches: the row is the whole tensor
    shape += (1,) * (rank - len(shape))  # a number for an input of one element
    if datatype not in (DataType.FP16, DataType.BF16):
        return decode_data(given.name, datatype, shape, flat, bytes_max)
    wide = decode_data(given.name, DataType.FP32, shape, flat, bytes_max).array
    if datatype is DataType.FP16:
        with np.errstate(over="ignore"):  # to infinity, as with other datatypes
            return Tensor(given.name, datatype, wide.astype(np.float16))
    return Tensor(given.name, datatype, to_bfloat16(wide))


def _values(array: Array) -> list[object]:
    if array.dtype.kind != "O":
        values: list[object] = array.tolist()
        return values
    texts = np.empty(array.size, object)
    texts[:] = [text_or_base64(bytes(element)) for element in array.ravel().tolist()]
    decoded: list[object] = texts.reshape(array.shape).tolist()
    return decoded


def _shown(value: object) -> str:
    return "an empty one" if value == [] else kind_of(value)
