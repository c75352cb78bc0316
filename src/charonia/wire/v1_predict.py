"""KServe's v1 protocol: rows or columns of plain JSON, turned into tensors by the model's configuration.

`{"instances": [...]}` has a row for each element of the batch: the value of the only input, or an object with a value
for each. `{"inputs": ...}` has columns: the whole tensor of the only input, or an object of tensors. `{"b64": "..."}`
stands for bytes. `tables` has other forms. The answer is `{"predictions": ...}`, rows for rows and columns for
columns.

Source: KServe's v1 protocol, "Predict"; for columns and `b64`, TensorFlow Serving's REST API.
"""

import numpy as np

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor, to_bfloat16
from charonia.wire.json_text import dump, parse_object
from charonia.wire.plain_values import (
    CONTENT,
    PlainValues,
    Schema,
    from_base64,
    json_array,
    json_texts,
    plain_output,
    plain_values,
    text_or_base64,
    with_missing,
)
from charonia.wire.tables import CSV, INPUTS, INSTANCES, KEYS, RECORDS, csv_columns, inputs_of, plain_inputs
from charonia.wire.v2_data import decode_data, flat_and_nesting, has_literals


def decode_predict(
    config: ModelConfig, body: bytes | memoryview, tensor_bytes_max: int, content_type: bytes = b""
) -> tuple[InferRequest, bool]:
    """Return the request in a body, and whether it has rows.

    Args:
        config: The model's configuration.
        body: A JSON object, or a table in CSV.
        tensor_bytes_max: Largest size of a tensor in bytes.
        content_type: The header field, b"" for none.

    Raises:
        ServingError: INVALID_ARG, with the problem.
    """
    inputs = {each.name: each for each in config.input}
    is_rows = True
    if content_type.partition(b";")[0].strip().lower() == CSV:
        columns = plain_inputs(config, csv_columns(config, bytes(body)))
    else:
        document = parse_object(body, array_as=RECORDS)
        keys = [key for key in KEYS if key in document]
        if len(keys) != 1:
            given = f"both '{keys[0]}' and '{keys[1]}'" if keys else ", ".join(document) or "an empty object"
            raise invalid(f"expected either '{INSTANCES}' (rows) or '{INPUTS}' (columns), got {given}")
        is_rows = keys[0] != INPUTS
        columns = inputs_of(config, keys[0], document[keys[0]])
    schemas = plain_values(config) or PlainValues()
    tensors = {}
    for name, value in columns.items():
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
        literals = any(map(has_literals, arrays.values()))
    predictions: object
    if len(values) == 1:
        predictions = next(iter(values.values()))
    elif is_rows:
        counts = {name: len(each) if isinstance(each, list) else 0 for name, each in values.items()}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
            raise invalid(
                f"the outputs of model '{response.model_name}' have no common number of rows: {sizes}",
                hint=f"send columns, '{INPUTS}', to get them as columns",
            )
        predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    else:
        predictions = values
    return dump({"predictions": predictions}, literals=literals)


def _tensor(
    config: ModelConfig, model_input: ModelInput, schema: Schema, value: object, is_rows: bool, bytes_max: int
) -> Tensor:
    datatype = model_input.data_type
    assert datatype is not None  # of a model that is loaded
    rank = len(model_input.dims) + (config.max_batch_size > 0)
    value = with_missing(schema, datatype, value)
    if CONTENT in schema:
        rows = value if is_rows and type(value) is list else [value]
        value = [json_texts(schema[CONTENT], row, has_batch=False)[0][0] for row in rows]
    elif datatype is DataType.BYTES:
        value = from_base64(model_input.name, value)
    flat, shape = flat_and_nesting(model_input.name, datatype, value)
    if is_rows and len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]  # the model has no batches: the row is the whole tensor
    shape += (1,) * (rank - len(shape))  # a number for an input of one element
    if datatype not in (DataType.FP16, DataType.BF16):
        return decode_data(model_input.name, datatype, shape, flat, bytes_max)
    wide = decode_data(model_input.name, DataType.FP32, shape, flat, bytes_max).array
    if datatype is DataType.FP16:
        with np.errstate(over="ignore"):  # to infinity, as with other datatypes
            return Tensor(model_input.name, datatype, wide.astype(np.float16))
    return Tensor(model_input.name, datatype, to_bfloat16(wide))


def _values(array: Array) -> list[object]:
    if array.dtype.kind != "O":
        values: list[object] = array.tolist()
        return values
    texts = np.empty(array.size, object)
    texts[:] = [text_or_base64(bytes(element)) for element in array.ravel().tolist()]
    decoded: list[object] = texts.reshape(array.shape).tolist()
    return decoded
