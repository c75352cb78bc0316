"""Streams of responses: the generate routes and ModelStreamInfer."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.models import write_model
from tests.support.peers import Answer, Pair
from tritonclient.grpc import service_pb2 as pb

REPEAT = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().ravel()[0])
            fails = pb_utils.get_input_tensor_by_name(request, "FAILS")
            fails = -1 if fails is None else int(fails.as_numpy().ravel()[0])
            for index in range(count):
                if index == fails:
                    error = pb_utils.TritonError("boom", pb_utils.TritonError.INVALID_ARG)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    continue
                number = pb_utils.Tensor("NUMBER", np.array([index], np.int32))
                text = pb_utils.Tensor("TEXT", np.array([f"text {index}".encode()], object))
                response = pb_utils.InferenceResponse([number, text])
                if count == 5 and index == 4:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    sender.send(response)
            if count != 5:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """\
backend: "python"
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "FAILS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
SEEN = """\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {}
            for name in ("TEXT", "NUMBERS", "FLAG", "GRID"):
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    array = tensor.as_numpy()
                    elements = [x.decode() if isinstance(x, bytes) else x for x in array.ravel().tolist()]
                    seen[name] = [array.shape, elements]
            parameters = json.loads(request.parameters())
            parameters.pop("id", None)  # Triton 2.51 has the request's id there as well
            seen["parameters"], seen["id"] = parameters, request.request_id()
            numbers = pb_utils.get_input_tensor_by_name(request, "NUMBERS")
            numbers = numbers.as_numpy() if numbers is not None else np.zeros((1, 1), np.float32)
            text = np.array([[json.dumps(seen, sort_keys=True).encode()]], object)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text), pb_utils.Tensor("SAME", numbers)])
            )
        return responses
"""
SEEN_CONFIG = """\
backend: "python"
max_batch_size: 4
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "NUMBERS" data_type: TYPE_FP32 dims: [ -1 ] optional: true },
        { name: "FLAG" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
        { name: "GRID" data_type: TYPE_INT64 dims: [ 2, -1, -1 ] optional: true } ]
output [ { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }, { name: "SAME" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "repeat", REPEAT, config=REPEAT_CONFIG)
    write_model(folder, "seen", SEEN, config=SEEN_CONFIG)
    started: Pair = start_pair(folder)
    return started


# The generate routes.


def events(answer: Answer) -> list[Any]:
    """Return the documents of a stream, sentences of errors left out."""
    frames = answer.body.decode().split("\n\n")
    assert frames.pop() == ""
    documents = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    return [{"error": "..."} if "error" in document else document for document in documents]


STREAMS: dict[str, tuple[str, Any]] = {
    "three responses": ("repeat", {"id": "a", "COUNT": 3}),
    "an array of one element": ("repeat", {"COUNT": [2]}),
    "no response": ("repeat", {"COUNT": 0}),
    "the last response is final": ("repeat", {"COUNT": 5}),
    "an error first": ("repeat", {"COUNT": 3, "FAILS": 0}),
    "an error alone": ("repeat", {"COUNT": 1, "FAILS": 0}),
    "an error in the middle": ("repeat", {"COUNT": 3, "FAILS": 1}),
    "an error at the end": ("repeat", {"COUNT": 3, "FAILS": 2}),
    "a version": ("repeat/versions/1", {"COUNT": 2}),
    "an ordinary model": ("seen", {"TEXT": "a", "NUMBERS": [1, 2]}),
}


def test_arrays_of_another_shape_are_refused_here(pair: Pair) -> None:
    answers = pair.ask("POST", "/v2/models/repeat/generate_stream", {"COUNT": [[1]]})

    assert [answer.status for answer in answers] == [400, 200]


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_of_events_is_the_same(pair: Pair, case: str) -> None:
    model, body = STREAMS[case]

    ours, theirs = pair.ask("POST", f"/v2/models/{model}/generate_stream", body)

    assert ours.status == theirs.status
    for header in ("content-type", "transfer-encoding"):
        assert ours.headers.get(header) == theirs.headers.get(header)
    assert events(ours) == events(theirs)


DOCUMENTS: dict[str, tuple[str, Any]] = {
    "one response": ("repeat", {"COUNT": 1}),
    "an error": ("repeat", {"COUNT": 1, "FAILS": 0}),
    "every kind of input": ("seen", {"id": "i", "TEXT": "ü", "NUMBERS": [1, 2.5], "FLAG": True, "GRID": [1, 2, 3, 4]}),
    "other keys": ("seen", {"TEXT": "a", "extra": 5, "f": 1.5, "s": "x", "b": True}),
    "a batch": ("seen", {"TEXT": ["a", "b"]}),
    "a scalar for a vector": ("seen", {"TEXT": "a", "NUMBERS": 4}),
    "no elements": ("seen", {"TEXT": "a", "NUMBERS": []}),
    "nested keys": ("seen", {"TEXT": "a", "parameters": {"NUMBERS": 4, "extra": 5}}),
    "keys of infer": ("seen", {"TEXT": "a", "text_output": 1, "inputs": "x"}),
    "an unknown model": ("none", {"COUNT": 1}),
    "an unknown version": ("repeat/versions/7", {"COUNT": 1}),
    "a missing input": ("repeat", {"COUNTX": 1}),
    "two elements for one": ("repeat", {"COUNT": [1, 2]}),
    "no element for one": ("repeat", {"COUNT": []}),
    "a number that fits no shape": ("seen", {"TEXT": "a", "GRID": [1, 2, 3]}),
    "a parameter that is an array": ("seen", {"TEXT": "a", "extra": [1, 2]}),
    "a parameter that is an object": ("seen", {"TEXT": "a", "extra": {"a": 1}}),
    "a parameter that is nothing": ("seen", {"TEXT": "a", "extra": None}),
    "parameters within parameters": ("seen", {"TEXT": "a", "parameters": {"parameters": {"a": 1}}}),
    "an input twice": ("seen", b'{"TEXT": "a", "TEXT": "b"}'),
    "an input in parameters too": ("seen", {"TEXT": "a", "parameters": {"TEXT": "b"}}),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_document_of_generate_is_the_same(pair: Pair, same_http: Any, case: str) -> None:
    model, body = DOCUMENTS[case]

    same_http(pair, "POST", f"/v2/models/{model}/generate", body)


@pytest.mark.parametrize("case", [case for case in DOCUMENTS if " unknown " in case or "element for" in case])
def test_an_error_before_the_model_runs_is_no_stream(pair: Pair, same_http: Any, case: str) -> None:
    model, body = DOCUMENTS[case]

    answer = same_http(pair, "POST", f"/v2/models/{model}/generate_stream", body)

    assert answer.headers["content-type"] == "application/json"


BROKEN: dict[str, tuple[str, Any]] = {
    "no object": ("repeat", b"[1]"),
    "no JSON": ("repeat", b"{"),
    "nothing": ("repeat", b""),
    "text for a number": ("repeat", {"COUNT": "a"}),
    "a fraction for an integer": ("repeat", {"COUNT": 1.5}),
    "nothing for an input": ("repeat", {"COUNT": None}),
    "a number for text": ("seen", {"TEXT": 5}),
    "a number for a boolean": ("seen", {"TEXT": "a", "FLAG": 1}),
    "a number for the id": ("seen", {"TEXT": "a", "id": 5}),
    "parameters that are no object": ("seen", {"TEXT": "a", "parameters": 3}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_parsed_is_the_clients_fault_here_and_the_servers_there(pair: Pair, case: str) -> None:
    model, body = BROKEN[case]

    ours, theirs = pair.ask("POST", f"/v2/models/{model}/generate", body)

    assert (ours.status, theirs.status) == (400, 500)
    assert list(ours.document) == list(theirs.document) == ["error"]


@pytest.mark.parametrize("count", [0, 2])
def test_several_responses_to_generate_are_an_error_here_and_200_there(pair: Pair, count: int) -> None:
    ours, theirs = pair.ask("POST", "/v2/models/repeat/generate", {"COUNT": count})

    assert (ours.status, theirs.status) == (501, 200)
    assert "exactly 1 response" in ours.document["error"]
    assert "exactly 1 response" in theirs.document["error"]


def test_a_decoupled_model_that_answers_once_works_over_infer_here_only(pair: Pair) -> None:
    body = {"inputs": [{"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}]}

    ours, theirs = pair.ask("POST", "/v2/models/repeat/infer", body)

    assert (ours.status, theirs.status) == (200, 501)


def test_a_decoupled_model_with_several_responses_has_no_answer_over_infer(pair: Pair, same_http: Any) -> None:
    body = {"inputs": [{"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [2]}]}

    assert same_http(pair, "POST", "/v2/models/repeat/infer", body).status == 501


# ModelStreamInfer.


def repeat(id: str, count: int, fails: int | None = None, *, empty_final: bool = False) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="repeat", id=id)
    for name, value in (("COUNT", count), ("FAILS", fails)):
        if value is not None:
            request.inputs.add(name=name, datatype="INT32", shape=[1])
            request.raw_input_contents.append(np.array([value], "<i4").tobytes())
    if empty_final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def seen(id: str, text: str = "a", **more: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=more.get("model", "seen"), model_version=more.get("version", ""), id=id)
    request.inputs.add(name=more.get("name", "TEXT"), datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(
        text.encode()
    )
    return request


@dataclass
class Said:
    """What a stream brought: responses without the sentences of errors, and the status of its end."""

    responses: list[Any]
    status: str

    def of(self, id: str) -> list[Any]:
        return [response for response in self.responses if response[0] == id]


def say(stub: Any, requests: Iterable[pb.ModelInferRequest], metadata: tuple[tuple[str, str], ...] = ()) -> Said:
    responses: list[Any] = []
    call = stub.ModelStreamInfer(iter(list(requests)), metadata=metadata, timeout=200)
    try:
        for message in call:
            answer = message.infer_response
            outputs = [
                (o.name, o.datatype, list(o.shape), raw)
                for o, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            ]
            final = answer.parameters["triton_final_response"].bool_param if answer.parameters else True
            # Triton names no version in an empty last response, and no model in an error.
            name, version = (answer.model_name, answer.model_version) if outputs else ("", "")
            responses.append((answer.id, name, version, final, bool(message.error_message), outputs))
    except grpc.RpcError as error:
        return Said(responses, error.code().name)
    return Said(responses, "OK")


# None mixes decoupled and ordinary models: Triton 2.51 stops answering, or ends.
SCRIPTS: dict[str, list[pb.ModelInferRequest]] = {
    "nothing": [],
    "ordinary requests": [seen(str(index), f"text {index}") for index in range(20)],
    "one id many times": [seen("x", f"text {index}") for index in range(3)],
    "no id": [seen("")],
    "decoupled requests": [repeat("a", 3), repeat("b", 1), repeat("c", 2)],
    "decoupled, the last response is final": [repeat("a", 5)],
    "no response": [repeat("a", 0)],
    "no response, an empty one asked for": [repeat("a", 0, empty_final=True)],
    "responses, an empty one asked for": [repeat("a", 2, empty_final=True)],
    "the last response is final, an empty one asked for": [repeat("a", 5, empty_final=True)],
    "an error of the model": [repeat("a", 3, 1), repeat("b", 1, 0, empty_final=True)],
    "a missing input": [repeat("a", 1), repeat("b", None), repeat("c", 1)],  # type: ignore[arg-type]  # the point
    "an unknown input": [seen("a", name="X"), seen("b")],
    "an unknown model": [seen("a", model="none"), seen("b"), seen("c", version="9"), seen("d", version="x")],
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_stream_says_the_same(pair: Pair, stub: Callable[[str], Any], case: str) -> None:
    requests = SCRIPTS[case]

    ours, theirs = (say(stub(server.grpc), requests) for server in (pair.ours, pair.theirs))

    assert ours.status == theirs.status == "OK"
    # Decoupled requests interleave as they please; the responses of each have an order.
    assert {request.id: ours.of(request.id) for request in requests} == {
        request.id: theirs.of(request.id) for request in requests
    }
    assert len(ours.responses) == len(theirs.responses)


def test_responses_of_ordinary_models_come_in_order(pair: Pair, stub: Callable[[str], Any]) -> None:
    requests = SCRIPTS["ordinary requests"]

    ours, theirs = (say(stub(server.grpc), requests) for server in (pair.ours, pair.theirs))

    assert ours.responses == theirs.responses


@pytest.mark.parametrize(
    ("request_", "status"),
    [(seen("a", model="none"), "NOT_FOUND"), (seen("a", name="X"), "INVALID_ARGUMENT")],
    ids=["an unknown model", "an unknown input"],
)
def test_with_grpc_errors_a_refused_request_is_the_status_here_and_a_message_there(
    pair: Pair, stub: Callable[[str], Any], request_: pb.ModelInferRequest, status: str
) -> None:
    metadata = (("triton_grpc_error", "true"),)

    ours, theirs = (say(stub(server.grpc), [request_], metadata) for server in (pair.ours, pair.theirs))

    assert (ours, theirs) == (Said([], status), Said([("a", "", "", True, True, [])], "OK"))


def test_with_grpc_errors_a_stream_without_errors_is_the_same(pair: Pair, stub: Callable[[str], Any]) -> None:
    metadata = (("triton_grpc_error", "true"),)

    ours, theirs = (say(stub(server.grpc), [repeat("a", 2)], metadata) for server in (pair.ours, pair.theirs))

    assert ours == theirs


@pytest.mark.parametrize("value", ["false", "1", "True"])
def test_only_true_asks_for_grpc_errors(pair: Pair, stub: Callable[[str], Any], value: str) -> None:
    metadata = (("triton_grpc_error", value),)

    ours, theirs = (say(stub(server.grpc), [seen("a", model="none")], metadata) for server in (pair.ours, pair.theirs))

    assert ours == theirs


def test_a_decoupled_model_with_several_responses_has_no_answer_over_model_infer(pair: Pair, same_grpc: Any) -> None:
    assert same_grpc(pair, "ModelInfer", repeat("a", 2)) == "UNIMPLEMENTED"


def test_with_grpc_errors_the_error_of_a_response_is_the_status(pair: Pair, stub: Callable[[str], Any]) -> None:
    metadata = (("triton_grpc_error", "true"),)

    # Last in this file: Triton 2.51 may end when a model still answers on a call that is over.
    ours, theirs = (say(stub(server.grpc), [repeat("a", 2, 1)], metadata) for server in (pair.ours, pair.theirs))

    assert ours == theirs
