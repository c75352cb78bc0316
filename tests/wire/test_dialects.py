"""The client's queries over both protocols: what each sends, and what it reads from an answer."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from tests.support.client_servers import identity_request

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.schema.pool import message_class
from charonia.wire.answer import Answer
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_codec import GrpcEncoder
from charonia.wire.grpc_dialect import GrpcDialect
from charonia.wire.http_codec import HttpEncoder
from charonia.wire.http_dialect import HttpDialect
from charonia.wire.query import SharedMemoryRegion
from charonia.wire.transport import RequestForm, WireOptions

ENDPOINT = parse_url("localhost:1/p")
HTTP, GRPC = HttpEncoder(ENDPOINT, WireOptions()), GrpcEncoder(ENDPOINT, WireOptions())
REGION = SharedMemoryRegion("r", "/k", 64, 8)
MODEL = {"name": "m", "version": "2"}

Ask = Callable[[Any], Any]
# Each query, the line and the body of its HTTP request, and the method and the message of its gRPC call.
QUERIES: list[tuple[Ask, str, Any, str, dict[str, Any]]] = [
    (lambda d: d.live(), "GET /v2/health/live", None, "ServerLive", {}),
    (lambda d: d.ready(), "GET /v2/health/ready", None, "ServerReady", {}),
    (lambda d: d.model_ready("m", "2"), "GET /v2/models/m/versions/2/ready", None, "ModelReady", MODEL),
    (lambda d: d.server_metadata(), "GET /v2", None, "ServerMetadata", {}),
    (lambda d: d.model_metadata("m", ""), "GET /v2/models/m", None, "ModelMetadata", {"name": "m"}),
    (lambda d: d.model_config("m", "2"), "GET /v2/models/m/versions/2/config", None, "ModelConfig", MODEL),
    (lambda d: d.model_config("m", 2), "GET /v2/models/m/versions/2/config", None, "ModelConfig", MODEL),
    (lambda d: d.statistics("m", "2"), "GET /v2/models/m/versions/2/stats", None, "ModelStatistics", MODEL),
    (lambda d: d.statistics("", ""), "GET /v2/models/stats", None, "ModelStatistics", {}),
    (lambda d: d.index(True), "POST /v2/repository/index", {"ready": True}, "RepositoryIndex", {"ready": True}),
    (lambda d: d.index(False), "POST /v2/repository/index", {}, "RepositoryIndex", {}),
    (
        lambda d: d.load("m", "{}", {"1/a": b"\xff"}),
        "POST /v2/repository/models/m/load",
        {"parameters": {"file:1/a": "/w==", "config": "{}"}},
        "RepositoryModelLoad",
        {"modelName": "m", "parameters": {"file:1/a": {"bytesParam": "/w=="}, "config": {"stringParam": "{}"}}},
    ),
    (lambda d: d.load("m", "", {}), "POST /v2/repository/models/m/load", {}, "RepositoryModelLoad", {"modelName": "m"}),
    (
        lambda d: d.unload("m", True),
        "POST /v2/repository/models/m/unload",
        {"parameters": {"unload_dependents": True}},
        "RepositoryModelUnload",
        {"modelName": "m", "parameters": {"unload_dependents": {"boolParam": True}}},
    ),
    (
        lambda d: d.register(REGION),
        "POST /v2/systemsharedmemory/region/r/register",
        {"key": "/k", "offset": 8, "byte_size": 64},
        "SystemSharedMemoryRegister",
        {"name": "r", "key": "/k", "offset": 8, "byteSize": 64},
    ),
    (
        lambda d: d.unregister("r"),
        "POST /v2/systemsharedmemory/region/r/unregister",
        {},
        "SystemSharedMemoryUnregister",
        {"name": "r"},
    ),
    (lambda d: d.unregister(""), "POST /v2/systemsharedmemory/unregister", {}, "SystemSharedMemoryUnregister", {}),
    (lambda d: d.regions(""), "GET /v2/systemsharedmemory/status", None, "SystemSharedMemoryStatus", {}),
    (lambda d: d.trace_settings("", {}), "GET /v2/trace/setting", None, "TraceSetting", {}),
    (
        lambda d: d.trace_settings("m", {"trace_level": ["A", "B"], "trace_rate": 5, "trace_file": None}),
        "POST /v2/models/m/trace/setting",
        {"trace_level": ["A", "B"], "trace_rate": "5", "trace_file": None},
        "TraceSetting",
        {
            "modelName": "m",
            "settings": {"trace_level": {"value": ["A", "B"]}, "trace_rate": {"value": ["5"]}, "trace_file": {}},
        },
    ),
    (lambda d: d.traffic("m", {}), "GET /v2/models/m/traffic", None, "ModelTraffic", {"modelName": "m"}),
    (
        lambda d: d.traffic("m", {"1": 5}),
        "POST /v2/models/m/traffic",
        {"1": 5},
        "ModelTrafficChange",
        {"modelName": "m", "change": '{"1":5}'},
    ),
    (lambda d: d.reset_traffic("m"), "DELETE /v2/models/m/traffic", None, "ModelTrafficReset", {"modelName": "m"}),
]


@pytest.mark.parametrize(("ask", "line", "body", "method", "fields"), QUERIES)
def test_a_query_is_sent_as_its_protocol_says(
    ask: Ask, line: str, body: Any, method: str, fields: dict[str, Any]
) -> None:
    head, _, content = b"".join(ask(HttpDialect(HTTP)).request.pieces).partition(b"\r\n\r\n")
    call = ask(GrpcDialect(GRPC)).request
    service, kind = ("inference.GRPCInferenceService", f"inference.{method}Request")
    if "Traffic" in method:
        service, kind = "charonia.Traffic", f"charonia.{method.replace('Reset', '')}Request"

    verb, path = line.split()
    length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
    length = length or ("Content-Length: 0\r\n" if verb != "GET" else "")
    assert head.decode() + "\r\n" == f"{verb} /p{path} HTTP/1.1\r\nHost: localhost:1\r\n{length}"
    assert (json.loads(content) if content else None) == body
    assert dict(call.headers)[b":path"] == f"/{service}/{method}".encode()
    framed = b"".join(call.pieces)
    assert framed[:5] == b"\0" + (len(framed) - 5).to_bytes(4, "big")
    assert message_class(kind).FromString(framed[5:]) == ParseDict(fields, message_class(kind)())


TENSOR = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
# Each query, the document of an HTTP answer, the message of a gRPC answer, and what both mean.
ANSWERS: list[tuple[Ask, Any, dict[str, Any], Any]] = [
    (
        lambda d: d.server_metadata(),
        {"name": "s", "version": "1", "extensions": ["a", "b"]},
        {"name": "s", "version": "1", "extensions": ["a", "b"]},
        ServerMetadata("s", "1", ("a", "b")),
    ),
    (lambda d: d.server_metadata(), {}, {}, ServerMetadata("", "", ())),
    (
        lambda d: d.model_metadata("m", ""),
        {"name": "m", "versions": ["1"], "platform": "p", "inputs": [TENSOR], "outputs": [TENSOR]},
        {"name": "m", "versions": ["1"], "platform": "p", "inputs": [TENSOR], "outputs": [TENSOR]},
        ModelMetadata("m", ("1",), "p", *[(TensorMetadata("x", DataType.FP32, (-1, 2)),)] * 2),
    ),
    (lambda d: d.model_metadata("m", ""), {"name": "m"}, {"name": "m"}, ModelMetadata("m", (), "", (), ())),
    (
        lambda d: d.index(False),
        [{"name": "a", "version": "1", "state": "READY"}, {"name": "b", "state": "NEW", "reason": "no"}],
        {"models": [{"name": "a", "version": "1", "state": "READY"}, {"name": "b", "state": "NEW", "reason": "no"}]},
        [ModelIndexEntry("a", "1", ModelState.READY, ""), ModelIndexEntry("b", "", None, "no")],
    ),
    (
        lambda d: d.regions(""),
        [{"name": "r", "key": "/k", "byte_size": 64, "offset": 8}, {"name": "s", "key": "/l", "byte_size": 1}],
        {
            "regions": {
                "r": {"name": "r", "key": "/k", "byteSize": 64, "offset": 8},
                "s": {"name": "s", "key": "/l", "byteSize": 1},
            }
        },
        [REGION, SharedMemoryRegion("s", "/l", 1, 0)],
    ),
    (
        lambda d: d.trace_settings("", {}),
        {"trace_level": ["A", "B"], "trace_rate": "5"},
        {"settings": {"trace_rate": {"value": ["5"]}, "trace_level": {"value": ["A", "B"]}}},
        {"trace_level": ["A", "B"], "trace_rate": "5"},
    ),
    (lambda d: d.traffic("m", {}), {"1": 5}, {"traffic": '{"1":5}'}, {"1": 5}),
    (lambda d: d.load("m", "", {}), {}, {}, None),
]


@pytest.mark.parametrize(("ask", "document", "fields", "expected"), ANSWERS)
def test_an_answer_means_the_same_in_both_protocols(
    ask: Ask, document: Any, fields: dict[str, Any], expected: Any
) -> None:
    http, grpc = Answer(0), Answer(0)
    http.body = json.dumps(document).encode()
    query = ask(GrpcDialect(GRPC))
    path = dict(query.request.headers)[b":path"].decode()
    kind = "charonia.ModelTrafficResponse" if "Traffic" in path else f"inference.{path.rpartition('/')[2]}Response"
    grpc.body = ParseDict(fields, message_class(kind)()).SerializeToString()

    found = query.read(grpc)

    assert ask(HttpDialect(HTTP)).read(http) == expected
    assert sorted(found, key=str) == sorted(expected, key=str) if isinstance(expected, list) else found == expected


@pytest.mark.parametrize(("ready", "model"), [(True, ""), (False, ""), (True, "m")])
def test_readiness_over_grpc_is_a_field(ready: bool, model: str) -> None:
    dialect = GrpcDialect(GRPC)
    answer = Answer(0)
    answer.body = message_class("inference.ServerReadyResponse")(ready=ready).SerializeToString()

    query = dialect.model_ready(model, "") if model else dialect.ready()

    assert (query.read(answer), dialect.live().read(answer)) == (ready, ready)
    assert HttpDialect(HTTP).model_ready("m", "").read(Answer(0)) is True


def test_a_configuration_and_statistics_over_grpc_have_every_field_as_json_does() -> None:
    config, statistics = Answer(0), Answer(0)
    message: Any = message_class("inference.ModelConfigResponse")()
    message.config.input.add(name="x", data_type=11, dims=[2])
    message.config.parameters["k"].string_value = "v"
    message.config.dynamic_batching.SetInParent()
    config.body = message.SerializeToString()
    counts: Any = message_class("inference.ModelStatisticsResponse")()
    counts.model_stats.add(name="m", inference_count=3).inference_stats.success.count = 2
    statistics.body = counts.SerializeToString()

    document = GrpcDialect(GRPC).model_config("m", "").read(config)
    (stats,) = GrpcDialect(GRPC).statistics("m", "").read(statistics)

    assert document["max_batch_size"] == 0
    assert document["input"][0] == {  # type: ignore[index]
        "name": "x",
        "data_type": "TYPE_FP32",
        "format": "FORMAT_NONE",
        "dims": [2],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert document["parameters"] == {"k": {"string_value": "v"}}
    assert "dynamic_batching" in document
    assert "sequence_batching" not in document
    assert (stats["inference_count"], stats["inference_stats"]["success"]) == (3, {"count": 2, "ns": 0})  # type: ignore[index]


@pytest.mark.parametrize("body", [b"[1]", b"{}", b"5", b'{"model_stats":{}}', b'{"model_stats":[1]}'])
def test_an_answer_of_another_kind_is_an_error_of_the_server(body: bytes) -> None:
    answer = Answer(0)
    answer.body = body

    for query in (HttpDialect(HTTP).index(False), HttpDialect(HTTP).statistics("", "")):
        with pytest.raises(ServingError) as caught:
            query.read(answer)
        assert caught.value.code is Code.INTERNAL


def sent(request: InferRequest, form: RequestForm | None = None) -> tuple[Any, bytes]:
    prepared = HTTP.infer(request, form or RequestForm())
    head, _, body = b"".join(prepared.pieces).partition(b"\r\n\r\n")
    fields = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    size = int(fields.get("Inference-Header-Content-Length", len(body)))
    return json.loads(body[:size]), body[size:]


def test_an_inference_over_http_has_everything_that_the_request_has() -> None:
    request = InferRequest(
        "m",
        {"X": Tensor("X", DataType.INT32, np.array([1, 2], np.int32))},
        id="i",
        outputs=(RequestedOutput("Y", 3), RequestedOutput("Z")),
        correlation_id=7,
        flags=SEQUENCE_START,
        priority=2,
        timeout_us=5,
        parameters={"k": True},
    )

    document, data = sent(request)

    assert document == {
        "id": "i",
        "parameters": {
            "k": True,
            "sequence_id": 7,
            "sequence_start": True,
            "sequence_end": False,
            "priority": 2,
            "timeout": 5,
        },
        "inputs": [{"name": "X", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}],
        "outputs": [
            {"name": "Y", "parameters": {"binary_data": True, "classification": 3}},
            {"name": "Z", "parameters": {"binary_data": True}},
        ],
    }
    assert data == np.array([1, 2], "<i4").tobytes()


def test_a_prepared_inference_is_sent_again_to_another_server_or_as_part_of_a_sequence() -> None:
    for encoder in (HTTP, GRPC):
        prepared = encoder.infer(InferRequest("m", identity_request().inputs), RequestForm())
        whole = InferRequest("m", identity_request().inputs, correlation_id=7, flags=SEQUENCE_END)

        assert prepared.to("localhost:1") is prepared
        moved = prepared.to("elsewhere:2")
        assert b"".join(moved.pieces) == b"".join(prepared.pieces).replace(b"localhost:1", b"elsewhere:2")
        assert prepared.with_sequence(7, False, True).pieces == encoder.infer(whole, RequestForm()).pieces
    timed = InferRequest("m", identity_request().inputs, timeout_us=9)
    assert HTTP.infer(InferRequest("m", timed.inputs), RequestForm()).with_timeout(9).pieces == (
        HTTP.infer(timed, RequestForm()).pieces
    )
    assert dict(GRPC.infer(timed, RequestForm()).to("elsewhere:2").headers)[b":authority"] == b"elsewhere:2"
