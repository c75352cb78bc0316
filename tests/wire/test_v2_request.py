from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import SEQUENCE_END, SEQUENCE_START
from charonia.wire import v2_request
from charonia.wire.v2_request import HttpInferCall, InferDecoder, apply_parameters, raw_call, raw_tensor

X: dict[str, Any] = {"name": "x", "shape": [2], "datatype": "INT8", "data": [1, 2]}
BINARY_X: dict[str, Any] = {"name": "x", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}


def decode(document: object, tail: bytes | None = None) -> HttpInferCall:
    text = orjson.dumps(document)
    return InferDecoder(1024).decode("m", "", text + (tail or b""), None if tail is None else len(text))


def refusal(document: object, tail: bytes | None = None) -> ServingError:
    with pytest.raises(ServingError) as caught:
        decode(document, tail)
    return caught.value


def test_a_json_request_has_everything_it_says() -> None:
    call = InferDecoder(1024).decode("m", "3", orjson.dumps({"id": "7", "inputs": [X]}))

    assert (call.request.model_name, call.request.model_version, call.request.id) == ("m", "3", "7")
    assert call.request.inputs["x"].array.tolist() == [1, 2]
    assert call.request.outputs == ()
    assert not call.binary


def test_binary_inputs_follow_the_json_in_their_order() -> None:
    y = {**BINARY_X, "name": "y", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}

    call = decode({"inputs": [y, X | {"name": "z"}, BINARY_X]}, b"\x01\x00\x00\x00ab\x03")

    assert list(call.request.inputs) == ["y", "z", "x"]
    assert call.request.inputs["y"].array.tolist() == [b"a"]
    assert call.request.inputs["x"].array.tolist() == [98, 3]


def test_a_large_body_is_not_copied() -> None:
    text = orjson.dumps({"inputs": [BINARY_X]})
    body = bytearray(text + b"\x01\x02")

    call = InferDecoder(1024).decode("m", "", memoryview(body), len(text))
    body[-1] = 9

    assert call.request.inputs["x"].array.tolist() == [1, 9]


def test_parameters_with_a_meaning_have_a_field() -> None:
    parameters = {
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 1000,
        "binary_data_output": True,
        "top_k": 3,
        "note": "a",
    }

    call = decode({"inputs": [X], "parameters": parameters})

    assert call.binary
    request = call.request
    assert (request.correlation_id, request.flags) == (5, SEQUENCE_START | SEQUENCE_END)
    assert (request.priority, request.timeout_us) == (2, 1000)
    assert request.parameters == {"top_k": 3, "note": "a"}


def test_a_sequence_can_have_a_name_and_be_in_its_middle() -> None:
    call = decode({"inputs": [X], "parameters": {"sequence_id": "s", "sequence_start": False}})

    assert (call.request.correlation_id, call.request.flags) == ("s", 0)


def test_outputs_say_in_which_form_they_are_wanted() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True, "classification": 3}}, {"name": "b"}]

    call = decode({"inputs": [], "outputs": outputs})

    assert [(o.name, o.classification) for o in call.request.outputs] == [("a", 3), ("b", 0)]
    assert call.forms == {"a": True}


def test_binary_data_output_is_for_requests_that_name_no_outputs() -> None:
    for_all = {"inputs": [], "parameters": {"binary_data_output": True}}

    assert decode(for_all).binary
    assert decode({**for_all, "outputs": []}).binary
    assert not decode({**for_all, "outputs": [{"name": "a"}]}).binary


def test_a_request_that_says_the_same_again_is_decoded_the_same() -> None:
    decoder = InferDecoder(1024)
    text = orjson.dumps({"inputs": [BINARY_X], "parameters": {"top_k": 1, "priority": 2}})

    first = decoder.decode("m", "", text + b"\x01\x02", len(text)).request
    first.parameters["top_k"] = 9
    second = decoder.decode("n", "1", text + b"\x03\x04", len(text)).request

    assert second.model_name == "n"
    assert second.inputs["x"].array.tolist() == [3, 4]
    assert (second.parameters, second.priority) == ({"top_k": 1}, 2)


def test_what_a_decoder_remembers_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2_request, "CACHED_MAX", 2)
    monkeypatch.setattr(v2_request, "CACHED_BYTES_MAX", 120)
    decoder = InferDecoder(1024)

    for name in ("a", "b", "c", "d", "e" * 100):
        text = orjson.dumps({"inputs": [BINARY_X | {"name": name}]})
        decoder.decode("m", "", text + b"\x01\x02", len(text))
    decoder.decode("m", "", orjson.dumps({"inputs": [X]}))

    assert len(decoder._heads) == 2


@pytest.mark.parametrize(
    ("document", "fragment"),
    [
        ({}, "Unable to parse 'inputs' for model 'm': expected an array, got nothing"),
        ({"inputs": {}}, "expected an array, got an object"),
        ({"inputs": [1]}, "expected objects, got a number"),
        ({"inputs": [X], "id": 1}, "Unable to parse 'id': expected a string, got a number"),
        ({"inputs": [X], "parameters": []}, "the request: 'parameters' must be an object, got an array"),
        ({"inputs": [X], "parameters": {"triton_x": 1}}, "keys starting with 'triton_' are reserved"),
        ({"inputs": [X], "parameters": {"a": [1]}}, "parameter 'a' has invalid type"),
        ({"inputs": [X], "parameters": {"priority": -1}}, "parameter 'priority': expected a non-negative integer"),
        ({"inputs": [X], "parameters": {"timeout": "1"}}, "parameter 'timeout': expected a non-negative integer"),
        ({"inputs": [X], "parameters": {"sequence_id": 1.5}}, "parameter 'sequence_id'"),
        ({"inputs": [X], "parameters": {"sequence_end": 1}}, "parameter 'sequence_end': expected a boolean"),
        ({"inputs": [X, X]}, "input 'x' already exists in request"),
        ({"inputs": [{**X, "name": None}]}, "Unable to parse 'name': expected a string, got nothing"),
        ({"inputs": [{**X, "shape": 2}]}, "input 'x': 'shape' must be an array of integers, got a number"),
        ({"inputs": [{**X, "shape": [-1]}]}, "a dimension in 'shape' must be a non-negative integer, got -1"),
        ({"inputs": [{**X, "shape": [True]}]}, "a dimension in 'shape' must be a non-negative integer, got True"),
        ({"inputs": [{**X, "datatype": "FP8"}]}, "input 'x': datatype 'FP8' is none of BOOL, UINT8"),
        ({"inputs": [{**X, "parameters": 1}]}, "input 'x': 'parameters' must be an object, got a number"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": 2}}]}, "Input must set only one of the following fields"),
        ({"inputs": [{**X, "data": None}]}, "Input must set only one of the following fields"),
        ({"inputs": [{**BINARY_X, "parameters": {"binary_data_size": -1}}]}, "must be a non-negative integer"),
        ({"inputs": [BINARY_X]}, "unexpected size for input 'x', expecting 2 additional bytes for model 'm'"),
        ({"inputs": [X], "outputs": {}}, "Unable to parse 'outputs' for model 'm': expected an array, got an object"),
        ({"inputs": [X], "outputs": ["y"]}, "expected objects, got a string"),
        ({"inputs": [X], "outputs": [{"name": "y"}, {"name": "y"}]}, "output 'y' already exists in request"),
        ({"inputs": [X], "outputs": [{"name": "y", "parameters": 1}]}, "output 'y': 'parameters' must be an object"),
        ({"inputs": [X], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "parameter 'binary_data'"),
        ({"inputs": [X], "outputs": [{"name": "y", "parameters": {"classification": -1}}]}, "'classification'"),
        (
            {
                "inputs": [X],
                "outputs": [{"name": "y", "parameters": {"classification": 1, "shared_memory_region": "r"}}],
            },
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {
                "inputs": [X],
                "outputs": [{"name": "y", "parameters": {"binary_data": True, "shared_memory_region": "r"}}],
            },
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_a_request_that_breaks_the_protocol_is_refused(document: object, fragment: str) -> None:
    error = refusal(document)

    assert error.code is Code.INVALID_ARG
    assert fragment in error.message


def test_a_parameter_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ServingError, match="does not fit 64 bits"):
        InferDecoder(1024).decode("m", "", b'{"inputs": [], "parameters": {"a": 1%s, "b": NaN}}' % (b"0" * 30))


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [{**X, "data": None, "parameters": {"shared_memory_region": "r"}}]},
        {"inputs": [X], "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
    ],
)
def test_shared_memory_is_refused(document: object) -> None:
    error = refusal(document)

    assert error.code is Code.UNSUPPORTED
    assert "Client shared memory is disabled" in error.message


@pytest.mark.parametrize(
    ("tail", "fragment"),
    [
        (b"1", "unexpected size for input 'x', expecting 1 additional bytes for model 'm'"),
        (b"123", "unexpected additional input data for model 'm': 1 bytes are left over"),
    ],
)
def test_bytes_after_the_json_must_be_those_announced(tail: bytes, fragment: str) -> None:
    assert fragment in refusal({"inputs": [BINARY_X]}, tail).message


@pytest.mark.parametrize("json_size", [0, 3, 99])
def test_the_json_must_end_within_the_body(json_size: int) -> None:
    with pytest.raises(ServingError):
        InferDecoder(1024).decode("m", "", b'{"inputs": []}', json_size)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["id", "inputs", "outputs", "parameters"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["x", "INT8", "BYTES"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), inner)
            ),
            max_leaves=20,
        ),
    ),
    st.binary(max_size=8) | st.none(),
)
def test_any_document_is_decoded_or_refused(document: dict[str, object], tail: bytes | None) -> None:
    refused: ServingError | None = None
    taken = 0
    try:
        taken = len(decode(document, tail).request.inputs)
    except ServingError as error:
        refused = error

    if refused is None:
        assert taken == len(cast(list[object], document["inputs"]))
    else:
        assert refused.code is Code.INVALID_ARG
        assert refused.message


@pytest.mark.parametrize(
    ("datatype", "dims", "batched", "body", "shape"),
    [
        (DataType.INT8, (4,), True, b"1234", (1, 4)),
        (DataType.FP32, (-1, 2), False, b"\0" * 24, (3, 2)),
        (DataType.BYTES, (1,), True, b"text", (1, 1)),
        (DataType.BYTES, (-1,), False, b"text", (1,)),
    ],
)
def test_the_shape_of_a_raw_request_follows_from_its_size(
    datatype: DataType, dims: tuple[int, ...], batched: bool, body: bytes, shape: tuple[int, ...]
) -> None:
    call = raw_call("m", "1", raw_tensor("x", datatype, dims, batched, body))

    assert call.binary
    assert call.request.inputs["x"].shape == shape


def test_a_raw_string_needs_no_length() -> None:
    assert raw_tensor("x", DataType.BYTES, (1,), False, b"\x05abc").array.tolist() == [b"\x05abc"]


@pytest.mark.parametrize(
    ("datatype", "dims", "fragment"),
    [
        (DataType.BYTES, (2,), "must have input shape"),
        (DataType.FP32, (-1, -1), "more than one variable-sized dimension"),
        (DataType.FP32, (-1, 2), "input byte size mismatch for input 'x'"),
        (DataType.FP32, (-1, 0), "input byte size mismatch for input 'x'"),
        (DataType.FP32, (2,), "input byte size mismatch for input 'x'"),
    ],
)
def test_a_raw_request_without_a_fitting_shape_is_refused(
    datatype: DataType, dims: tuple[int, ...], fragment: str
) -> None:
    with pytest.raises(ServingError, match=fragment):
        raw_tensor("x", datatype, dims, True, b"\0" * 12 + b"1")


def test_what_is_sent_as_json_and_in_binary_form_is_the_same() -> None:
    values = np.array([0.5, -1.25], "<f4")
    json_input = {"name": "x", "shape": [2], "datatype": "FP32", "data": values.tolist()}
    binary_input = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}

    from_json = decode({"inputs": [json_input]}).request.inputs["x"]
    from_bytes = decode({"inputs": [binary_input]}, values.tobytes()).request.inputs["x"]

    assert from_json.array.tolist() == from_bytes.array.tolist()
    assert from_json.array.dtype == from_bytes.array.dtype


def test_parameters_can_be_applied_without_a_body() -> None:
    request = InferDecoder(1024).decode("m", "", b'{"inputs": []}').request

    apply_parameters(request, {"priority": 3, "sequence_end": True, "note": "a"})

    assert (request.priority, request.flags, request.parameters) == (3, SEQUENCE_END, {"note": "a"})
