"""The protocol's own requests."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from tests.support.models import PYTHON_IDENTITY, write_model
from tests.support.peers import Pair, once_counted
from tritonclient.grpc import service_pb2 as pb

BATCHED = """\
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" } ]
"""
PLAIN = """\
backend: "python"
input [ {{ name: "INPUT0" data_type: {0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {0} dims: [ -1 ] }} ]
"""
FAILING = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("no", pb_utils.TritonError.{0})
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    (write_model(folder, "batched", PYTHON_IDENTITY, config=BATCHED) / "labels.txt").write_text("cat\ndog\nowl\n")
    for name, datatype in (
        ("numbers", "FP32"),
        ("text", "STRING"),
        ("flags", "BOOL"),
        ("whole", "INT64"),
        ("half", "FP16"),
    ):
        write_model(folder, name, PYTHON_IDENTITY, config=PLAIN.format(f"TYPE_{datatype}"))
    for code in CODES:
        write_model(folder, f"fails_{code.lower()}", FAILING.format(code), config=PLAIN.format("TYPE_FP32"))
    write_model(folder, "two", PYTHON_IDENTITY, config=PLAIN.format("TYPE_FP32"), version=1)
    write_model(folder, "two", PYTHON_IDENTITY, config=PLAIN.format("TYPE_FP32"), version=3)
    started: Pair = start_pair(folder, "--model-control-mode=explicit", "--load-model=*", ours=("--allow-page=false",))
    return started


def document(shape: list[int], data: object, datatype: str = "FP32", **more: object) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": datatype, "data": data}], **more}


READS = (
    "/v2/models/batched",
    "/v2/models/batched/versions/1",
    "/v2/models/batched/versions/2",
    "/v2/models/two",
    "/v2/models/two/versions/1/ready",
    "/v2/models/none",
    "/v2/models/none/config",
    "/v2/models/none/stats",
    "/v2/models/none/ready",
    "/v2/models/batched/versions/x",
    "/v2/models/batched/versions/x/ready",
    "/v2/models/batched/infer",
    "/v2/nothing",
    "/v3",
    "/",
)


HEALTH = (
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/batched/ready",
    "/v2/models/two/versions/3/ready",
)


@pytest.mark.parametrize("path", HEALTH)
def test_health_is_the_same(pair: Pair, path: str) -> None:
    ours, theirs = pair.ask("GET", path)

    assert (ours.status, theirs.status, ours.body, theirs.body) == (200, 200, b"", b"")


@pytest.mark.parametrize("path", READS)
def test_what_is_read_is_the_same(pair: Pair, same_http: Any, path: str) -> None:
    same_http(pair, "GET", path)


def test_the_servers_say_the_same_of_themselves_but_for_name_and_version(pair: Pair, same_http: Any) -> None:
    same_http(pair, "GET", "/v2", lenient=["name", "version", "extensions"])
    ours, theirs = (set(answer.document["extensions"]) for answer in pair.ask("GET", "/v2"))
    assert (theirs - ours, ours - theirs - {"compiled"}) == (set(), {"charonia"})


@pytest.mark.parametrize("model", ["batched", "numbers", "text", "two"])
def test_a_completed_configuration_is_the_same(pair: Pair, same_http: Any, model: str) -> None:
    same_http(pair, "GET", f"/v2/models/{model}/config")


def test_the_index_is_the_same(pair: Pair) -> None:
    ours, theirs = pair.ask("POST", "/v2/repository/index", {})
    ready, ready_theirs = pair.ask("POST", "/v2/repository/index", {"ready": True})

    def ordered(entries: Any) -> Any:
        return sorted(entries, key=lambda entry: (entry["name"], entry.get("version", "")))

    assert ordered(ours.document) == ordered(theirs.document)
    assert ordered(ready.document) == ordered(ready_theirs.document)


GOOD: dict[str, tuple[str, Any]] = {
    "flat data": ("numbers", document([3], [1, 2.5, -3])),
    "nested data": ("batched", document([2, 2], [[1, 2], [3, 4]])),
    "an id": ("numbers", document([1], [1], id="abc")),
    "no elements": ("numbers", document([0], [])),
    "text": ("text", document([2], ["a", "ü€"], "BYTES")),
    "booleans": ("flags", document([2], [True, False], "BOOL")),
    "large whole numbers": ("whole", document([2], [2**63 - 1, -(2**63)], "INT64")),
    "an output by name": ("numbers", document([1], [1], outputs=[{"name": "OUTPUT0"}])),
    "a version": ("two/versions/3", document([1], [1])),
    "classes": (
        "batched",
        document([2, 3], [1, 9, 5, 3, 2, 1], outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2}}]),
    ),
    "more classes than there are": (
        "batched",
        document([1, 3], [1, 9, 5], outputs=[{"name": "OUTPUT0", "parameters": {"classification": 9}}]),
    ),
    "parameters": ("numbers", document([1], [1], parameters={"a": 1, "b": "x", "c": True, "d": 0.5})),
    "priority and timeout": ("numbers", document([1], [1], parameters={"priority": 1, "timeout": 1000000})),
}


@pytest.mark.parametrize("case", GOOD)
def test_an_inference_in_json_is_the_same(pair: Pair, same_http: Any, case: str) -> None:
    model, body = GOOD[case]

    answer = same_http(pair, "POST", f"/v2/models/{model}/infer", body)

    assert answer.status == 200


BAD: dict[str, tuple[str, Any]] = {
    "an input without data": ("numbers", {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32"}]}),
    "another type": ("numbers", document([1], [1], "INT32")),
    "no type": ("numbers", document([1], [1], "FLOAT")),
    "another rank": ("numbers", document([1, 1], [1])),
    "no batch": ("batched", document([0, 2], [])),
    "too large a batch": ("batched", document([9, 1], list(range(9)))),
    "no batch dimension": ("batched", document([3], [1, 2, 3])),
    "an unknown input": ("numbers", {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}]}),
    "an input twice": ("numbers", {"inputs": document([1], [1])["inputs"] * 2}),
    "an unknown output": ("numbers", document([1], [1], outputs=[{"name": "X"}])),
    "a reserved parameter": ("numbers", document([1], [1], parameters={"triton_x": 1})),
    "an unknown model": ("none", document([1], [1])),
    "an unknown version": ("numbers/versions/9", document([1], [1])),
    "a version that is not served": ("two/versions/1", document([1], [1])),
    "half precision in JSON": ("half", document([1], [1], "FP16")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_inference_gets_the_same_status(pair: Pair, same_http: Any, case: str) -> None:
    model, body = BAD[case]

    answer = same_http(pair, "POST", f"/v2/models/{model}/infer", body)

    assert answer.status >= 400
    assert answer.document["error"]


FAULTS_OF_THE_CALLER: dict[str, tuple[str, Any, int]] = {
    "no JSON": (*("numbers", b"{"), 500),
    "nothing": (*("numbers", b""), 200),
    "a list": (*("numbers", []), 500),
    "no inputs": (*("numbers", {}), 500),
    "inputs that are no list": (*("numbers", {"inputs": 3}), 500),
    "an input without a name": (*("numbers", {"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]}), 500),
    "an input without a shape": (*("numbers", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "data": [1]}]}), 500),
    "an input without a type": (*("numbers", {"inputs": [{"name": "INPUT0", "shape": [1], "data": [1]}]}), 500),
    "too little data": (*("numbers", document([3], [1])), 500),
    "too much data": (*("numbers", document([1], [1, 2, 3])), 500),
    "text for numbers": (*("numbers", document([1], ["x"])), 500),
    "a negative size": (*("numbers", document([-1], [1])), 500),
    "an output twice": (*("numbers", document([1], [1], outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT0"}])), 200),
}


@pytest.mark.parametrize("case", FAULTS_OF_THE_CALLER)
def test_a_fault_of_the_caller_is_400_where_triton_calls_it_its_own_or_lets_it_pass(pair: Pair, case: str) -> None:
    model, body, status = FAULTS_OF_THE_CALLER[case]

    ours, theirs = pair.ask("POST", f"/v2/models/{model}/infer", body)

    assert (ours.status, theirs.status) == (400, status)
    assert ours.document["error"]


@pytest.mark.parametrize(("name", "version"), [("none", ""), ("", ""), ("batched", "7"), ("batched", "x")])
def test_a_model_that_is_not_there_is_not_ready(pair: Pair, same_grpc: Any, name: str, version: str) -> None:
    same_grpc(pair, "ModelReady", pb.ModelReadyRequest(name=name, version=version))


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_a_model_has_the_same_status(pair: Pair, same_http: Any, same_grpc: Any, code: str) -> None:
    model = f"fails_{code.lower()}"

    over_http = same_http(pair, "POST", f"/v2/models/{model}/infer", document([1], [1]))
    over_grpc = same_grpc(pair, "ModelInfer", grpc_request(model))

    assert over_http.status >= 400
    assert isinstance(over_grpc, str)


def binary(document: dict[str, Any], *blobs: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(document).encode()
    return b"".join([head, *blobs]), {"Inference-Header-Content-Length": str(len(head))}


def described(shape: list[int], size: int, datatype: str = "FP32", **more: object) -> dict[str, Any]:
    return {
        "inputs": [{"name": "INPUT0", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}],
        **more,
    }


BINARY: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "numbers": ("numbers", described([2], 8), struct.pack("<2f", 1, 2)),
    "binary answers": ("numbers", described([2], 8, parameters={"binary_data_output": True}), struct.pack("<2f", 1, 2)),
    "half precision": (
        "half",
        described([2], 4, "FP16", parameters={"binary_data_output": True}),
        np.array([1, 2], "<f2").tobytes(),
    ),
    "half precision answered in JSON": ("half", described([2], 4, "FP16"), np.array([1, 2], "<f2").tobytes()),
    "text": ("text", described([1], 6, "BYTES"), struct.pack("<I", 2) + b"hi"),
    "bytes missing": ("numbers", described([2], 8), b"1234"),
    "bytes left over": ("numbers", described([2], 8), b"0" * 12),
    "another size than the shape": ("numbers", described([2], 12), b"0" * 12),
    "text cut short": ("text", described([1], 6, "BYTES"), struct.pack("<I", 9) + b"hi"),
    "fewer texts than the shape": ("text", described([2], 6, "BYTES"), struct.pack("<I", 2) + b"hi"),
}


@pytest.mark.parametrize("case", BINARY)
def test_binary_tensors_are_the_same(pair: Pair, same_http: Any, case: str) -> None:
    model, head, blob = BINARY[case]
    body, headers = binary(head, blob)
    ours, theirs = pair.ask("POST", f"/v2/models/{model}/infer", body, headers)

    same_http(pair, "POST", f"/v2/models/{model}/infer", body, headers)

    if ours.status == 200:
        assert (
            ours.body[int(ours.headers.get("inference-header-content-length", 0)) :]
            == (theirs.body[int(theirs.headers.get("inference-header-content-length", 0)) :])
            or "inference-header-content-length" not in ours.headers
        )


@pytest.mark.parametrize("length", ["x", "-1", "99999"])
def test_a_wrong_header_length_gets_the_same_status(pair: Pair, same_http: Any, length: str) -> None:
    body, _ = binary(described([2], 8), b"0" * 8)

    same_http(pair, "POST", "/v2/models/numbers/infer", body, {"Inference-Header-Content-Length": length})


def test_a_raw_binary_request_is_the_same(pair: Pair, same_http: Any) -> None:
    same_http(
        pair, "POST", "/v2/models/batched/infer", struct.pack("<3f", 1, 2, 3), {"Inference-Header-Content-Length": "0"}
    )


def grpc_request(model: str, **more: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, **more)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[2])
    request.raw_input_contents.append(struct.pack("<2f", 1, 2))
    return request


def _typed_contents() -> Any:
    request = pb.ModelInferRequest(model_name="numbers")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    return request


def _both_contents() -> Any:
    request = grpc_request("numbers")
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    return request


def _changed(change: str) -> Any:
    request = grpc_request("numbers")
    match change:
        case "short":
            request.raw_input_contents[0] = b"1234"
        case "type":
            request.inputs[0].datatype = "INT32"
        case "name":
            request.inputs[0].name = "X"
        case "shape":
            request.inputs[0].shape[:] = [2, 1]
        case "none":
            del request.inputs[:]
        case "output":
            request.outputs.add(name="X")
        case "version":
            request.model_version = "9"
    return request


CALLS: dict[str, tuple[str, Any]] = {
    "live": ("ServerLive", pb.ServerLiveRequest()),
    "ready": ("ServerReady", pb.ServerReadyRequest()),
    "model ready": ("ModelReady", pb.ModelReadyRequest(name="two")),
    "metadata": ("ModelMetadata", pb.ModelMetadataRequest(name="batched")),
    "metadata of a version that is not there": ("ModelMetadata", pb.ModelMetadataRequest(name="batched", version="7")),
    "unknown metadata": ("ModelMetadata", pb.ModelMetadataRequest(name="none")),
    "config": ("ModelConfig", pb.ModelConfigRequest(name="batched")),
    "unknown config": ("ModelConfig", pb.ModelConfigRequest(name="none")),
    "unknown statistics": ("ModelStatistics", pb.ModelStatisticsRequest(name="none")),
    "raw contents": ("ModelInfer", grpc_request("numbers", id="7")),
    "typed contents": ("ModelInfer", _typed_contents()),
    "raw and typed contents": ("ModelInfer", _both_contents()),
    "unknown model": ("ModelInfer", grpc_request("none")),
    **{
        f"a wrong {change}": ("ModelInfer", _changed(change))
        for change in ("short", "type", "name", "shape", "none", "output", "version")
    },
    "unload an unknown model": ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="none")),
    "load an unknown model": ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="none")),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_grpc_call_is_the_same(pair: Pair, same_grpc: Any, case: str) -> None:
    method, request = CALLS[case]

    same_grpc(pair, method, request)


def test_counts_after_the_same_requests_are_the_same(pair: Pair) -> None:
    for _ in range(3):
        pair.ask("POST", "/v2/models/whole/infer", document([2], [1, 2], "INT64"))
    pair.ask("POST", "/v2/models/whole/infer", document([2], [1, 2], "FP32"))

    def counted() -> tuple[dict[str, Any], dict[str, Any]]:
        ours, theirs = (
            without_measured(answer.document["model_stats"][0]) for answer in pair.ask("GET", "/v2/models/whole/stats")
        )
        # A request that breaks the configuration is a failed request here; Triton does not count it.
        failed = [entry["inference_stats"].pop("fail")["count"] for entry in (ours, theirs)]
        assert failed == [1, 0]
        return ours, theirs

    ours, theirs = once_counted(counted)
    assert ours == theirs


def without_measured(entry: Any) -> Any:
    """Return statistics with 0 for whatever is measured: times, and memory."""
    if isinstance(entry, dict):
        measured = {"ns", "last_inference", "memory_usage"}
        return {key: 0 if key in measured else without_measured(value) for key, value in entry.items()}
    return [without_measured(value) for value in entry] if isinstance(entry, list) else entry


LOADS: dict[str, tuple[str, Any]] = {
    "an unknown model": ("none/load", {}),
    "an unknown model to unload": ("none/unload", {}),
    "a name with dots": ("../load", {}),
}


@pytest.mark.parametrize("case", LOADS)
def test_loading_gets_the_same_status(pair: Pair, same_http: Any, case: str) -> None:
    path, body = LOADS[case]

    same_http(pair, "POST", f"/v2/repository/models/{path}", body)


IDENTITY_FILE = base64.b64encode(PYTHON_IDENTITY.encode()).decode()
FAILED_POLLS: dict[str, tuple[str, Any]] = {
    "files without a configuration": ("numbers/load", {"parameters": {"file:1/model.py": "eA=="}}),
    "a configuration that is no JSON": ("numbers/load", {"parameters": {"config": "{"}}),
    "a configuration that is wrong": (
        *("made_up/load", {"parameters": {"config": '{"max_batch_size": -1}', "file:1/model.py": IDENTITY_FILE}}),
    ),
    "a name with a slash": ("a%2Fb/load", {}),
}


@pytest.mark.parametrize("case", FAILED_POLLS)
def test_a_load_that_cannot_begin_says_so_at_the_start_and_leaves_the_server_ready(pair: Pair, case: str) -> None:
    path, body = FAILED_POLLS[case]
    before = [answer.status for answer in pair.ask("GET", "/v2/health/ready")]

    ours, theirs = pair.ask("POST", f"/v2/repository/models/{path}", body)

    assert (ours.status, theirs.status) == (500, 500)
    # Triton leaves %2F in the name as it is.
    assert ours.document["error"].startswith(theirs.document["error"].replace("%2F", "/"))
    # Triton is not ready since an earlier test, whose load failed.
    assert [answer.status for answer in pair.ask("GET", "/v2/health/ready")] == before
    assert before[0] == 200
