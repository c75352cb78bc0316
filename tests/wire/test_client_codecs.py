"""What cannot be encoded is refused; what other servers send is decoded."""

import json
from typing import Any

import numpy as np
import pytest
from tests.support.client_servers import identity_request

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.schema.pool import message_class
from charonia.wire import http_codec
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_codec import GrpcEncoder, decode_response, timeout_header
from charonia.wire.http_codec import HttpEncoder, error_message
from charonia.wire.transport import RequestForm, WireOptions

ENDPOINT = parse_url("localhost:1")


@pytest.mark.parametrize(
    ("datatype", "field", "elements"),
    [
        ("FP32", "fp32_contents", [1.5, 2.5]),
        ("INT8", "int_contents", [-1, 2]),
        ("UINT64", "uint64_contents", [2**64 - 1, 0]),
        ("BOOL", "bool_contents", [True, False]),
        ("BYTES", "bytes_contents", [b"a", b"\x00"]),
    ],
)
def test_outputs_in_typed_contents_are_read(datatype: str, field: str, elements: list[Any]) -> None:
    message: Any = message_class("inference.ModelInferResponse")(model_name="m")
    output = message.outputs.add(name="X", datatype=datatype, shape=[1, 2])
    getattr(output.contents, field).extend(elements)

    tensor = decode_response(message.SerializeToString()).outputs[0]

    assert tensor.datatype.wire == datatype
    assert tensor.array.dtype == tensor.datatype.numpy
    assert tensor.array.tolist() == [elements]


OUTPUT = {"name": "y", "datatype": "INT8", "shape": [1]}


@pytest.mark.parametrize(
    ("document", "more", "json_bytes", "message"),
    [
        ({}, b"", 3, "it ends within its JSON: expected 3 bytes, got 2"),
        ({}, b"x", 2, "1 bytes are left over"),
        ({"outputs": 5}, b"", -1, "'outputs' is not an array"),
        ({"outputs": [5]}, b"", -1, ""),
        ({"parameters": []}, b"", -1, "'parameters' is not an object"),
        ({"outputs": [OUTPUT | {"shape": [-1]}]}, b"", -1, "output 'y': [-1] is not a shape"),
        ({"outputs": [OUTPUT | {"shape": [1.0]}]}, b"", -1, "output 'y': [1.0] is not a shape"),
        ({"outputs": [OUTPUT | {"datatype": "INT9"}]}, b"", -1, "'INT9'"),
        ({"outputs": [OUTPUT | {"parameters": {"binary_data_size": -1}}]}, b"", -1, "output 'y' ends too early: -1"),
        ({"outputs": [OUTPUT | {"parameters": {"binary_data_size": 1}}]}, b"", -1, "output 'y' ends too early: 1"),
    ],
)
def test_a_body_that_is_no_response_says_why(
    document: dict[str, Any], more: bytes, json_bytes: int, message: str
) -> None:
    with pytest.raises(ServingError) as caught:
        http_codec.decode_response(json.dumps(document).encode() + more, json_bytes)

    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith(f"the server's response is not an inference response: {message}")


def test_raw_outputs_must_be_as_many_as_outputs() -> None:
    message: Any = message_class("inference.ModelInferResponse")(model_name="m", raw_output_contents=[b"x"])

    with pytest.raises(ServingError, match="1 raw outputs, 0 expected"):
        decode_response(message.SerializeToString())


def test_json_cannot_carry_fp16_and_grpc_cannot_carry_json() -> None:
    half = InferRequest("m", {"X": Tensor("X", DataType.FP16, np.zeros(2, np.float16))})

    with pytest.raises(ServingError, match="FP16 data via JSON is not supported"):
        HttpEncoder(ENDPOINT, WireOptions()).infer(half, RequestForm(json_inputs=True))
    with pytest.raises(ServingError, match="as JSON over gRPC") as caught:
        GrpcEncoder(ENDPOINT, WireOptions()).infer(identity_request(), RequestForm(json_outputs=True))
    assert caught.value.code is Code.UNSUPPORTED


def test_numbers_that_are_not_finite_are_sent_as_json() -> None:
    request = InferRequest("m", {"X": Tensor("X", DataType.FP32, np.array([np.nan, np.inf, 1], np.float32))})

    (sent,) = HttpEncoder(ENDPOINT, WireOptions()).infer(request, RequestForm(json_inputs=True)).pieces

    assert b'"data":[NaN,Infinity,1.0]' in bytes(sent)


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "x"), ("a b", "x"), ("a:", "x"), ("Host", "x"), ("Content-Length", "5"), ("a", "x\r\ny: z"), ("a", "ā")],
)
def test_a_header_that_is_none_is_refused(name: str, value: str) -> None:
    for encoder in (HttpEncoder, GrpcEncoder):
        with pytest.raises(ServingError, match=f"(header|metadata) '{name}'"):
            encoder(ENDPOINT, WireOptions(headers=((name, value),)))


def test_a_compression_that_is_not_known_is_refused() -> None:
    for encoder in (HttpEncoder, GrpcEncoder):
        with pytest.raises(ServingError, match="compression 'br': expected 'gzip', 'deflate' or ''"):
            encoder(ENDPOINT, WireOptions(request_compression="br"))


def test_a_parameter_that_grpc_cannot_carry_is_refused() -> None:
    with pytest.raises(ServingError, match="parameter 'x': expected a boolean, an integer of 64 bits"):
        GrpcEncoder(ENDPOINT, WireOptions()).infer(identity_request(parameters={"x": 2**70}), RequestForm())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"no"}', "no"),
        (b'{"error":5}', "HTTP status 502"),
        (b"[]", "HTTP status 502"),
        (b"Bad \xff gateway\n", "HTTP status 502: Bad \ufffd gateway"),
        (b"", "HTTP status 502"),
        (400 * b"a" + b"b", "HTTP status 502: " + 400 * "a"),
        (b'data: {"error":{"message":"no"}}', "no"),
    ],
)
def test_an_error_with_any_body_has_a_message(body: bytes, message: str) -> None:
    assert error_message(body, 502) == message


@pytest.mark.parametrize(
    ("timeout_s", "value"), [(1e-9, b"1u"), (0.5, b"500000u"), (99.999999, b"99999999u"), (100, b"100S")]
)
def test_a_timeout_has_at_most_eight_digits(timeout_s: float, value: bytes) -> None:
    assert timeout_header(timeout_s) == (b"grpc-timeout", value)


def test_a_model_name_is_quoted_in_the_path() -> None:
    (sent,) = HttpEncoder(ENDPOINT, WireOptions()).infer(InferRequest("a/b ü", {}), RequestForm()).pieces

    assert bytes(sent).startswith(b"POST /v2/models/a%2Fb%20%C3%BC/infer HTTP/1.1\r\n")


@pytest.mark.parametrize(("size", "data"), [(0, b""), (8, b"\x01\0\0\0\x02\0\0\0")])
def test_binary_outputs_are_read_the_empty_ones_too(size: int, data: bytes) -> None:
    output = {"name": "y", "datatype": "INT32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"model_name": "m", "model_version": "1", "outputs": [output]}).encode()

    response = http_codec.decode_response(head + data, len(head))

    assert response.outputs[0].array.tolist() == [1, 2][: size // 4]
