"""Models that front ends run themselves: one picture of statistics, versions and control, whatever runs where."""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.support import models
from tests.support.process import SHAPES, ServeProcess, Shape

FRONT_ENDS = 2
CONNECTIONS = 16
"""Enough that the kernel gives some of them to each front end; with fewer a test would say less, not fail."""

IN_FRONT = 'parameters { key: "front_end" value { string_value: "yes" } }'
VALUES = [1.0, 2.0, 3.0, 4.0]


def write_repository(folder: Path) -> None:
    identity = models.identity_pbtxt(dims=(4,), max_batch_size=8, more=IN_FRONT)
    models.write_model(folder, "identity", "", config=identity)
    onnx = models.identity_pbtxt("onnxruntime", dims=(4,), max_batch_size=8, more=IN_FRONT + " dynamic_batching { }")
    models.write_model(folder, "onnx", models.identity(dims=(4,)), config=onnx)
    models.write_model(folder, "both", "", config=models.chain_pbtxt("identity", "onnx", dims=(4,), max_batch_size=8))
    measured = models.identity_pbtxt(dims=(4,), max_batch_size=8)
    models.write_model(folder, "measured", "", config=measured)
    models.write_model(
        folder, "stays", "", config=measured + 'parameters { key: "front_end" value { string_value: "no" } }'
    )


class Client:
    """Connections to a server, which the kernel gives to its front ends."""

    def __init__(self, server: ServeProcess, count: int = CONNECTIONS) -> None:
        self._connections = [HTTPConnection(server.http, timeout=200) for _ in range(count)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, path: str, document: object = None, *, over: int = 0) -> tuple[int, Any]:
        connection = self._connections[over]
        body = None if document is None else json.dumps(document)
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def infer(self, model: str, *, over: int = 0, values: list[float] = VALUES) -> tuple[int, Any]:
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, len(values)], "data": values}
        return self.ask(f"/v2/models/{model}/infer", {"inputs": [tensor]}, over=over)

    def infer_over_all(self, model: str) -> int:
        """Send a request over each connection, and return how many that were."""
        for over in range(len(self._connections)):
            status, answer = self.infer(model, over=over)
            assert (status, answer["outputs"][0]["data"]) == (200, VALUES)
        return len(self._connections)

    def counts(self, model: str, *, over: int = 0) -> tuple[int, int]:
        """Return how many requests of a model succeeded and failed."""
        _, answer = self.ask(f"/v2/models/{model}/stats", over=over)
        (found,) = answer["model_stats"]
        return found["inference_stats"]["success"]["count"], found["inference_stats"]["fail"]["count"]

    def runs_in(self, model: str) -> Any:
        return self.ask(f"/v2/models/{model}/explain")[1]["runs_in"]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something that the engine looks at once a second holds."""
        end = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.05)

    def until_in_front(self, *names: str) -> None:
        """Wait until every front end has these models."""
        everywhere = {"front_ends": FRONT_ENDS, "only_in_engine_because": ""}
        self.until(lambda: all(self.runs_in(name) == everywhere for name in names), ", ".join(names))


@pytest.fixture(params=SHAPES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServeProcess]:
    write_repository(tmp_path / "models")
    options = ("--model-control-mode=explicit", "--load-model=*", f"--trace-config=triton,file={tmp_path / 'traces'}")
    with ServeProcess(tmp_path / "models", *options, *request.param) as started, Client(started) as client:
        if request.param:
            client.until_in_front("identity", "onnx", "both")
        yield started


def test_statistics_and_metrics_count_every_request_that_has_its_answer(server: ServeProcess) -> None:
    with Client(server) as client:
        sent = client.infer_over_all("onnx")
        assert client.counts("onnx") == client.counts("onnx", over=1) == (sent, 0)
        assert server.metric("nv_inference_request_success", "onnx") == sent
        assert server.metric("charonia_batch_size_count", "onnx") == sent

        sent += client.infer_over_all("both")
        assert server.metric("nv_inference_exec_count", "onnx") == sent
        assert client.counts("both")[0] == client.counts("identity")[0] == CONNECTIONS
        status, answer = client.infer("onnx", values=[1.0])
        assert status == 400
        assert "shape" in answer["error"]
        assert client.counts("onnx") == (sent, 1)


def traffic(server: ServeProcess) -> dict[tuple[str, str, str], int]:
    """Return what each process has taken in, by metric, process and protocol."""
    series = r'^charonia_(\w+)\{process="(\w+)",protocol="(\w+)"\} (\d+)$'
    found = re.findall(series, server.metrics_page(), re.MULTILINE)
    return {(metric, process, protocol): int(value) for metric, process, protocol, value in found}


def test_metrics_show_what_each_front_end_has_taken_in(server: ServeProcess) -> None:
    before = traffic(server)
    with Client(server) as client:
        client.infer_over_all("onnx")
        with grpcclient.InferenceServerClient(server.grpc) as grpc:
            assert grpc.is_server_live()
            after = traffic(server)

    more = Counter[tuple[str, str]]()
    for (metric, _, protocol), value in after.items():
        more[metric, protocol] += value
    for (metric, _, protocol), value in before.items():
        more[metric, protocol] -= value
    metrics = ("connections_open", "connections_accepted_total", "requests_received_total")
    assert more == {(m, p): n for p, n in (("http", CONNECTIONS), ("grpc", 1)) for m in metrics}
    processes = {process for _, process, _ in after}
    assert processes == {"server"} or processes == {"front_end_1", "front_end_2"}
    assert all(after["requests_received_total", process, "http"] for process in processes)


def test_models_are_loaded_and_unloaded_for_all_connections_at_once(server: ServeProcess, tmp_path: Path) -> None:
    with Client(server) as client:
        for number in range(4):
            client.infer_over_all("identity")
            assert client.ask("/v2/repository/models/identity/unload", {}, over=number)[0] == 200
            statuses = {client.infer("identity", over=over)[0] for over in range(CONNECTIONS)}
            assert statuses == {404}
            assert {client.infer("both", over=over)[0] for over in range(CONNECTIONS)} == {404}
            assert client.ask("/v2/repository/models/identity/load", {}, over=number + 1)[0] == 200
            client.infer_over_all("both")
            assert client.counts("identity") == (CONNECTIONS, 0)


def test_a_new_version_answers_on_all_connections_at_once(server: ServeProcess, tmp_path: Path) -> None:
    with Client(server) as client:
        client.infer_over_all("onnx")
        (tmp_path / "models" / "onnx" / "2").mkdir()
        (tmp_path / "models" / "onnx" / "2" / "model.onnx").write_bytes(models.identity(dims=(4,)))

        assert client.ask("/v2/repository/models/onnx/load", {}, over=3)[0] == 200

        answers = [client.infer("onnx", over=over) for over in range(CONNECTIONS)]
        assert {answer["model_version"] for _, answer in answers} == {"2"}
        assert client.counts("onnx") == (CONNECTIONS, 0)
        assert client.infer("onnx/versions/1")[0] == 503


def test_the_explanation_says_where_a_model_runs(server: ServeProcess, request: pytest.FixtureRequest) -> None:
    is_apart = "front-ends-apart" in request.node.name
    with Client(server) as client:
        client.infer_over_all("stays")
        if not is_apart:
            assert client.runs_in("stays") is None
            return
        assert client.runs_in("stays") == {"front_ends": 0, "only_in_engine_because": "parameter front_end is 'no'"}
        assert "not been measured" in client.runs_in("measured")["only_in_engine_because"]

        def is_measured() -> bool:
            client.infer_over_all("measured")
            return bool(client.runs_in("measured")["front_ends"] == FRONT_ENDS)

        client.until(is_measured, "an automatic model runs in front ends when it is measured")
        before = client.counts("measured")[0]
        client.infer_over_all("measured")
        assert client.counts("measured") == (before + CONNECTIONS, 0)


def test_requests_are_traced_wherever_their_model_runs(server: ServeProcess, tmp_path: Path) -> None:
    with Client(server) as client:
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": str(CONNECTIONS)}
        assert client.ask("/v2/trace/setting", settings)[0] == 200
        client.infer_over_all("identity")
        client.infer_over_all("identity")
        assert client.counts("identity") == (2 * CONNECTIONS, 0)
    assert server.stop() == 0
    (written,) = tmp_path.glob("traces*")
    assert len({event["id"] for event in json.loads(written.read_text())}) == CONNECTIONS


@pytest.mark.parametrize("shape", [("--front-ends=2",)], ids=["front-ends-apart"])
def test_a_front_end_that_is_killed_costs_what_it_had_not_reported(tmp_path: Path, shape: Shape) -> None:
    write_repository(tmp_path / "models")
    with ServeProcess(tmp_path / "models", *shape) as server:
        with Client(server) as client:
            client.until_in_front("identity")
            client.infer_over_all("identity")
            assert client.counts("identity") == (CONNECTIONS, 0)
        front_end = next(
            each
            for each in psutil.Process(server.process.pid).children(recursive=True)
            if "front_end_1" in each.cmdline()
        )
        os.kill(front_end.pid, signal.SIGKILL)
        front_end.wait(200)
        with Client(server, 1) as client:
            assert client.counts("identity") == (CONNECTIONS, 0)
        with Client(server) as client:
            client.until_in_front("identity")
            client.infer_over_all("identity")
            assert client.counts("identity") == (2 * CONNECTIONS, 0)
