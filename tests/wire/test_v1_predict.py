"""KServe's v1 protocol: rows and columns of plain JSON to tensors and back."""

import json
from typing import Any

import numpy as np
import pytest

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.v1_predict import decode_predict, encode_predictions

BYTES_MAX = 1 << 20


def config(*inputs: tuple[str, DataType, tuple[int, ...]], batch: int = 8) -> ModelConfig:
    given = tuple(ModelInput(name=name, data_type=kind, dims=dims) for name, kind, dims in inputs)
    return ModelConfig(name="m", max_batch_size=batch, input=given)


ONE = config(("x", DataType.FP32, (2,)))
TWO = config(("x", DataType.FP32, (2,)), ("n", DataType.INT32, (1,)))


def decoded(model: ModelConfig, document: object) -> tuple[InferRequest, bool]:
    return decode_predict(model, json.dumps(document).encode(), BYTES_MAX)


def tensors(model: ModelConfig, document: object) -> dict[str, Any]:
    return {name: tensor.array.tolist() for name, tensor in decoded(model, document)[0].inputs.items()}


def refusal(model: ModelConfig, document: object) -> str:
    with pytest.raises(ServingError) as caught:
        decoded(model, document)
    return str(caught.value)


def predictions(is_rows: bool, **outputs: tuple[DataType, Any]) -> Any:
    made = [Tensor(name, kind, np.array(value, kind.numpy)) for name, (kind, value) in outputs.items()]
    return json.loads(encode_predictions(InferResponse("m", "1", "", made), is_rows))["predictions"]


def test_rows_of_the_only_input_are_a_batch() -> None:
    request, is_rows = decoded(ONE, {"instances": [[1, 2], [3, 4]]})

    assert is_rows
    assert request.model_name == "m"
    assert request.inputs["x"].datatype is DataType.FP32
    assert request.inputs["x"].array.tolist() == [[1, 2], [3, 4]]


def test_rows_may_name_their_inputs() -> None:
    document = {"instances": [{"x": [1, 2], "n": 5}, {"x": [3, 4], "n": 6}]}

    assert tensors(TWO, document) == {"x": [[1, 2], [3, 4]], "n": [[5], [6]]}


def test_columns_are_whole_tensors() -> None:
    assert tensors(TWO, {"inputs": {"x": [[1, 2]], "n": [[5]]}}) == {"x": [[1, 2]], "n": [[5]]}
    assert tensors(ONE, {"inputs": [[1, 2]]}) == {"x": [[1, 2]]}
    assert not decoded(ONE, {"inputs": [[1, 2]]})[1]


def test_a_row_is_the_whole_tensor_of_a_model_without_batches() -> None:
    assert tensors(config(("x", DataType.FP32, (2,)), batch=0), {"instances": [[1, 2]]}) == {"x": [1, 2]}


def test_rows_fill_a_batch_dimension_that_the_model_has_itself() -> None:
    model = config(("x", DataType.FP32, (-1, 2)), batch=0)

    assert tensors(model, {"instances": [[1, 2], [3, 4]]}) == {"x": [[1, 2], [3, 4]]}
    assert tensors(model, {"instances": [[1, 2]]}) == {"x": [[1, 2]]}


def test_strings_and_base64_are_bytes() -> None:
    model = config(("text", DataType.BYTES, (1,)))

    assert tensors(model, {"instances": ["a", {"b64": "/wA="}]}) == {"text": [[b"a"], [b"\xff\0"]]}
    assert tensors(model, {"instances": [{"text": {"b64": "/wA="}}]}) == {"text": [[b"\xff\0"]]}


@pytest.mark.parametrize(("kind", "bits"), [(DataType.FP16, 1.5), (DataType.BF16, 0x3FC0)])
def test_half_precision_is_read_and_written_as_numbers(kind: DataType, bits: float) -> None:
    assert tensors(config(("x", kind, (1,))), {"instances": [[1.5]]}) == {"x": [[bits]]}
    assert predictions(True, y=(kind, [[bits]])) == [[1.5]]


def test_predictions_have_the_form_of_the_request() -> None:
    both = {"y": (DataType.FP32, [[1, 2], [3, 4]]), "n": (DataType.INT64, [5, 6])}

    assert predictions(True, y=both["y"]) == predictions(False, y=both["y"]) == [[1, 2], [3, 4]]
    assert predictions(True, **both) == [{"y": [1, 2], "n": 5}, {"y": [3, 4], "n": 6}]
    assert predictions(False, **both) == {"y": [[1, 2], [3, 4]], "n": [5, 6]}
    assert predictions(True, t=(DataType.BYTES, [b"a", b"\xff"])) == ["a", {"b64": "/w=="}]


def test_numbers_that_are_not_finite_are_written() -> None:
    assert np.isnan(predictions(True, y=(DataType.FP32, [np.nan]))).all()


def test_outputs_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ServingError, match="no common number of rows: 'y' has 2, 'n' has 1"):
        predictions(True, y=(DataType.FP32, [1, 2]), n=(DataType.FP32, [1]))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "expected either 'instances' (rows) or 'inputs' (columns), got an empty object"),
        ({"instances": [1], "inputs": [1]}, "got both 'instances' and 'inputs'"),
        ({"instances": []}, "'instances': expected an array of at least one row, got an empty one"),
        ({"instances": {"x": 1}}, "'instances': expected an array of at least one row, got an object"),
        ({"instances": [[1, 2], [3]]}, "input 'x': expected arrays of one size side by side, got 1 and 2"),
        ({"instances": [[1, [2]]]}, "input 'x': arrays and single elements are mixed"),
        ({"instances": [[1, "2"]]}, "expected a number (FP32), got"),
        ({"instances": [{"x": [1, 2]}, {"y": [1, 2]}]}, "model 'm' has no input 'y' (hint: its inputs are x)"),
        ({"instances": [{"x": [1, 2]}, {}]}, "row 1 has no value for 'x', which model 'm' needs"),
        ({"instances": [{"z": [1, 2]}]}, "model 'm' has no input 'z' (hint: its inputs are x)"),
    ],
)
def test_what_is_wrong_is_said(document: object, message: str) -> None:
    assert message in refusal(ONE, document)


def test_plain_values_need_a_model_with_one_input() -> None:
    assert "expected objects with the inputs x, n, got plain values" in refusal(TWO, {"instances": [[1, 2]]})


def test_wrong_bytes_are_refused() -> None:
    model = config(("text", DataType.BYTES, (1,)))

    assert "'b64': expected base64" in refusal(model, {"instances": [{"b64": "?"}]})
    assert "expected a string (BYTES), got 1" in refusal(model, {"instances": [1]})
