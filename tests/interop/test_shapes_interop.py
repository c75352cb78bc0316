"""Shapes on the way to a model and back: reshape, optional inputs, requests of different shapes."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.models import write_model
from tests.support.peers import Pair

MODEL = """\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {}
            for name in ("IN", "MORE", "FLAT"):
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    seen[name] = tensor.as_numpy().shape
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if pb_utils.get_input_tensor_by_name(request, "FLAT") is not None:
                array = array.reshape(array.shape[0], -1)
            text = np.array([[json.dumps(seen, sort_keys=True).encode()]] * array.shape[0], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array), pb_utils.Tensor("SEEN", text)]))
        return responses
"""
CONFIG = """\
backend: "python"
max_batch_size: 8
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ {0} ] {1} }},
        {{ name: "MORE" data_type: TYPE_FP32 dims: [ -1 ] optional: true }},
        {{ name: "FLAT" data_type: TYPE_FP32 dims: [ 1 ] optional: true }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ {0} ] {2} }},
         {{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }} ]
{3}
"""
ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 1, 2, 2 ] reshape { shape: [ 4 ] } }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2, 1, 2 ] reshape { shape: [ 4 ] } }
ensemble_scheduling { step { model_name: "square" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
"""
RESHAPE = "reshape {{ shape: [ {0} ] }}"


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    square, last = RESHAPE.format("2, 2"), RESHAPE.format("-1, 1")
    write_model(folder, "ensemble", "", config=ENSEMBLE)
    batching = "dynamic_batching { max_queue_delay_microseconds: 50000 }"
    write_model(folder, "square", MODEL, config=CONFIG.format("4", square, square, ""))
    write_model(folder, "variable", MODEL, config=CONFIG.format("-1", last, last, ""))
    write_model(folder, "ragged", MODEL, config=CONFIG.format("-1", "allow_ragged_batch: true", "", batching))
    started: Pair = start_pair(folder)
    return started


def body(shape: list[int], **more: list[int]) -> dict[str, object]:
    def tensor(name: str, dims: list[int]) -> dict[str, object]:
        count = 1
        for dim in dims:
            count *= dim
        return {"name": name, "shape": dims, "datatype": "FP32", "data": list(range(count))}

    return {"inputs": [tensor("IN", shape), *(tensor(name, dims) for name, dims in more.items())]}


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "a reshape": ("square", body([1, 4])),
    "a reshape of a batch": ("square", body([3, 4])),
    "an output in the shape of dims": ("square", body([1, 4], FLAT=[1, 1])),
    "a variable reshape": ("variable", body([2, 3])),
    "an optional input": ("square", body([1, 4], MORE=[1, 5])),
    "both optional inputs": ("variable", body([1, 2], MORE=[1, 1], FLAT=[1, 1])),
    "an ensemble": ("ensemble", body([1, 1, 2, 2])),
    "a batch of an ensemble": ("ensemble", body([3, 1, 2, 2])),
    "the inner shape of an ensemble": ("ensemble", body([1, 4])),
    "a ragged input": ("ragged", body([2, 3], MORE=[2, 1])),
    "the shape of reshape from a client": ("square", body([1, 2, 2])),
    "too many elements": ("square", body([1, 5])),
    "batches that differ": ("ragged", body([1, 3], MORE=[2, 1])),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_the_same(pair: Pair, same_http: Any, case: str) -> None:
    model, document = CASES[case]

    same_http(pair, "POST", f"/v2/models/{model}/infer", document)


def test_requests_of_different_shapes_that_come_together_are_answered_the_same(pair: Pair) -> None:
    bodies = [body([1, length]) for length in (1, 5, 2, 3)]

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda each: pair.ask("POST", "/v2/models/ragged/infer", each), bodies))

    for ours, theirs in answers:
        assert ours.status == theirs.status == 200
        assert json.loads(ours.body) == json.loads(theirs.body)


def test_a_needed_input_is_missed_here_also_where_an_optional_one_takes_its_place_in_the_count(pair: Pair) -> None:
    document = {"inputs": [{"name": "MORE", "shape": [1, 1], "datatype": "FP32", "data": [0]}]}

    ours, theirs = pair.ask("POST", "/v2/models/ragged/infer", document)

    assert (ours.status, theirs.status) == (400, 500)  # theirs is the model's own fault, that of an absent tensor
