"""Load reports of real servers, from one process and from front ends in processes of their own."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, eventually

from charonia.client import Client
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.schema.pool import message_class
from charonia.server.front_ends.link import LOAD_AGE_NS
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_codec import GrpcEncoder
from charonia.wire.transport import RequestForm, WireOptions

SLOW = """
parameters { key: "execute_delay_ms" value { string_value: "400" } }
instance_group [ { count: 2 } ]
"""
LONG = """
parameters { key: "execute_delay_ms" value { string_value: "2000" } }
instance_group [ { count: 4 } ]
"""
ROW = np.zeros((1, 16), np.float32)
BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}]}
FORMAT, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=SHAPES)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServeProcess]:
    write_model(folder, "quick", b"", config=identity_pbtxt())
    write_model(folder, "slow", b"", config=identity_pbtxt() + SLOW)
    write_model(folder, "long", b"", config=identity_pbtxt() + LONG)
    held = identity_pbtxt("python") + "instance_group { count: 4 kind: KIND_CPU }"
    write_model(folder, "held", gated(PYTHON_IDENTITY), config=held)
    with ServeProcess(folder, *request.param) as server:
        yield server


def post(server: ServeProcess, path: str, body: object, **headers: str) -> Any:
    return urlopen(Request(f"http://{server.http}{path}", json.dumps(body).encode(), headers))


def load(server: ServeProcess) -> dict[str, float]:
    document = server.ask("/v2/load")
    return {"application_utilization": document["application_utilization"], **document["named_metrics"]}


@pytest.fixture
def busy(server: ServeProcess, folder: Path) -> Iterator[Gate]:
    """Five requests are at a model until its gate is opened."""

    def call() -> None:
        client.infer("held", {"INPUT0": ROW})

    with Client(server.http) as client:
        callers = [threading.Thread(target=call) for _ in range(5)]
        with Gate(folder / "held" / "1").closed() as gate:
            for caller in callers:
                caller.start()
            assert eventually(lambda: load(server)["requests_in_flight"] == 5)
            yield gate
        for caller in callers:
            caller.join()


def test_the_load_is_told_apart_from_requests(server: ServeProcess) -> None:
    wanted = {"requests_in_flight": 6, "queue_depth": 2, "instances_busy": 4, "application_utilization": 1.0}
    with Client(server.http) as client:
        callers = [threading.Thread(target=client.infer, args=("long", {"INPUT0": ROW})) for _ in range(6)]
        for caller in callers:
            caller.start()
        are_told = eventually(lambda: wanted.items() <= load(server).items(), 10)
        for caller in callers:
            caller.join()

    assert are_told


@pytest.mark.parametrize("form", ["text", "json", "bin"])
def test_a_response_over_http_has_the_engines_load(server: ServeProcess, busy: Gate, form: str) -> None:
    with post(server, "/v2/models/slow/infer", BODY, **{FORMAT: form}) as answer:
        report = answer.headers[REPORT]

    assert report.startswith(form.upper() + " ")
    if form == "json":
        named = json.loads(report[5:])["named_metrics"]
        assert named["instances"] >= 3
        assert named["requests_in_flight"] >= 5


def test_a_report_in_a_response_is_not_from_before_the_request(server: ServeProcess, busy: Gate) -> None:
    reported = []
    for is_open in (False, True):
        if is_open:
            busy.open()
            assert eventually(lambda: load(server)["requests_in_flight"] == 0)
        time.sleep(LOAD_AGE_NS / 1e9)  # a report may be as old as this, and each front end has its own
        with post(server, "/v2/models/quick/infer", BODY, **{FORMAT: "json"}) as answer:
            reported.append(json.loads(answer.headers[REPORT][5:])["named_metrics"]["requests_in_flight"])

    assert reported == [5, 0]


def test_without_the_header_and_with_an_unknown_format_there_is_no_report(server: ServeProcess) -> None:
    with post(server, "/v2/models/quick/infer", BODY) as answer:
        assert REPORT not in answer.headers
    with post(server, "/v2/models/quick/infer", BODY, **{FORMAT: "xml"}) as answer:
        assert REPORT not in answer.headers


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_generated_responses_have_it_too(server: ServeProcess, route: str) -> None:
    body = {"INPUT0": [[0.0] * 16]}
    with post(server, f"/v2/models/slow/{route}", body, **{FORMAT: "text"}) as answer:
        assert "named_metrics.queue_depth=" in answer.headers[REPORT]


def metadata_of(call: Any) -> dict[str, Any]:
    return dict(call.trailing_metadata())


def test_calls_over_grpc_have_it_as_a_trailer(server: ServeProcess) -> None:
    request = InferRequest("slow", {"INPUT0": Tensor("INPUT0", DataType.FP32, ROW)})
    encoder = GrpcEncoder(parse_url(f"grpc://{server.grpc}"), WireOptions())
    message = b"".join(encoder.infer(request, RequestForm()).pieces)[5:]
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        _, call = infer.with_call(message, metadata=[(FORMAT, "text")])
        assert "named_metrics.queue_depth=" in metadata_of(call)[REPORT]
        # grpcio keeps the trailer of the binary form for itself.
        _, call = infer.with_call(message, metadata=[(FORMAT, "bin")])
        assert REPORT not in metadata_of(call)
        _, call = infer.with_call(message)
        assert REPORT not in metadata_of(call)

        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = stream(iter([message]), metadata=[(FORMAT, "json")])
        assert len(list(answers)) == 1
        assert metadata_of(answers)[REPORT].startswith("JSON ")


def test_errors_have_it_too(server: ServeProcess) -> None:
    with pytest.raises(HTTPError) as refused:
        post(server, "/v2/models/slow/infer", {"inputs": []}, **{FORMAT: "json"})
    with refused.value as error:
        assert error.headers[REPORT].startswith("JSON ")

    request = InferRequest("unknown", {"INPUT0": Tensor("INPUT0", DataType.FP32, ROW)})
    encoder = GrpcEncoder(parse_url(f"grpc://{server.grpc}"), WireOptions())
    message = b"".join(encoder.infer(request, RequestForm()).pieces)[5:]
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as failed:
            infer(message, metadata=[(FORMAT, "json")])
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        assert metadata_of(failed.value)[REPORT].startswith("JSON ")


def test_reports_are_streamed_out_of_band(server: ServeProcess, busy: Gate) -> None:
    request: Any = message_class("xds.service.orca.v3.OrcaLoadReportRequest")()
    request.report_interval.nanos = 100_000_000
    with grpc.insecure_channel(server.grpc) as channel:
        watch = channel.unary_stream("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics")
        reports = watch(request.SerializeToString(), timeout=200)
        seen = []
        for data in reports:
            report: Any = message_class("xds.data.orca.v3.OrcaLoadReport").FromString(data)
            seen.append(report.named_metrics["requests_in_flight"])
            busy.open()
            if len(seen) > 1 and seen[-1] == 0:
                break
        reports.cancel()

    assert seen[0] == 5


def test_a_server_stops_though_reports_are_streamed(tmp_path: Path) -> None:
    write_model(tmp_path, "quick", b"", config=identity_pbtxt())
    with (
        ServeProcess(tmp_path, "--exit-timeout-secs=1000") as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        reports = channel.unary_stream("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics")(b"")
        next(reports)
        assert server.stop() == 0  # long before its time limit
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            list(reports)


def test_the_metrics_are_chosen_by_an_option(tmp_path: Path) -> None:
    write_model(tmp_path, "quick", b"", config=identity_pbtxt())
    with (
        ServeProcess(tmp_path, "--load-metrics=queue_depth,instances") as server,
        post(server, "/v2/models/quick/infer", BODY, **{FORMAT: "text"}) as answer,
    ):
        assert answer.headers[REPORT] == "TEXT named_metrics.queue_depth=0, named_metrics.instances=1"
