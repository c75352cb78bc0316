"""Sequences: what the model sees of them, what clients get, and who is refused."""

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tests.support.models import write_model
from tests.support.peers import Pair
from tests.support.sequence_models import COUNTDOWN, RUNNING_SUM, SUM_BY_ID, sequence_pbtxt
from tritonclient.grpc import service_pb2 as pb

WHAT_IT_SEES = '''\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT says in JSON what the model was given: the rows of its batch, and which of them this one is."""

    def execute(self, requests):
        rows = []
        for request in requests:
            row = {"id": request.correlation_id(), "flags": request.flags(), "request": request.request_id()}
            for tensor in request.inputs():
                array = tensor.as_numpy()
                values = [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]
                row[tensor.name()] = [str(array.dtype), list(array.shape), values]
            if "READY" in row and not row["READY"][2][0]:
                row["INPUT"][2] = "whatever"  # in Triton what the memory happened to hold
            rows.append({key: row[key] for key in sorted(row)})
        responses = []
        for index in range(len(requests)):
            seen = json.dumps({"row": index, "rows": rows}).encode()
            output = pb_utils.Tensor("OUTPUT", np.array([[seen]], np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
'''
TEXT_OUTPUT = """
backend: "python"
max_batch_size: {size}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_STRING dims: [ 1 ] }}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 {batching} }}
"""
DIRECT = """direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 3, 7 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 0.5 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
"""
PLAIN = "oldest { }"
IDLE = "max_sequence_idle_microseconds: 60000000 "


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "direct", WHAT_IT_SEES, config=TEXT_OUTPUT.format(size=4, batching=DIRECT))
    write_model(folder, "texts", WHAT_IT_SEES, config=TEXT_OUTPUT.format(size=4, batching=PLAIN))
    write_model(folder, "plain", WHAT_IT_SEES, config=TEXT_OUTPUT.format(size=0, batching=PLAIN))
    write_model(folder, "rows", RUNNING_SUM, config=sequence_pbtxt(IDLE + "direct { }", id_type=""))
    write_model(folder, "ids", SUM_BY_ID, config=sequence_pbtxt(IDLE + "oldest { max_candidate_sequences: 4 }"))
    write_model(folder, "bare", SUM_BY_ID, config=sequence_pbtxt(""))
    write_model(folder, "short", SUM_BY_ID, config=sequence_pbtxt("max_sequence_idle_microseconds: 300000 "))
    more = "model_transaction_policy { decoupled: true }"
    iterative = sequence_pbtxt("iterative_sequence: true oldest { } ", id_type="", more=more)
    write_model(folder, "countdown", COUNTDOWN, config=iterative)
    started: Pair = start_pair(folder, "--model-control-mode=explicit", "--load-model=*")
    return started


def body(value: int, id: int | str, *, start: bool = False, end: bool = False, **more: Any) -> dict[str, Any]:
    flags = {"sequence_start": start, "sequence_end": end}
    return {
        "inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [value]}],
        "parameters": {"sequence_id": id, **flags, **more},
    }


@pytest.mark.parametrize("model", ["direct", "texts", "plain", "rows", "ids", "bare", "short", "countdown"])
def test_a_completed_configuration_is_the_same(pair: Pair, same_http: Any, model: str) -> None:
    same_http(pair, "GET", f"/v2/models/{model}/config")


def test_a_model_of_the_direct_strategy_sees_the_same_controls_and_rows(pair: Pair, same_http: Any) -> None:
    def send(*arguments: Any, **more: Any) -> Any:
        return same_http(pair, "POST", "/v2/models/direct/infer", body(*arguments, **more))

    send(1, 11, start=True)
    send(2, 12, start=True)
    send(3, 13, start=True, end=True)
    send(4, 12)
    send(5, 14, start=True)
    answer = send(6, 11, end=True)
    send(7, 14, end=True)
    send(8, 12, end=True)
    send(9, 2**62, start=True, end=True)

    (row,) = json.loads(answer.document["outputs"][0]["data"][0])["rows"]
    assert row["END"] == ["float32", [1, 1], [0.5]]


def test_ids_that_are_texts_are_the_same(pair: Pair, same_http: Any) -> None:
    same_http(pair, "POST", "/v2/models/texts/infer", body(1, "a text", start=True))
    same_http(pair, "POST", "/v2/models/texts/infer", body(1, "a text", end=True))


def test_a_model_without_batching_and_controls_sees_the_same(pair: Pair, same_http: Any) -> None:
    request = body(1, 5, start=True)
    request["inputs"][0]["shape"] = [1]
    same_http(pair, "POST", "/v2/models/plain/infer", request)
    request["parameters"] = {"sequence_id": 5, "sequence_end": True}
    same_http(pair, "POST", "/v2/models/plain/infer", request)


@pytest.mark.parametrize("model", ["rows", "ids"])
def test_sums_are_the_same(pair: Pair, same_http: Any, model: str) -> None:
    for index, (key, value) in enumerate([(1, 5), (2, 7), (1, 1), (2, 2), (2, 3), (1, 4)]):
        request = body(value, key, start=index < 2, end=index > 3)
        answer = same_http(pair, "POST", f"/v2/models/{model}/infer", request)
        assert answer.status == 200


REFUSED: dict[str, dict[str, Any]] = {
    "no start": body(1, 99),
    "an end without a start": body(1, 98, end=True),
    "no id": body(1, 0, start=True),
    "an empty id": body(1, "", start=True),
    "two rows": body(1, 7, start=True)
    | {"inputs": [{"name": "INPUT", "shape": [2, 1], "datatype": "INT32", "data": [1, 2]}]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_same_is_refused(pair: Pair, same_http: Any, case: str) -> None:
    answer = same_http(pair, "POST", "/v2/models/ids/infer", REFUSED[case])
    assert answer.status == 400


def test_the_same_is_refused_over_grpc(pair: Pair, same_grpc: Any) -> None:
    for key in (0, 97):
        request = pb.ModelInferRequest(model_name="ids", raw_input_contents=[(1).to_bytes(4, "little")])
        request.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
        request.parameters["sequence_id"].int64_param = key
        assert same_grpc(pair, "ModelInfer", request) == "INVALID_ARGUMENT"


def test_a_second_start_begins_anew(pair: Pair, same_http: Any) -> None:
    for value, start, end in ((5, True, False), (6, True, False), (1, False, True)):
        answer = same_http(pair, "POST", "/v2/models/ids/infer", body(value, 21, start=start, end=end))
        assert answer.status == 200
    same_http(pair, "POST", "/v2/models/ids/infer", body(1, 21))


def test_an_idle_sequence_is_over(pair: Pair, same_http: Any) -> None:
    same_http(pair, "POST", "/v2/models/short/infer", body(5, 31, start=True))
    time.sleep(1.2)

    answer = same_http(pair, "POST", "/v2/models/short/infer", body(5, 31))

    assert answer.status == 400


def test_sequences_in_the_backlog_get_their_slot(pair: Pair) -> None:
    """Six sequences at once for four slots: each of them gets its sums."""

    def sums(endpoint: Any, id: int, found: dict[int, list[int]]) -> None:
        with httpclient.InferenceServerClient(endpoint) as client:
            for number in range(5):
                given = httpclient.InferInput("INPUT", [1, 1], "INT32").set_data_from_numpy(_one())
                result = client.infer(
                    "ids", [given], sequence_id=id, sequence_start=number == 0, sequence_end=number == 4
                )
                found.setdefault(id, []).append(int(result.as_numpy("OUTPUT")[0, 0]))

    answers = []
    for server in (pair.ours, pair.theirs):
        found: dict[int, list[int]] = {}
        threads = [threading.Thread(target=sums, args=(server.http, key, found)) for key in range(41, 47)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answers.append(found)

    assert answers[0] == answers[1] == {key: [1, 2, 3, 4, 5 + key] for key in range(41, 47)}


def _one() -> Any:
    return np.ones((1, 1), np.int32)


@pytest.mark.parametrize("id", [None, 51, "words"])
def test_an_iterative_model_answers_the_same_over_a_stream(pair: Pair, stub: Any, id: int | str | None) -> None:
    request = pb.ModelInferRequest(model_name="countdown", id="one", raw_input_contents=[(4).to_bytes(4, "little")])
    request.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    if isinstance(id, int):
        request.parameters["sequence_id"].int64_param = id
    elif id is not None:
        request.parameters["sequence_id"].string_param = id
    if id is not None:
        request.parameters["sequence_start"].bool_param = True

    def values(endpoint: str) -> list[tuple[str, int, bool]]:
        found = []
        for answer in stub(endpoint).ModelStreamInfer(iter([request]), timeout=200):
            assert not answer.error_message
            response = answer.infer_response
            value = int.from_bytes(response.raw_output_contents[0], "little")
            found.append((response.id, value, response.parameters["triton_final_response"].bool_param))
        return found

    ours = values(pair.ours.grpc)
    assert [value for _, value, _ in ours] == [3, 2, 1, 0]
    assert ours == values(pair.theirs.grpc)
