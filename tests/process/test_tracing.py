"""Traces and settings at run time of a running server, with the stock clients."""

import json
import queue
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.models import chain_pbtxt, identity_pbtxt, streaming, write_model
from tests.support.process import SHAPES, ServeProcess, Shape
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

from charonia.cli import perf
from charonia.cli.perf import ExitStatus

IDENTITY = identity_pbtxt(dims=(2,), max_batch_size=0)
PYTHON = identity_pbtxt("python", dims=(2,), max_batch_size=0)
DECOUPLED = PYTHON + "model_transaction_policy { decoupled: true }"
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            context = request.trace().get_context()
            called = pb_utils.InferenceRequest(
                model_name="echo", requested_output_names=["OUTPUT0"], inputs=request.inputs(), trace=request.trace())
            output = pb_utils.get_output_tensor_by_name(called.exec(), "OUTPUT0")
            answers.append(pb_utils.InferenceResponse([output], parameters={"context": context or ""}))
        return answers
"""
SENDER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VALUES = np.array([1.5, 2], np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_model(made, "echo", "", config=IDENTITY)
    write_model(made, "caller", CALLER, config=PYTHON)
    write_model(made, "streamer", streaming("[array] * 3"), config=DECOUPLED)
    write_model(made, "both", "", config=chain_pbtxt("caller", dims=(2,), max_batch_size=0))
    return made


def infer(client: Any, model: str, kind: Any, **more: Any) -> Any:
    return client.infer(model, [infer_input(kind, "INPUT0", VALUES)], **more)


def traces(path: Path) -> dict[int, dict[str, Any]]:
    """Each trace of a file: its request, the names of its times, its tensors."""
    found: dict[int, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()):
        trace = found.setdefault(entry["id"], {"names": [], "tensors": {}})
        trace |= {key: value for key, value in entry.items() if key not in ("timestamps", "tensor", "activity")}
        trace["names"] += [each["name"] for each in entry.get("timestamps", [])]
        if "tensor" in entry:
            trace["tensors"][entry["activity"]] = entry["tensor"]["data"]
    return found


COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


def through(front: list[str], inside: list[str], back: list[str]) -> list[str]:
    return [*front, "REQUEST_START", "QUEUE_START", *inside, "INFER_RESPONSE_COMPLETE", "REQUEST_END", *back]


HTTP = (["HTTP_RECV_START", "HTTP_RECV_END"], ["HTTP_SEND_START", "HTTP_SEND_END"])
GRPC = (["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"], ["GRPC_SEND_START", "GRPC_SEND_END"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_holds_the_traces_of_both_protocols_and_of_what_models_ask_for(
    repository: Path, tmp_path: Path, shape: Shape
) -> None:
    flags = [f"--trace-config=triton,file={tmp_path / 't.json'}", "--trace-config=rate=1"]
    flags += ["--trace-config=level=TIMESTAMPS", "--trace-config=level=TENSORS", *shape]
    with ServeProcess(repository, *flags) as server:
        with httpclient.InferenceServerClient(server.http) as http:
            infer(http, "both", httpclient, request_id="first")
        with grpcclient.InferenceServerClient(server.grpc) as grpc:
            infer(grpc, "echo", grpcclient, headers={"traceparent": SENDER})
        assert server.stop() == 0

    found = traces(tmp_path / "t.json")
    assert [(t["model_name"], t.get("request_id"), t.get("parent_id")) for t in found.values()] == [
        ("both", "first", None),
        ("caller", "first", 1),
        ("echo", None, 2),
        ("echo", None, None),
    ]
    assert found[1]["names"] == through(HTTP[0], [], HTTP[1])
    assert found[2]["names"] == found[3]["names"] == through([], COMPUTED, [])
    assert found[4]["names"] == through(GRPC[0], COMPUTED, GRPC[1])
    assert found[4]["tensors"] == dict.fromkeys(("TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"), "1.5,2")


def test_every_response_of_a_stream_is_noted(repository: Path, tmp_path: Path) -> None:
    flags = [f"--trace-file={tmp_path / 't.json'}", "--trace-rate=1", "--trace-level=TIMESTAMPS"]
    with ServeProcess(repository, *flags) as server:
        answers: queue.Queue[Any] = queue.Queue()
        with grpcclient.InferenceServerClient(server.grpc) as grpc:
            grpc.start_stream(lambda result, error: answers.put(error or result))
            grpc.async_stream_infer("streamer", [infer_input(grpcclient, "INPUT0", VALUES)])
            for _ in range(3):
                answers.get(timeout=200)
            grpc.stop_stream()
        body = json.dumps({"INPUT0": [1, 2]}).encode()
        url = f"http://{server.http}/v2/models/streamer/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            assert response.read().count(b"data:") == 3
        assert server.stop() == 0

    over_grpc, over_http = traces(tmp_path / "t.json").values()
    for trace, (front, back) in ((over_grpc, GRPC), (over_http, HTTP)):
        assert trace["names"][:2] == front
        assert [trace["names"].count(name) for name in ("INFER_RESPONSE_COMPLETE", *back)] == [3, 3, 3]


@pytest.mark.parametrize("shape", SHAPES)
def test_settings_are_changed_over_both_protocols_and_files_follow(
    repository: Path, tmp_path: Path, shape: Shape
) -> None:
    flags = (f"--trace-config=triton,file={tmp_path / 't'}", "--trace-config=rate=7", *shape)
    with ServeProcess(repository, *flags) as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            start = http.get_trace_settings()
            assert start == {
                "trace_level": ["OFF"],
                "trace_rate": "7",
                "trace_count": "-1",
                "log_frequency": "0",
                "trace_file": str(tmp_path / "t"),
                "trace_mode": "triton",
            }
            changed = http.update_trace_settings("echo", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
            assert (changed["trace_level"], changed["trace_rate"]) == (["TIMESTAMPS"], "1")
            grpc.update_trace_settings("echo", {"log_frequency": "2"})
            for _ in range(3):
                infer(http, "echo", httpclient)
                infer(http, "caller", httpclient)
            cleared = dict.fromkeys(("trace_level", "trace_rate", "log_frequency"))
            assert grpc.update_trace_settings("echo", cleared, as_json=True) == grpc.get_trace_settings(as_json=True)
            assert http.get_trace_settings("echo") == start
            infer(http, "echo", httpclient)
        assert server.stop() == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1"]
    assert [len(traces(tmp_path / name)) for name in ("t.0", "t.1")] == [2, 1]
    assert {t["model_name"] for t in traces(tmp_path / "t.0").values()} == {"echo"}


def test_what_cannot_be_set_is_refused_with_the_right_status(repository: Path) -> None:
    with (
        ServeProcess(repository) as server,
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        for model, settings, over_http, over_grpc in (
            (None, {"trace_file": "x"}, "501", "StatusCode.UNIMPLEMENTED"),
            (None, {"trace_level": ["TIMESTAMPS"]}, "400", "StatusCode.INVALID_ARGUMENT"),
            (None, {"trace_rate": "x"}, "400", "StatusCode.INVALID_ARGUMENT"),
            ("absent", {"trace_file": "x"}, "400", "StatusCode.INVALID_ARGUMENT"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                http.update_trace_settings(model, settings)
            assert caught.value.status() == over_http
            with pytest.raises(InferenceServerException) as caught:
                grpc.update_trace_settings(model, settings)
            assert caught.value.status() == over_grpc
        with pytest.raises(InferenceServerException, match="Request for unknown model : absent"):
            http.get_trace_settings("absent")
        with pytest.raises(InferenceServerException, match="log file location"):
            http.update_log_settings({"log_file": "x"})
        with pytest.raises(InferenceServerException, match="invalid argument for log_format"):
            grpc.update_log_settings({"log_format": "x"})


@pytest.mark.parametrize("shape", SHAPES)
def test_log_settings_change_what_the_server_writes(repository: Path, shape: Shape) -> None:
    with ServeProcess(repository, *shape) as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            settings = http.update_log_settings({"log_format": "ISO8601", "log_verbose_level": 1})
            assert settings == http.get_log_settings()
            assert (settings["log_format"], settings["log_verbose_level"]) == ("ISO8601", 1)
            shown = grpc.update_log_settings({"log_info": False}, as_json=True)["settings"]
            assert shown["log_info"] == {"bool_param": False}
            grpc.update_log_settings({"log_info": True})
        assert server.stop() == 0
        unloaded = [line for line in server.log.splitlines() if "successfully unloaded" in line]
    assert unloaded
    assert all(line[4] == line[7] == "-" and "Z I" in line for line in unloaded)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_has_the_server_trace_what_it_measures(repository: Path, tmp_path: Path, protocol: str) -> None:
    with ServeProcess(repository, f"--trace-config=triton,file={tmp_path / 't'}") as server:
        load = ["-m", "echo", "-u", getattr(server, protocol), "-i", protocol, "--request-count=8", "--quiet"]
        settings = ["--trace-level=TIMESTAMPS", "--trace-rate=2", "--trace-count=3", "--log-frequency=1"]
        assert perf.run([*load, *settings]) in (ExitStatus.MEASURED, ExitStatus.UNSTABLE)
        assert server.stop() == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1", "t.2"]


def test_perf_ends_with_the_reason_where_the_server_cannot_trace(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ServeProcess(repository) as server:
        load = ["-m", "echo", "-u", server.http, "--request-count=1", "--quiet", "--trace-level=TIMESTAMPS"]
        assert perf.run(load) == ExitStatus.REFUSED

    assert "trace file name is not given" in capfd.readouterr().err


@contextmanager
def collector() -> Iterator[tuple[str, dict[str, Any]]]:
    """A place that takes OTLP over HTTP: its URL, and the spans by name."""
    spans: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in message.resource_spans:
                for scope in resource.scope_spans:
                    spans.update({span.name: span for span in scope.spans})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_the_spans_of_a_sender_that_traces_whatever_the_rate(repository: Path) -> None:
    with collector() as (url, spans):
        flags = ["--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=0"]
        with ServeProcess(repository, *flags, f"--trace-config=opentelemetry,url={url}") as server:
            with httpclient.InferenceServerClient(server.http) as http:
                infer(http, "caller", httpclient)
                result = infer(http, "caller", httpclient, headers={"traceparent": SENDER, "tracestate": "a=b"})
            assert server.stop() == 0

    assert set(spans) == {"InferRequest", "caller", "echo", "compute"}
    assert {span.trace_id.hex() for span in spans.values()} == {SENDER[3:35]}
    assert spans["InferRequest"].parent_span_id.hex() == SENDER[36:52]
    assert spans["echo"].parent_span_id == spans["caller"].span_id
    context = json.loads(result.get_response()["parameters"]["context"])
    assert context == {"traceparent": f"{SENDER[:36]}{spans['caller'].span_id.hex()}-01", "tracestate": "a=b"}


def test_a_level_without_a_file_ends_the_start_with_the_reason(repository: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no file to write to is given"),
        ServeProcess(repository, "--trace-config=level=TIMESTAMPS"),
    ):
        pass
