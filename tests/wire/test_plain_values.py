"""Values of functions as plain JSON, over `generate` and KServe's v1 protocol."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.example_request import ExampleRequest
from charonia.wire.v1_predict import decode_predict, encode_predictions
from charonia.wire.v2_generate import StreamedText, decode_generate, encode_generated, raw_answer

JSON_OBJECT = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}
JSON_ARRAY = {**JSON_OBJECT, "contentSchema": {"type": "array", "items": {}}}
JSON_ANY = {**JSON_OBJECT, "contentSchema": {}}
NUMBERS = {"type": "array", "items": {"type": "number"}}
INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
DATATYPES = {"integer": DataType.INT64, "string": DataType.BYTES, "array": DataType.FP64}


def function(batch: int = 0, *, inputs: dict[str, Any], outputs: dict[str, Any] | None = None) -> ModelConfig:
    """Return the configuration of a function with these schemas; an array is one of FP64, of one dimension."""

    def tensor(kind: Any, name: str, schema: dict[str, Any]) -> Any:
        is_array = schema["type"] == "array"
        return kind(name, DATATYPES[schema["type"]], dims=(-1,) if is_array else (1,))

    outputs = outputs or {}
    return ModelConfig(
        "f",
        max_batch_size=batch,
        input=tuple(tensor(ModelInput, *each) for each in inputs.items()),
        output=tuple(tensor(ModelOutput, *each) for each in outputs.items()),
        parameters={JSON_SCHEMA: json.dumps({"inputs": inputs, "outputs": outputs})},
    )


def taken(config: ModelConfig, **document: Any) -> dict[str, Any]:
    request = decode_generate(config, "", json.dumps(document).encode(), 1 << 20).request
    return {name: tensor.array.tolist() for name, tensor in request.inputs.items()}


def answer(config: ModelConfig, document: dict[str, Any], array: Any, datatype: DataType = DataType.BYTES) -> Any:
    """Return what JSON has for the only output."""
    call = decode_generate(config, "", json.dumps(document).encode(), 1 << 20)
    dtype = object if datatype is DataType.BYTES else datatype.numpy
    response = InferResponse("f", "1", "", [Tensor("y", datatype, np.array(array, dtype))])
    return json.loads(encode_generated(response, call))["y"]


@pytest.mark.parametrize(
    ("schema", "value", "text"),
    [
        (JSON_OBJECT, {"a": [1, {"b": None}]}, '{"a":[1,{"b":null}]}'),
        (JSON_OBJECT, '{"a": 1}', '{"a": 1}'),  # a client of tensors sends the text itself
        (JSON_OBJECT, {"b64": "AAEC"}, '{"b64":"AAEC"}'),
        (JSON_ARRAY, [{"a": 1}], '[{"a":1}]'),
        (JSON_ARRAY, [], "[]"),
        (JSON_ANY, None, "null"),
        (JSON_ANY, "a", '"a"'),
        (JSON_ANY, 3, "3"),
    ],
)
def test_a_value_takes_the_place_of_its_json_text(schema: dict[str, Any], value: Any, text: str) -> None:
    assert taken(function(inputs={"x": schema}), x=value) == {"x": [text.encode()]}
    assert taken(function(4, inputs={"x": schema}), x=value) == {"x": [[text.encode()]]}


def test_a_batch_takes_a_list_of_values() -> None:
    assert taken(function(4, inputs={"x": JSON_OBJECT}), x=[{"a": 1}, {}]) == {"x": [[b'{"a":1}'], [b"{}"]]}
    assert taken(function(4, inputs={"x": JSON_ARRAY}), x=[[1], [2, 3]]) == {"x": [[b"[1]"], [b"[2,3]"]]}
    assert taken(function(4, inputs={"x": NUMBERS}), x=[[1, 2], [3, 4]]) == {"x": [[1, 2], [3, 4]]}
    assert taken(function(4, inputs={"x": NUMBERS}), x=[1, 2]) == {"x": [[1, 2]]}
    assert taken(function(4, inputs={"x": INTEGER}), x=[1, 2]) == {"x": [[1], [2]]}


def test_whole_numbers_are_integers_and_null_is_no_value() -> None:
    config = ModelConfig(
        "f",
        input=(ModelInput("n", DataType.INT64, dims=(1,)), ModelInput("o", DataType.FP32, dims=(1,), optional=True)),
    )

    assert taken(config, n=3.0, o=None) == {"n": [3]}
    with pytest.raises(ServingError, match=r"expected an integer from .*, got 3\.5"):
        taken(config, n=3.5)
    with pytest.raises(ServingError, match="expected an integer"):
        taken(config, n=None)


def test_base64_stands_for_bytes() -> None:
    config = ModelConfig("f", max_batch_size=4, input=(ModelInput("x", DataType.BYTES, dims=(1,)),))

    assert taken(config, x={"b64": "AP8="}) == {"x": [[b"\0\xff"]]}
    assert taken(config, x=[{"b64": "AP8="}, "a"]) == {"x": [[b"\0\xff"], [b"a"]]}
    assert taken(config, x={"b64": "AP8=", "other": 1}) == {"x": [[b'{"b64":"AP8=","other":1}']]}
    with pytest.raises(ServingError, match="input 'x': 'b64': expected base64"):
        taken(config, x={"b64": "?"})


@pytest.mark.parametrize(("batch", "shape"), [(0, (0, 3)), (4, (1, 0, 3))])
def test_an_empty_list_is_one_of_any_depth(batch: int, shape: tuple[int, ...]) -> None:
    schema = {"type": "array", "items": {"type": "array"}}
    config = replace(function(batch, inputs={"x": schema}), input=(ModelInput("x", DataType.FP64, dims=(-1, 3)),))

    call = decode_generate(config, "", b'{"x": []}', 1 << 20)

    assert call.request.inputs["x"].shape == shape


def test_a_list_has_the_depth_of_its_annotation() -> None:
    with pytest.raises(ServingError, match=r"input 'x': expected an array of shape \[-1\], got \[\]"):
        taken(function(inputs={"x": NUMBERS}), x=1)


@pytest.mark.parametrize(
    ("schema", "datatype", "array", "value"),
    [
        (JSON_OBJECT, DataType.BYTES, [b'{"a":[1]}'], {"a": [1]}),
        (JSON_ANY, DataType.BYTES, [b"null"], None),
        (INTEGER, DataType.INT64, [3], 3),
        (NUMBERS, DataType.FP64, [1.5], [1.5]),
        (NUMBERS, DataType.FP64, [], []),
        (NUMBERS, DataType.FP64, [np.nan, np.inf], [None, None]),
        (NUMBERS, DataType.FP32, [0.1], [0.1]),
        (NUMBERS, DataType.FP16, [0.5], [0.5]),
        ({"type": "array", "items": NUMBERS}, DataType.FP64, [[1], [2]], [[1], [2]]),
        (TEXT, DataType.BYTES, [b"a"], "a"),
        (TEXT, DataType.BYTES, [b"\xff"], {"b64": "/w=="}),
        ({"type": "array", "items": TEXT}, DataType.BYTES, [b"a"], ["a"]),
    ],
)
def test_an_output_is_the_value_that_the_function_returned(
    schema: dict[str, Any], datatype: DataType, array: Any, value: Any
) -> None:
    config = function(inputs={"x": INTEGER}, outputs={"y": schema})

    assert answer(config, {"x": 1}, array, datatype) == value


def test_a_list_is_answered_with_a_list() -> None:
    config = function(4, inputs={"x": INTEGER}, outputs={"y": NUMBERS})

    assert answer(config, {"x": 1}, [[1, 2]], DataType.FP64) == [1, 2]
    assert answer(config, {"x": [1]}, [[1, 2]], DataType.FP64) == [[1, 2]]
    assert answer(config, {"x": [1, 2]}, [[1], [2]], DataType.FP64) == [[1], [2]]
    assert answer(function(4, inputs={"x": NUMBERS}, outputs={"y": INTEGER}), {"x": [[1]]}, [[5]], DataType.INT64) == [
        5
    ]


def test_events_of_a_stream_have_values_too() -> None:
    config = function(inputs={"x": INTEGER}, outputs={"y": JSON_OBJECT})
    stream = StreamedText(decode_generate(config, "", b'{"x": 1}', 1 << 20))
    response = InferResponse("f", "1", "", [Tensor("y", DataType.BYTES, np.array([b'{"i":0}'], object))])

    assert json.loads(stream.encode(response))["y"] == {"i": 0}


def test_a_schema_that_is_none_is_ignored() -> None:
    config = ModelConfig("f", input=(ModelInput("x", DataType.BYTES, dims=(1,)),), parameters={JSON_SCHEMA: "{"})

    assert taken(config, x={"a": 1}) == {"x": [b'{"a":1}']}


def test_rows_of_v1_are_values() -> None:
    config = function(4, inputs={"x": JSON_OBJECT}, outputs={"y": JSON_OBJECT})
    request, is_rows = decode_predict(config, b'{"instances": [{"x": {"a": 1}}, {"x": {}}]}', 1 << 20)
    outputs = [Tensor("y", DataType.BYTES, np.array([[b'{"a":1}'], [b"null"]], object))]

    assert request.inputs["x"].array.tolist() == [[b'{"a":1}'], [b"{}"]]
    body = encode_predictions(InferResponse("f", "1", "", outputs), is_rows, config)
    assert json.loads(body) == {"predictions": [{"a": 1}, None]}


def test_a_function_without_batches_has_one_row() -> None:
    config = function(inputs={"x": INTEGER}, outputs={"y": NUMBERS, "z": JSON_OBJECT})
    request, is_rows = decode_predict(config, b'{"instances": [3.0]}', 1 << 20)
    outputs = [
        Tensor("y", DataType.FP64, np.array([1.0, np.nan])),
        Tensor("z", DataType.BYTES, np.array([b"{}"], object)),
    ]

    assert request.inputs["x"].array.tolist() == [3]
    body = encode_predictions(InferResponse("f", "1", "", outputs), is_rows, config)
    assert json.loads(body) == {"predictions": [{"y": [1.0, None], "z": {}}]}


def test_a_request_that_is_shown_has_values() -> None:
    config = function(4, inputs={"x": JSON_OBJECT, "n": NUMBERS, "t": TEXT})
    call = decode_generate(config, "", b'{"x": {"a": 1}, "n": [1.5], "t": "a"}', 1 << 20)
    shown = ExampleRequest(config, call.request.inputs)

    assert shown.generate_body() == {"x": {"a": 1}, "n": [1.5], "t": "a"}


def own_body(accept: bytes = b"", content: bytes = b"<svg/>", **parameters: Any) -> Any:
    """Return the body that a function chose, as status, body, type and further header fields."""
    config = function(inputs={"x": INTEGER}, outputs={"y": TEXT})
    call = decode_generate(config, "", b'{"x": 1}', 1 << 20)
    found = [Tensor("y", DataType.BYTES, np.array([content], object))]
    return raw_answer(InferResponse("f", "1", "", found, parameters), call, accept)


def test_a_function_chooses_type_status_and_header_fields() -> None:
    headers = json.dumps({"X-A": "1", "X-B": "é"})

    assert own_body() is None
    assert own_body(http_content_type="image/svg+xml") == (200, b"<svg/>", b"image/svg+xml", b"")
    assert [own_body(http_content_type="a/b", http_status=status)[0] for status in (200, 599)] == [200, 599]
    assert own_body(http_content_type="a/b", http_status=404, http_headers=headers) == (
        404,
        b"<svg/>",
        b"a/b",
        "X-A: 1\r\nX-B: é\r\n".encode("latin-1"),
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"http_content_type": "a\r\nb"},
        {"http_headers": '{"X": "a\\nY: b"}'},
        {"http_headers": '{"X Y": "a"}'},
        {"http_headers": '{"Content-Length": "1"}'},
        {"http_status": 199},
        {"http_status": 600},
        {"http_status": "200"},
    ],
)
def test_what_http_cannot_carry_is_the_functions_error(parameters: dict[str, Any]) -> None:
    with pytest.raises(ServingError) as caught:
        own_body(**({"http_content_type": "a/b"} | parameters))
    assert caught.value.code is Code.INTERNAL


def test_a_picture_is_a_file_if_the_client_accepts_it() -> None:
    data = b"data:image/png;base64,iVBORw=="

    assert own_body(b"image/png", data) == own_body(b"text/html, image/*", data) == (200, b"\x89PNG", b"image/png", b"")
    assert own_body(b"image/jpeg", data) is own_body(b"", data) is own_body(b"image/png", b"text") is None
