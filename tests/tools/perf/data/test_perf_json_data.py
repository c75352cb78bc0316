import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.tensor import from_bfloat16
from charonia.tools.perf.data.load import read_json
from charonia.tools.perf.data.spec import (
    ModelSpec,
    Stream,
    TensorSpec,
    from_list,
    integer_limits,
    is_integer,
    with_shapes,
)

D = DataType


def model(datatype: DataType = D.FP32, shape: tuple[int, ...] = (2, 2)) -> ModelSpec:
    return ModelSpec("m", "", 8, (TensorSpec("X", datatype, shape),), (TensorSpec("Y", datatype, shape),))


def read(folder: Path, document: object, spec: ModelSpec) -> list[Stream]:
    file = folder / "data.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_json(file, spec)


def only(folder: Path, value: object, spec: ModelSpec) -> object:
    return read(folder, {"data": [{"X": value}]}, spec)[0][0].inputs["X"].tolist()


def refused(folder: Path, document: object, spec: ModelSpec) -> str:
    with pytest.raises(ServingError) as caught:
        read(folder, document, spec)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        [1.0, 2.0, 3.0, 4.0],
        [1, 2, 3, 4],
        [[1, 2], [3, 4]],
        {"content": [1, 2, 3, 4]},
        {"content": [1, 2, 3, 4], "shape": [2, 2]},
        {"b64": base64.b64encode(np.array([1, 2, 3, 4], "<f4").tobytes()).decode()},
        {"content": {"b64": base64.b64encode(np.array([1, 2, 3, 4], "<f4").tobytes()).decode()}, "shape": [2, 2]},
    ],
    ids=["flat", "integers", "nested", "content", "content and shape", "b64", "content of b64"],
)
def test_every_form_of_a_tensor_is_read(tmp_path: Path, value: object) -> None:
    assert only(tmp_path, value, model()) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("datatype", "values", "array"),
    [
        (D.BOOL, [True, False], [True, False]),
        (D.BOOL, [1, 0], [True, False]),
        (D.UINT8, [0, 255.0], [0, 255]),
        (D.INT64, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        (D.UINT64, [1, 2**64 - 1], [1, 2**64 - 1]),
        (D.UINT64, [2**63 + 1, 0], [2**63 + 1, 0]),
        (D.INT32, [True, 2], [1, 2]),
        (D.FP16, [0.5, 3], [0.5, 3.0]),
        (D.FP64, [0.1, 2], [0.1, 2.0]),
        (D.BYTES, ["a", "hé"], [b"a", "hé".encode()]),
    ],
)
def test_values_are_taken_leniently(
    tmp_path: Path, datatype: DataType, values: list[object], array: list[object]
) -> None:
    assert only(tmp_path, values, model(datatype, (2,))) == array


def test_lists_of_bf16_are_read(tmp_path: Path) -> None:
    streams = read(tmp_path, {"data": [{"X": [1.5, -2]}]}, model(D.BF16, (2,)))

    assert from_bfloat16(streams[0][0].inputs["X"]).tolist() == [1.5, -2.0]


def test_values_that_are_not_finite_are_read(tmp_path: Path) -> None:
    streams = read(tmp_path, '{"data": [{"X": [NaN, Infinity, -Infinity, 1]}]}', model(D.FP32, (4,)))

    assert str(streams[0][0].inputs["X"].tolist()) == "[nan, inf, -inf, 1.0]"


def test_strings_with_their_lengths_are_read_from_b64(tmp_path: Path) -> None:
    wire = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc"

    assert only(tmp_path, {"b64": base64.b64encode(wire).decode()}, model(D.BYTES, (2,))) == [b"a", b"bc"]


@pytest.mark.parametrize("datatype", [each for each in DataType if each is not D.BYTES])
def test_b64_beside_a_shape_is_read_for_every_datatype_as_input_and_as_expected_output(
    tmp_path: Path, datatype: DataType
) -> None:
    raw = b"\0\1" * 4 * datatype.byte_size
    value = {"b64": base64.b64encode(raw).decode(), "shape": [4, 2]}
    document = {"data": [{"X": value}], "validation_data": [{"Y": value}]}

    step = read(tmp_path, document, model(datatype, (-1, -1)))[0][0]

    assert step.inputs["X"].shape == (4, 2)
    assert step.expected is not None
    assert step.expected["Y"].tobytes() == step.inputs["X"].tobytes() == raw


def test_strings_in_b64_take_a_shape(tmp_path: Path) -> None:
    wire = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc"
    value = {"b64": base64.b64encode(wire).decode(), "shape": [2, 1]}

    assert only(tmp_path, value, model(D.BYTES, (-1, -1))) == [[b"a"], [b"bc"]]


def test_a_single_value_is_a_tensor_of_one(tmp_path: Path) -> None:
    assert only(tmp_path, 7, model(D.INT32, (1,))) == [7]
    assert only(tmp_path, "text", model(D.BYTES, (1,))) == [b"text"]


def test_the_variable_dimension_follows_from_the_number_of_elements(tmp_path: Path) -> None:
    assert only(tmp_path, [1, 2, 3, 4], model(D.INT32, (-1, 2))) == [[1, 2], [3, 4]]


def test_the_shape_beside_the_data_beats_that_of_the_command_line(tmp_path: Path) -> None:
    spec = with_shapes(model(D.INT32, (-1, -1)), [("X", (2, 2))])

    assert only(tmp_path, [1, 2, 3, 4], spec) == [[1, 2], [3, 4]]
    assert only(tmp_path, {"content": [1, 2, 3, 4], "shape": [1, 4]}, spec) == [[1, 2, 3, 4]]


def test_lists_of_lists_are_streams(tmp_path: Path) -> None:
    streams = read(tmp_path, {"data": [[{"X": [1]}, {"X": [2]}], [{"X": [3], "model": "m"}]]}, model(D.INT32, (1,)))

    assert [[step.inputs["X"].tolist() for step in stream] for stream in streams] == [[[1], [2]], [[3]]]
    assert streams[0][1].where == "data.json: stream 0: step 1"


def test_validation_data_belong_to_their_steps(tmp_path: Path) -> None:
    document = {"data": [{"X": [1]}, {"X": [2]}], "validation_data": [{"Y": [3]}, {"Y": [4]}]}

    (stream,) = read(tmp_path, document, model(D.INT32, (1,)))

    assert [step.expected and step.expected["Y"].tolist() for step in stream] == [[3], [4]]


def test_optional_inputs_may_lack(tmp_path: Path) -> None:
    spec = ModelSpec("m", "", 8, (TensorSpec("X", D.INT32, (1,)), TensorSpec("Z", D.INT32, (1,), optional=True)))

    assert list(read(tmp_path, {"data": [{"X": [1]}]}, spec)[0][0].inputs) == ["X"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "data.json: line 1: expected JSON, got: Expecting property name enclosed in double quotes"),
        ("[1]", 'data.json: expected an object with a list named "data", got none'),
        ({"data": []}, "data.json: data: expected a list of steps, got an empty one"),
        ({"data": [{}], "dat": 1}, "data.json: expected data and validation_data only, got 'dat'"),
        (
            {"data": [{}, []]},
            "data.json: data: expected objects (steps) only or lists (streams) only, got a mixture",
        ),
        ({"data": [[]]}, "data.json: stream 0: expected at least one step, got none"),
        ({"data": [[1]]}, "data.json: stream 0: step 0: expected an object with a tensor by name, got something else"),
        ({"data": [{}]}, "data.json: step 0: expected input 'X', got none"),
        ({"data": [{"x": [1]}]}, "data.json: step 0: expected inputs of model 'm', 'X', got 'x'"),
        (
            {"data": [{"X": [1, 2, 3]}]},
            "data.json: step 0: input 'X': expected 4 elements (FP32 of shape [2, 2]), got 3",
        ),
        (
            {"data": [{"X": [[1, 2], [3]]}]},
            "data.json: step 0: input 'X': expected FP32 of shape [2, 2], got lists of different lengths",
        ),
        (
            {"data": [{"X": ["a"]}]},
            "data.json: step 0: input 'X': expected numbers for FP32 of shape [2, 2], got text",
        ),
        (
            {"data": [{"X": [None, 1, 2, 3]}]},
            "data.json: step 0: input 'X': expected numbers for FP32 of shape [2, 2], got null",
        ),
        (
            {"data": [{"X": {"content": [1, 2, 3, 4], "shape": [4]}}]},
            "data.json: step 0: input 'X': expected FP32 of shape [2, 2], got shape [4]",
        ),
        (
            {"data": [{"X": {"content": [1], "shape": ["4"]}}]},
            """data.json: step 0: input 'X': expected a shape of integers of at least 0, got ["4"]""",
        ),
        (
            {"data": [{"X": {"contents": [1]}}]},
            'data.json: step 0: input \'X\': expected a list, {"b64": ...} or {"content": ...}, both with an '
            "optional shape, got 'contents'",
        ),
        (
            {"data": [{"X": {"content": {"base64": "AA=="}}}]},
            "data.json: step 0: input 'X': expected a list or b64 as content, got an object with ['base64']",
        ),
        (
            {"data": [{"X": {"shape": [4]}}]},
            'data.json: step 0: input \'X\': expected a list, {"b64": ...} or {"content": ...}, both with an '
            "optional shape, got no content",
        ),
        (
            {"data": [{"X": {"content": [1], "b64": "AAA="}}]},
            "data.json: step 0: input 'X': expected content or b64, got both",
        ),
        (
            {"data": [{"X": {"b64": "AAA"}}]},
            "data.json: step 0: input 'X': expected base64 text, got: Incorrect padding",
        ),
        ({"data": [{"X": {"b64": 5}}]}, "data.json: step 0: input 'X': expected base64 text as b64, got the number 5"),
        (
            {"data": [{"X": {"b64": "AAA="}}]},
            "data.json: step 0: input 'X': expected 4 elements (FP32 of shape [2, 2]), which takes 16 bytes, "
            "got 2 bytes",
        ),
        (
            {"data": [{"X": [1, 2, 3, 4]}], "validation_data": [{"Y": [1, 2, 3, 4]}, {"Y": [1, 2, 3, 4]}]},
            "data.json: expected validation_data with as many streams and steps as data, 1 streams of 1 steps, "
            "got 1 streams of 2 steps",
        ),
        (
            {"data": [{"X": [1, 2, 3, 4]}], "validation_data": [{"Z": [1]}]},
            "data.json: step 0: expected outputs of model 'm', 'Y', got 'Z'",
        ),
    ],
)
def test_a_mistake_is_named_with_file_step_and_tensor(tmp_path: Path, document: object, problem: str) -> None:
    assert refused(tmp_path, document, model()) == problem


@pytest.mark.parametrize(
    ("datatype", "value", "problem"),
    [
        (D.UINT8, 256, "expected values that fit UINT8, got 256"),
        (D.UINT64, 2**64, f"expected values that fit UINT64, got {2**64} to {2**64}"),
        (D.INT8, 1.5, "expected values that fit INT8, got 1.5"),
        (D.BOOL, 2, "expected values that fit BOOL, got 2"),
        (D.FP16, 1e6, "expected values that fit FP16, got 1000000.0"),
        (D.BYTES, 1, "expected strings for BYTES of shape [1], got the number 1"),
        (D.INT32, "1", "expected numbers for INT32 of shape [1], got text"),
    ],
)
def test_values_that_would_change_are_refused(tmp_path: Path, datatype: DataType, value: object, problem: str) -> None:
    assert (
        refused(tmp_path, {"data": [{"X": [value]}]}, model(datatype, (1,)))
        == f"data.json: step 0: input 'X': {problem}"
    )


def test_strings_without_their_lengths_are_refused(tmp_path: Path) -> None:
    text = base64.b64encode(b"hello").decode()

    assert refused(tmp_path, {"data": [{"X": {"b64": text}}]}, model(D.BYTES, (1,))).startswith(
        "data.json: step 0: input 'X': expected strings with 4 bytes of length before each, got 5 other bytes: "
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"missing\.json: cannot be read: No such file or directory"):
        read_json(tmp_path / "missing.json", model())


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_bytes(b'{"data": "\xff"}')

    with pytest.raises(ServingError, match=r"data\.json: expected JSON in UTF-8, got: invalid start byte"):
        read_json(file, model())


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.tools.perf.data.load.FILE_BYTES_MAX", 5)

    assert refused(tmp_path, {"data": []}, model()) == f"{tmp_path / 'data.json'}: expected at most 5 bytes, got 12"


def test_lists_without_end_are_refused(tmp_path: Path) -> None:
    text = '{"data": ' + "[" * 100_000 + "]" * 100_000 + "}"

    assert refused(tmp_path, text, model()) == "data.json: expected JSON, got lists that are nested too deeply"


def test_two_variable_dimensions_need_a_shape(tmp_path: Path) -> None:
    assert refused(tmp_path, {"data": [{"X": [1, 2]}]}, model(D.FP32, (-1, -1))) == (
        "data.json: step 0: input 'X': expected FP32 of shape [-1, -1] "
        "(hint: name the shape with --shape or beside the content), got 2"
    )


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([d for d in DataType if is_integer(d)]), st.data())
def test_integers_of_any_size_come_through_exactly(datatype: DataType, data: st.DataObject) -> None:
    low, high = integer_limits(datatype)
    values = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=5))

    assert from_list(TensorSpec("X", datatype, (len(values),)), values, None).tolist() == values


@pytest.mark.parametrize(
    ("digits", "problem"),
    [
        (400, "step 0: input 'X': expected values that fit FP64, got an integer of 400 digits"),
        (5000, "expected JSON, got an integer of thousands of digits"),
    ],
)
def test_integers_beyond_all_floating_point_numbers_are_refused(tmp_path: Path, digits: int, problem: str) -> None:
    text = '{"data": [{"X": [' + "9" * digits + ", 1.5]}]}"

    assert refused(tmp_path, text, model(D.FP64, (2,))) == f"data.json: {problem}"
