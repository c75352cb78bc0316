"""Tables in JSON and CSV: plain values by input."""

import json
from typing import Any

import numpy as np
import pytest

from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.form_bodies import form_document
from charonia.wire.plain_values import MISSING, facts_of, labels_of
from charonia.wire.v2_generate import GenerateCall, decode_generate, encode_generated

BYTES_MAX = 1 << 20
COLUMNS: dict[str, Any] = {
    "age": {"type": "integer"},
    "city": {"type": ["string", "null"], "examples": ["Ulm"]},
    "member": {"type": ["boolean", "null"]},
    "weight": {"type": ["number", "boolean"]},
}
PROBABILITIES = {"type": "array", "prefixItems": [{"type": "number", "title": each} for each in ("no", "yes")]}


def config(inputs: dict[str, Any], *given: ModelInput) -> ModelConfig:
    schema = json.dumps({"inputs": inputs, "outputs": {"p": PROBABILITIES}})
    return ModelConfig(name="m", max_batch_size=8, input=given, parameters={JSON_SCHEMA: schema})


TABLE = config(
    COLUMNS,
    ModelInput("age", DataType.INT64, dims=(1,)),
    ModelInput("city", DataType.BYTES, dims=(1,), optional=True),
    ModelInput("member", DataType.FP64, dims=(1,), optional=True),
    ModelInput("weight", DataType.FP64, dims=(1,)),
)
ITEMS = [{"title": "a", "type": "number"}, {"title": "b", "type": ["number", "null"]}]
MATRIX = config({"x": {"type": "array", "prefixItems": ITEMS}}, ModelInput("x", DataType.FP32, dims=(2,)))
MIXED = config(
    {"x": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}},
    ModelInput("x", DataType.BYTES, dims=(2,)),
)
ROWS = {"age": [[1], [2]], "city": [[b"Ulm"], [MISSING]], "member": [[1.0], [None]], "weight": [[0.5], [1.0]]}


def read(model: ModelConfig, document: object, *, csv: bytes | None = None) -> dict[str, Any]:
    body = json.dumps(document).encode() if csv is None else csv
    form = form_document(model, b"text/csv" if csv is not None else b"", b"/", body)
    call = decode_generate(model, "", body, BYTES_MAX, form)
    assert call.is_list
    return {
        name: [[None if e != e else e for e in row] for row in tensor.array.tolist()]
        for name, tensor in call.request.inputs.items()
    }


def refusal(model: ModelConfig, document: object, **options: bytes) -> str:
    with pytest.raises(ServingError) as caught:
        read(model, document, **options)
    return str(caught.value)


RECORDS = [{"age": 1, "city": "Ulm", "member": True, "weight": 0.5}, {"age": 2, "weight": True}]
SPLIT = {"columns": ["city", "age", "weight", "member"], "data": [["Ulm", 1, 0.5, True], [None, 2.0, True, None]]}


@pytest.mark.parametrize(
    "document",
    [
        RECORDS,
        {"dataframe_records": RECORDS},
        {"instances": RECORDS},
        {"inputs": RECORDS},
        SPLIT,
        {**SPLIT, "index": [0, 1]},
        {"dataframe_split": SPLIT},
        {"inputs": {"age": [1, 2], "city": ["Ulm", None], "member": [True, None], "weight": [0.5, True]}},
    ],
)
def test_each_form_of_a_table_is_the_same_table(document: object) -> None:
    assert read(TABLE, document) == ROWS


def test_columns_that_may_be_missing_can_be_left_out() -> None:
    assert read(TABLE, [{"age": 1, "weight": 2}]) == {
        "age": [[1]],
        "city": [[MISSING]],
        "member": [[None]],
        "weight": [[2.0]],
    }


@pytest.mark.parametrize(
    "text",
    [
        b"age,city,member,weight\n1,Ulm,true,0.5\n2,,,1\n",
        b'\xef\xbb\xbfweight,member,city,age\r\n0.5,True,"Ulm",1\r\n1.0,,,2\r\n',
    ],
)
def test_csv_is_a_table(text: bytes) -> None:
    assert read(TABLE, None, csv=text) == ROWS


def test_beside_inputs_a_member_named_inputs_is_a_parameter() -> None:
    call = decode_generate(MATRIX, "", b'{"x": [1, 2], "inputs": "y"}', BYTES_MAX)

    assert list(call.request.inputs) == ["x"]
    assert call.request.parameters == {"inputs": "y"}


def test_the_columns_of_a_matrix_have_names() -> None:
    assert read(MATRIX, [{"b": 2, "a": 1}, {"a": 3}]) == {"x": [[1, 2], [3, None]]}
    assert read(MATRIX, {"dataframe_split": {"data": [[1, 2]]}}) == {"x": [[1, 2]]}
    assert read(MATRIX, {"instances": [[1, None]]}) == {"x": [[1, None]]}
    assert read(MATRIX, None, csv=b"b,a\n2,1\n") == {"x": [[1, 2]]}


def test_a_matrix_of_texts_and_numbers_is_one_of_texts() -> None:
    assert read(MIXED, {"instances": [["a", 1.5], ["b", 2]]}) == {"x": [[b"a", b"1.5"], [b"b", b"2"]]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([{"age": 1}], "model 'm': the table lacks weight (hint: its inputs are age, city, member, weight)"),
        ([{"weight": 1}], "the table lacks age"),
        ([{"age": 1, "weight": 1}, {"weight": 1}], "row 1 has no value for 'age', which model 'm' needs"),
        (
            [{"age": 1, "weight": 1, "ctiy": "Ulm"}],
            "has no input 'ctiy' (hint: its inputs are age, city, member, weight; did you",
        ),
        ([{"age": 1, "weight": 1}, 5], "failed to parse the request JSON buffer: expected an object, got an array"),
        (
            {"dataframe_records": [1]},
            "'dataframe_records': expected an array of at least one row, got an array with a number",
        ),
        (
            {"dataframe_records": [{"age": 1}, 2]},
            "'dataframe_records': expected objects, a row each, got an array with a number",
        ),
        (
            {"instances": [[1, 2]]},
            "'instances': expected objects with the inputs age, city, member, weight, got plain values",
        ),
        ({"dataframe_split": {"data": [[1]]}}, "'dataframe_split' without 'columns': expected objects with the inputs"),
        ({"dataframe_split": [1]}, "'dataframe_split': expected an object with 'columns' and 'data', got an array"),
        ({"columns": "age", "data": [[1]]}, "'columns': expected an array of names, got a string"),
        ({"columns": ["age", "age"], "data": [[1, 2]]}, "expected distinct columns, got age, age"),
        ({"columns": ["age", "weight"], "data": [[1, 2], [3]]}, "row 1: expected 2 values, one a column, got 1 values"),
        ({"columns": ["age", "weight"], "data": []}, "expected an array of at least one row, got an empty one"),
        ([{"age": 1.5, "weight": 1}], "(INT64), got 1.5"),
        ([{"age": 1, "weight": 1, "city": 5}], "expected a string (BYTES), got 5"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(document: object, message: str) -> None:
    assert message in refusal(TABLE, document)


def test_the_body_of_an_infer_request_is_no_table() -> None:
    tensors = [{"name": "age", "datatype": "INT64", "shape": [1], "data": [1]}]

    assert refusal(TABLE, {"inputs": tensors}).startswith("model 'm' has no input 'inputs'")
    assert refusal(TABLE, {"instances": tensors}).startswith("model 'm' has no input 'name'")


def test_csv_is_the_text_of_a_model_with_no_other_input_than_a_text() -> None:
    text, count = (
        ModelInput("text", DataType.BYTES, dims=(1,)),
        ModelInput("n", DataType.INT64, dims=(1,), optional=True),
    )
    schemas = {"text": {"type": "string"}, "n": {"type": ["integer", "null"]}}
    alone, with_more = config({"text": schemas["text"]}, text), config(schemas, text, count)

    assert form_document(alone, b"text/csv", b"/", b"text\nhi\n") == {"text": b"text\nhi\n"}
    assert form_document(with_more, b"text/csv", b"/", b"text\nhi\n") == {"text": ["hi"], "n": [None]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"age,weight\n", "the CSV has no rows"),
        (b"age,weight\nx,1\n", "column 'age': expected integer, got 'x'"),
        (b"age,weight\n,1\n", "row 0 has no value for 'age'"),
        (b"age,weight\n1\n", "the CSV: row 0: expected 2 values, one a column, got 1 values"),
        (b"age,weight\n1,\xff\n", "the CSV cannot be read"),
    ],
)
def test_what_is_wrong_with_csv_is_said(text: bytes, message: str) -> None:
    assert message in refusal(TABLE, None, csv=text)


def test_a_misspelt_member_is_not_taken_for_a_column_that_is_left_out() -> None:
    with pytest.raises(ServingError, match="has no input 'citty'"):
        decode_generate(TABLE, "", b'{"age": 1, "weight": 1, "citty": "Ulm"}', BYTES_MAX)


def test_probabilities_have_the_names_of_their_classes() -> None:
    response = InferResponse("m", "1", "", [Tensor("p", DataType.FP64, np.array([[0.25, 0.75]]))])
    call = GenerateCall(decode_generate(MATRIX, "", b'{"x": [1, 2]}', BYTES_MAX).request, MATRIX, False)

    assert json.loads(encode_generated(response, call))["p"] == {"no": 0.25, "yes": 0.75}
    assert labels_of(MATRIX, "p") == ("no", "yes")
    assert facts_of(PROBABILITIES) == {"columns": ["no", "yes"]}
    assert facts_of(COLUMNS["city"]) == {"examples": ["Ulm"]}
