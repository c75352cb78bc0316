"""Restricted APIs and forwarded headers on both servers."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tests.support.models import answering, write_model
from tests.support.peers import Pair
from tritonclient.grpc import service_pb2 as pb

MODEL = answering("np.array([request.parameters().encode()], object)", "PARAMETERS")
CONFIG = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "PARAMETERS" data_type: TYPE_STRING dims: [ -1 ] }
"""
INFER = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [1]}]}
FLAGS = [
    "--http-header-forward-pattern=^(my_|x-)",
    "--grpc-header-forward-pattern=^(my_|x-)",
    "--http-restricted-api=model-repository,statistics:X-Key=secret",
    "--http-restricted-api=health,metadata,model-config,shared-memory,trace,logging:X-Other=s=e:cret",
    "--grpc-restricted-protocol=model-repository,statistics:key=secret",
    "--grpc-restricted-protocol=health,metadata,model-config,shared-memory,trace,logging:other=s=e:cret",
]
HTTP_PARTS = [
    ("GET", "/v2", "x-other"),
    ("GET", "/v2/health/live", "x-other"),
    ("GET", "/v2/health/ready", "x-other"),
    ("GET", "/v2/models/parameters", "x-other"),
    ("GET", "/v2/models/parameters/versions/1", "x-other"),
    ("GET", "/v2/models/parameters/ready", "x-other"),
    ("GET", "/v2/models/parameters/config", "x-other"),
    ("GET", "/v2/models/parameters/stats", "x-key"),
    ("GET", "/v2/models/stats", "x-key"),
    ("POST", "/v2/repository/index", "x-key"),
    ("POST", "/v2/repository/models/none/load", "x-key"),
    ("POST", "/v2/repository/models/none/unload", "x-key"),
    ("GET", "/v2/systemsharedmemory/status", "x-other"),
    ("GET", "/v2/systemsharedmemory/region/r/status", "x-other"),
    ("POST", "/v2/systemsharedmemory/region/r/register", "x-other"),
    ("POST", "/v2/systemsharedmemory/region/r/unregister", "x-other"),
    ("POST", "/v2/systemsharedmemory/unregister", "x-other"),
    ("GET", "/v2/cudasharedmemory/status", "x-other"),
    ("GET", "/v2/trace/setting", "x-other"),
    ("GET", "/v2/models/parameters/trace/setting", "x-other"),
    ("GET", "/v2/logging", "x-other"),
]
GRPC_PARTS = [
    ("ServerLive", "other"),
    ("ServerReady", "other"),
    ("ModelReady", "other"),
    ("ServerMetadata", "other"),
    ("ModelMetadata", "other"),
    ("ModelConfig", "other"),
    ("ModelStatistics", "key"),
    ("RepositoryIndex", "key"),
    ("RepositoryModelLoad", "key"),
    ("RepositoryModelUnload", "key"),
    ("SystemSharedMemoryStatus", "other"),
    ("SystemSharedMemoryRegister", "other"),
    ("SystemSharedMemoryUnregister", "other"),
    ("CudaSharedMemoryStatus", "other"),
    ("CudaSharedMemoryRegister", "other"),
    ("CudaSharedMemoryUnregister", "other"),
    ("TraceSetting", "other"),
    ("LogSettings", "other"),
]
VALUES = {"x-key": "secret", "x-other": "s=e:cret", "key": "secret", "other": "s=e:cret"}


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "parameters", MODEL, config=CONFIG)
    started: Pair = start_pair(folder, *FLAGS, ours=("--allow-client-shm=true",))
    return started


@pytest.mark.parametrize(("method", "path", "header"), HTTP_PARTS)
def test_a_restricted_route_asks_for_its_header(pair: Pair, method: str, path: str, header: str) -> None:
    for headers in ({}, {header: "wrong"}, {header: VALUES[header].upper()}):
        ours, theirs = pair.ask(method, path, b"", headers)
        assert (ours.status, theirs.status) == (403, 403)
        assert ours.document == theirs.document
    ours, theirs = pair.ask(method, path, b"", {header: VALUES[header]})
    assert 403 not in (ours.status, theirs.status)


@pytest.mark.parametrize(("method", "key"), GRPC_PARTS)
def test_a_restricted_method_asks_for_its_header(pair: Pair, stub: Callable[[str], Any], method: str, key: str) -> None:
    request = getattr(pb, f"{method}Request")()
    for metadata in ((), ((f"triton-grpc-protocol-{key}", "wrong"),), ((key, VALUES[key]),)):
        sentences = set()
        for server in (pair.ours, pair.theirs):
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub(server.grpc), method)(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            sentences.add(caught.value.details())
        assert len(sentences) == 1
    metadata = ((f"triton-grpc-protocol-{key}", VALUES[key]),)
    for server in (pair.ours, pair.theirs):
        assert "restricted" not in complaint(getattr(stub(server.grpc), method), request, metadata)


def complaint(call: Any, request: Any, metadata: Any) -> str:
    """What a call fails with, "" where it does not."""
    try:
        call(request, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.details())
    return ""


def test_what_is_not_restricted_is_open(pair: Pair, same_http: Any) -> None:
    assert same_http(pair, "POST", "/v2/models/parameters/infer", INFER).status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"my_header": "a"}, {"X-User": "ann", "other": "b"}, {"x-a": "1", "MY_B": "2"}, {"not-x-but": "1"}],
)
def test_headers_are_forwarded_over_http(pair: Pair, same_http: Any, headers: dict[str, str]) -> None:
    same_http(pair, "POST", "/v2/models/parameters/infer", INFER, headers)


def test_a_header_beside_a_parameter_of_that_name_is_what_a_model_reads(pair: Pair) -> None:
    # Triton hands on both, and the reader of the JSON keeps the last.
    document = {**INFER, "parameters": {"X-User": "body"}}
    answers = pair.ask("POST", "/v2/models/parameters/infer", document, {"X-User": "header"})

    assert [json.loads(a.document["outputs"][0]["data"][0]) for a in answers] == [{"X-User": "header"}] * 2


@pytest.mark.parametrize("name", ["my_header", "x-user", "other"])
def test_headers_are_forwarded_over_grpc(pair: Pair, stub: Callable[[str], Any], name: str) -> None:
    message = pb.ModelInferRequest(model_name="parameters", raw_input_contents=[bytes(4)])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1])

    answers = [
        stub(server.grpc).ModelInfer(message, metadata=((name, "v"),)).raw_output_contents[0]
        for server in (pair.ours, pair.theirs)
    ]

    assert answers[0] == answers[1]
