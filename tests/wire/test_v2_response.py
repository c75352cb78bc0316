import math

import numpy as np
import orjson
import pytest

from charonia.core.dtypes import DataType
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.v2_response import encode_response

Y = Tensor("y", DataType.FP32, np.array([[1.5, 2.0]], "<f4"))
Z = Tensor("z", DataType.BYTES, np.array([b"ab"], object))


def test_outputs_are_json_by_default() -> None:
    document, blobs = encode_response(InferResponse("m", "1", "", [Y, Z]), False, {})

    assert blobs == []
    assert orjson.loads(document) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]},
            {"name": "z", "datatype": "BYTES", "shape": [1], "data": ["ab"]},
        ],
    }


def test_an_id_and_parameters_are_there_when_they_say_something() -> None:
    document, _ = encode_response(InferResponse("m", "1", "7", [], {"took": 1.5}), False, {})

    assert orjson.loads(document) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "parameters": {"took": 1.5},
        "outputs": [],
    }


@pytest.mark.parametrize("value", [True, 1, False, 0, 2**63, "1", 1.0])
def test_parameters_of_a_binary_response_keep_their_type_whatever_was_sent_before(value: ParameterValue) -> None:
    for given in (True, 1, value):
        document, _ = encode_response(InferResponse("m", "1", "", [Z], {"a": given, "b": False}), True, {})

    found = orjson.loads(document)["parameters"]
    assert [(key, type(each), each) for key, each in found.items()] == [("a", type(value), value), ("b", bool, False)]


def test_each_output_has_the_form_that_was_asked_for() -> None:
    document, blobs = encode_response(InferResponse("m", "1", "", [Y, Z]), True, {"y": False})

    assert blobs == [b"\x02\x00\x00\x00ab"]
    y, z = orjson.loads(document)["outputs"]
    assert y["data"] == [1.5, 2.0]
    assert z == {"name": "z", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_written_as_literals(value: float) -> None:
    tensor = Tensor("y", DataType.FP64, np.array([value]))

    text = encode_response(InferResponse("m", "1", "", [tensor], {"p": value}), False, {})[0].decode()

    literal = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    assert f'"parameters":{{"p":{literal}}}' in text
    assert f'"data":[{literal}]' in text
