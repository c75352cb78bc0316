"""The generate extension's JSON, in and out."""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import SEQUENCE_START, InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.v2_generate import StreamedText, decode_generate, encode_generated, infer_shape

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(
        ModelInput("TEXT", DataType.BYTES, dims=(1,)),
        ModelInput("NUM", DataType.FP32, dims=(-1,)),
        ModelInput("GRID", DataType.INT64, dims=(2, -1, -1)),
        ModelInput("HALF", DataType.FP16, dims=(1,)),
    ),
)


def decoded(document: object, config: ModelConfig = CONFIG, bytes_max: int = 1 << 20) -> InferRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate(config, "1", text, bytes_max).request


def test_a_key_that_no_parameter_can_have_is_refused_where_no_input_is_missing() -> None:
    with pytest.raises(ServingError) as caught:
        decoded({"TEXT": "a", "other": [1, 2]}, ModelConfig(name="m", input=CONFIG.input[:1]))

    assert caught.value.message.endswith("'other' has invalid type. Expected a string, number or boolean, got an array")


def refusal(document: object, bytes_max: int = 1 << 20) -> str:
    with pytest.raises(ServingError) as caught:
        decoded(document, bytes_max=bytes_max)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_keys_that_name_inputs_are_tensors_and_the_others_parameters() -> None:
    request = decoded({"id": "7", "TEXT": "hello", "NUM": [1, 2.5], "stream": True, "max_tokens": 5, "user": "a"})

    assert (request.model_name, request.model_version, request.id) == ("m", "1", "7")
    assert request.inputs["TEXT"].array.tolist() == [[b"hello"]]
    np.testing.assert_array_equal(request.inputs["NUM"].array, np.array([[1, 2.5]], "f4"))
    assert request.parameters == {"stream": True, "max_tokens": 5, "user": "a"}


def test_the_key_parameters_holds_more_keys_under_the_same_rule() -> None:
    request = decoded({"TEXT": "a", "parameters": {"NUM": 4, "seed": 3, "id": "not the request's"}})

    assert request.inputs["NUM"].array.tolist() == [[4.0]]
    assert request.parameters == {"seed": 3, "id": "not the request's"}
    assert request.id == ""


def test_parameters_that_steer_the_scheduler_have_their_meaning() -> None:
    request = decoded({"TEXT": "a", "sequence_id": 5, "sequence_start": True, "priority": 2, "timeout": 100})

    assert (request.correlation_id, request.flags, request.priority, request.timeout_us) == (5, SEQUENCE_START, 2, 100)
    assert request.parameters == {}


def test_an_object_is_the_json_text_of_an_input_of_strings() -> None:
    request = decoded({"TEXT": {"item": "pen", "count": [1, 2.5]}})

    assert json.loads(request.inputs["TEXT"].array.item()) == {"item": "pen", "count": [1, 2.5]}
    assert "NUM" in refusal({"NUM": {"a": 1}})


@pytest.mark.parametrize(
    ("dims", "value", "texts"),
    [
        ((1,), [{"a": 1}, {"a": 2}], ['[{"a":1},{"a":2}]']),
        ((1,), [{"a": 1}], ['[{"a":1}]']),
        ((-1,), [{"a": 1}, "b"], ['{"a":1}', "b"]),
        ((1,), ["a"], ["a"]),
    ],
)
def test_objects_in_a_list_are_one_text_for_an_input_of_one_element_and_else_one_each(
    dims: tuple[int, ...], value: object, texts: list[str]
) -> None:
    request = decoded({"TEXT": value}, ModelConfig(name="m", input=(ModelInput("TEXT", DataType.BYTES, dims=dims),)))

    assert request.inputs["TEXT"].array.tolist() == [text.encode() for text in texts]


def test_an_input_may_be_called_id() -> None:
    config = ModelConfig(name="m", input=(ModelInput("id", DataType.INT32, dims=(1,)),))

    request = decoded({"id": 3}, config)

    assert (request.id, request.inputs["id"].array.tolist()) == ("", [3])


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((1,), 1, (1,)),
        ((-1,), 3, (3,)),
        ((-1,), 0, (0,)),
        ((-1, 1), 2, (2, 1)),
        ((-1, -1), 5, (1, 5)),
        ((-1, 2, -1, -1), 6, (1, 2, 1, 3)),
        ((-1, 2, -1, 3), 12, (1, 2, 2, 3)),
        ((), 1, ()),
    ],
)
def test_the_last_variable_dimension_takes_what_the_others_leave(
    dims: tuple[int, ...], count: int, shape: tuple[int, ...]
) -> None:
    assert infer_shape("x", dims, count) == shape


@pytest.mark.parametrize(("dims", "count"), [((1,), 2), ((2,), 1), ((), 2), ((2, -1), 3), ((3,), 0)])
def test_a_number_of_elements_that_fits_no_shape_is_refused(dims: tuple[int, ...], count: int) -> None:
    with pytest.raises(ServingError, match="The schema can not convert input 'x' to tensor with proper shape"):
        infer_shape("x", dims, count)


@settings(max_examples=100)
@given(st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=4), st.integers(0, 40))
def test_an_inferred_shape_holds_the_elements_and_keeps_the_fixed_dimensions(dims: list[int], count: int) -> None:
    try:
        shape = infer_shape("x", tuple(dims), count)
    except ServingError:
        assert count % prod(d for d in dims if d != -1) or -1 not in dims
        return
    assert prod(shape) == count
    assert all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("GRID", [[[1, 2, 3]], [[4, 5, 6]]], [[[[1, 2, 3]], [[4, 5, 6]]]]),
        ("GRID", [[[[1]], [[2]]], [[[3]], [[4]]]], [[[[1]], [[2]]], [[[3]], [[4]]]]),
        ("NUM", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("TEXT", [["a"], ["b"]], [[b"a"], [b"b"]]),
    ],
)
def test_nested_arrays_have_the_shape_of_their_nesting(name: str, given: object, taken: object) -> None:
    assert decoded({name: given}).inputs[name].array.tolist() == taken


def test_without_a_batch_the_nesting_is_the_shape() -> None:
    config = ModelConfig(name="m", input=(ModelInput("x", DataType.FP64, dims=(-1, -1)),))

    assert decoded({"x": [[1, 2], [3, 4], [5, 6]]}, config).inputs["x"].array.shape == (3, 2)
    with pytest.raises(ServingError, match=r"expected an array of shape \[-1, -1\], got \[1, 1, 2\]"):
        decoded({"x": [[[1, 2]]]}, config)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"[1]", "expected an object, got an array"),
        (b"{", "failed to parse the request JSON buffer"),
        ({"parameters": 3}, "Expected JSON object for keyword: 'parameters', got a number"),
        ({"TEXT": 5}, "expected a string (BYTES), got 5"),
        ({"NUM": [1, [2]]}, "arrays and single elements are mixed"),
        ({"NUM": [[1], [2, 3]]}, "expected arrays of one size side by side, got 1 and 2"),
        ({"NUM": [[[1]]]}, "input 'NUM': expected an array of shape [-1, -1], got [1, 1, 1]"),
        ({"GRID": [[1, 2], [3, 4]]}, "input 'GRID': expected an array of shape [-1, 2, -1, -1], got [2, 2]"),
        ({"NUM": [[1], 2]}, "arrays and single elements are mixed"),
        ({"HALF": 1}, "receiving FP16 data via JSON is not supported"),
        ({"TEXT": "a", "other": None}, "parameter 'other'"),
        ({"TEXT": "a", "other": [1]}, "has no input 'other', and the request lacks NUM, GRID, HALF"),
        ({"TEXT": "a", "NUMS": 1}, "has no input 'NUMS', and the request lacks NUM, GRID, HALF"),
        ({"other": 1}, "has no input 'other', and the request lacks TEXT, NUM, GRID, HALF"),
        ({"TEXT": "a", "triton_x": 1}, "reserved for Triton usage"),
        ({"id": 5}, "Unable to parse 'id'"),
        ({"TEXT": "a", "parameters": {"TEXT": "b"}}, "input 'TEXT' already exists in request"),
        (b'{"TEXT": "a", "NUM": 1, "NUM": 2, "TEXT": "b"}', "input 'NUM' already exists in request"),
        (b'{"parameters": {"NUM": 1, "NUM": 2}}', "input 'NUM' already exists in request"),
    ],
)
def test_what_cannot_be_understood_is_refused(document: object, message: str) -> None:
    assert message in refusal(document)


def test_a_text_that_holds_the_name_of_an_input_is_no_second_input() -> None:
    assert decoded({"TEXT": '"TEXT" and "TEXT"', "user": "TEXT"}).parameters == {"user": "TEXT"}


def test_a_tensor_above_the_limit_is_refused() -> None:
    assert "is larger than the maximum of 8 bytes" in refusal({"NUM": [1, 2, 3]}, bytes_max=8)


def test_a_response_has_a_key_for_each_output_and_one_element_is_no_array() -> None:
    response = InferResponse(
        "m",
        "1",
        "7",
        [
            Tensor("text", DataType.BYTES, np.array([[b"hi"]], object)),
            Tensor("score", DataType.FP32, np.array([[0.1]], "f4")),
            Tensor("ids", DataType.INT64, np.array([[1], [2]])),
            Tensor("none", DataType.INT32, np.zeros((1, 0), "i4")),
            Tensor("done", DataType.BOOL, np.array([True])),
        ],
        {"finish": "stop", "tokens": 3},
    )

    assert json.loads(encode_generated(response)) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "finish": "stop",
        "tokens": 3,
        "text": "hi",
        "score": 0.1,
        "ids": [1, 2],
        "none": [],
        "done": True,
    }


@pytest.mark.parametrize("array", [np.array([np.nan], "f4"), np.array([1, np.nan], "f8"), np.array([np.nan], "f8")])
def test_numbers_that_are_not_finite_are_written_as_literals(array: "np.ndarray") -> None:
    datatype = DataType.FP32 if array.dtype == np.float32 else DataType.FP64
    response = InferResponse("m", "1", "", [Tensor("x", datatype, array)], {"p": float("inf"), "q": 1.5})

    text = encode_generated(response)

    assert b'"id"' not in text
    assert b"NaN" in text
    assert b"Infinity" in text


def test_an_output_that_json_cannot_carry_is_refused() -> None:
    with pytest.raises(ServingError, match="output 'x' holds bytes that are not UTF-8"):
        encode_generated(InferResponse("m", "1", "", [Tensor("x", DataType.BYTES, np.array([b"\xff"], object))]))


def streamed(*texts: bytes) -> tuple[str, str]:
    """Return what a client reads of a stream, and what is wrong at its end."""
    text = StreamedText()
    read = ""
    for piece in texts:
        tensor = Tensor("text", DataType.BYTES, np.array([piece], object))
        read += json.loads(text.encode(InferResponse("m", "1", "", [tensor])))["text"]
    problem = text.end()
    return read, problem.message if problem is not None else ""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_stream_of_text_may_be_cut_anywhere(size: int) -> None:
    raw = "Ünïcödé 😀 text".encode()

    assert streamed(*(raw[at : at + size] for at in range(0, len(raw), size))) == (raw.decode(), "")


def test_a_model_that_repeats_its_text_is_not_continued() -> None:
    raw = "aé".encode()

    assert streamed(raw[:2], raw) == ("aaé", "")


def test_text_that_ends_within_a_character_is_told() -> None:
    assert streamed("é".encode()[:1]) == ("", "output 'text' ends within a UTF-8 character")


def test_bytes_that_are_not_text_stay_an_error_in_a_stream() -> None:
    with pytest.raises(ServingError, match="not UTF-8"):
        streamed(b"ok", b"a\xff")
