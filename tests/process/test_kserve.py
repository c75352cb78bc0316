"""Servers as KServe runs them: behind Knative's queue-proxy, with transformers, asked by KServe's own clients."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tests.support.kserve_sdk import needs_sdk, run_with_sdk
from tests.support.models import answering, identity_pbtxt, write_model
from tests.support.ports import free_port
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.stock_clients import infer_input

from charonia.core.dtypes import DataType

QUIET_S = 0.5
"""Time without a request after which the queue-proxy takes its pod for drained; Knative's is 45 s."""

LATE_S = 1.0
"""Time for which requests still arrive after a pod was told to end."""

PROBE = {"User-Agent": "kube-probe/1.34", "K-Network-Probe": "queue"}

PREPARE = answering("np.array([array[0, 0].decode().split()], np.float32)", "ROW")

PREPARE_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ROW" data_type: TYPE_FP32 dims: [ 4 ] }
"""

PIPELINE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "RESULT" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling {
  step { model_name: "prepare" model_version: -1
         input_map { key: "TEXT" value: "TEXT" } output_map { key: "ROW" value: "row" } }
  step { model_name: "echo" model_version: -1
         input_map { key: "INPUT0" value: "row" } output_map { key: "OUTPUT0" value: "RESULT" } }
}
"""


def ask(endpoint: str, method: str, path: str, document: object = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(endpoint, timeout=200)
    body = None if document is None else json.dumps(document)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read() or b"{}")
    connection.close()
    return response.status, answer


class QueueProxy:
    """Knative's queue-proxy, as far as a server sees it.

    It probes the server until that is ready. Then it passes HTTP/1.1 on over connections that it keeps, and HTTP/2 as
    it comes. Told to end, it goes on until there were no requests for a while; only then the server gets SIGTERM.
    """

    def __init__(self, server: ServeProcess) -> None:
        self._upstream = server.http
        self._idle: list[http.client.HTTPConnection] = []
        self._in_flight = self.forwarded = 0
        self._last_s = time.monotonic()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._tunnel = socket.create_server(("127.0.0.1", 0))
        self._grpc_upstream = server.grpc
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        threading.Thread(target=self._accept, daemon=True).start()
        self.http = f"127.0.0.1:{self._http.server_port}"
        self.grpc = f"127.0.0.1:{self._tunnel.getsockname()[1]}"

    def probe(self) -> None:
        """Ask whether the server speaks HTTP/2 on its HTTP port, then whether it is ready, until it is."""
        upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": ""}
        connection = http.client.HTTPConnection(self._upstream, timeout=200)
        connection.request("OPTIONS", "/", headers=upgrade | PROBE)
        response = connection.getresponse()
        response.read()
        assert response.status != 101
        status = 0
        while status != 200:  # on the same connection
            connection.request("GET", "/v2/health/ready", headers=PROBE)
            response = connection.getresponse()
            response.read()
            status = response.status
        connection.close()

    def drain(self) -> None:
        """Go on until there were no requests for a while."""
        while self._in_flight or time.monotonic() - self._last_s < QUIET_S:
            time.sleep(0.02)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._tunnel.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._tunnel.close()
        for connection in self._idle:
            connection.close()

    def count(self, change: int) -> None:
        with self._lock:
            self._in_flight += change
            self.forwarded += change > 0
            self._last_s = time.monotonic()

    def forward(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        with self._lock:
            connection = self._idle.pop() if self._idle else http.client.HTTPConnection(self._upstream, timeout=200)
        connection.request(
            method, path, body, headers | {"Forwarded": "for=10.0.0.1;proto=http", "K-Proxy-Request": "activator"}
        )
        response = connection.getresponse()
        answer = response.status, response.read()
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # the name that the library looks for
                proxy.count(1)
                try:
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                    status, answer = proxy.forward("POST", self.path, body, {"Host": self.headers["Host"]})
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                finally:
                    proxy.count(-1)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._tunnel.accept()
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        host, port = self._grpc_upstream.split(":")
        with client, socket.create_connection((host, int(port))) as upstream:
            back = threading.Thread(target=self._pump, args=(upstream, client), daemon=True)
            back.start()
            self._pump(client, upstream)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._last_s = time.monotonic()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A repository with a model that answers after 5 ms."""
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
    write_model(tmp_path, "echo", "", config=identity_pbtxt(dims=(4,), more=delay))
    return tmp_path


def until(is_over: threading.Event, call: Callable[[], bool]) -> list[bool]:
    """Call again and again, and return what came of each."""
    outcomes = []
    while not is_over.is_set():
        outcomes.append(call())
    return outcomes


@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_is_lost_when_a_pod_behind_the_queue_proxy_ends(echo: Path, shape: Shape) -> None:
    allowed = "--allowed-hosts=echo.prod.example.com"  # a pod listens on all addresses and needs none
    with ServeProcess(echo, "--kserve-v1", allowed, *shape) as server:
        proxy, over = QueueProxy(server), threading.Event()
        proxy.probe()
        client = grpcclient.InferenceServerClient(proxy.grpc)
        given = infer_input(grpcclient, "INPUT0", np.ones((1, 4), np.float32))

        def predict() -> bool:
            answer = ask(
                proxy.http,
                "POST",
                "/v1/models/echo:predict",
                {"instances": [[1, 2, 3, 4]]},
                Host="echo.prod.example.com",
            )
            return answer == (200, {"predictions": [[1.0, 2.0, 3.0, 4.0]]})

        def infer() -> bool:
            return bool(client.infer("echo", [given]).as_numpy("OUTPUT0").sum() == 4)

        with ThreadPoolExecutor(8) as pool:
            traffic = [pool.submit(until, over, call) for call in (predict,) * 4 + (infer,) * 4]
            assert eventually(lambda: proxy.forwarded > 50)
            ending = pool.submit(proxy.drain)  # the pod is told to end; requests still arrive
            before = proxy.forwarded
            assert eventually(lambda: proxy.forwarded > before + 50)
            assert not ending.done()
            over.set()
            ending.result(timeout=200)
            outcomes = [outcome for each in traffic for outcome in each.result(timeout=200)]
        client.close()
        assert server.stop() == 0
        proxy.close()

    assert len(outcomes) > 50
    assert all(outcomes)


def test_one_file_where_kserve_puts_it_has_the_name_of_its_service(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "other", "", config=f'name: "other"\n{identity_pbtxt(dims=(4,))}').rename(
        tmp_path / "models"
    )

    with ServeProcess(folder, "--model_name", "iris", "--kserve-v1") as server:
        assert ask(server.http, "GET", "/v1/models") == (200, {"models": ["iris"], "object": "list", "data": []})
        document = {"instances": [[1, 2, 3, 4]]}
        assert ask(server.http, "POST", "/v1/models/iris:predict", document)[1] == {"predictions": [[1, 2, 3, 4]]}


def test_models_are_added_one_by_one_as_kserves_agent_does(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--model-control-mode=explicit") as server:
        folder = write_model(tmp_path, "iris", "", config=identity_pbtxt(dims=(4,)))
        (folder / "SUCCESS.0a1b").write_text("{}", encoding="utf-8")  # the agent's own mark

        assert ask(server.http, "POST", "/v2/repository/models/iris/load")[0] == 200
        assert ask(server.http, "GET", "/v2/models/iris/ready")[0] == 200
        assert ask(server.http, "POST", "/v2/repository/models/iris/unload")[0] == 200


def test_a_model_that_cannot_be_passed_on_says_so(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", "", config=identity_pbtxt(datatype=DataType.BF16, dims=(4,)))

    with ServeProcess(tmp_path) as predictor:
        given = ("--predictor=echo", f"--predictor_host={predictor.http}")
        with pytest.raises(RuntimeError, match="tensor 'INPUT0' is BF16, which cannot be passed on"):
            ServeProcess(tmp_path, *given).__enter__()


def test_a_transformer_asks_its_predictor(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", "", config=identity_pbtxt(dims=(4,)))
    write_model(tmp_path, "prepare", PREPARE, config=PREPARE_CONFIG)
    write_model(tmp_path, "pipeline", "", config=PIPELINE_CONFIG)
    explicit = "--model-control-mode=explicit"
    document = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["1 2 3 4"]}]}

    with ServeProcess(tmp_path, explicit, "--load-model=echo", "--model_name=pipeline") as predictor:
        # Behind the arguments of the transformer itself is what KServe appends.
        given = ("--predictor=echo", "--model_name", "pipeline", "--predictor_host", predictor.http, "--http_port", "0")
        with ServeProcess(tmp_path, explicit, "--load-model=pipeline", *given) as transformer:
            status, answer = ask(transformer.http, "POST", "/v2/models/pipeline/infer", document)
            assert (status, answer["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
            counts = ask(predictor.http, "GET", "/v2/models/echo/stats")[1]["model_stats"][0]
            assert counts["inference_count"] == 1

            assert predictor.stop() == 0
            status, answer = ask(transformer.http, "POST", "/v2/models/pipeline/infer", document)
            assert status == 503
            assert "in ensemble 'pipeline', step 'echo': predictor: no connection to" in answer["error"]


def test_a_transformer_that_is_there_first_says_that_it_waits(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", "", config=identity_pbtxt(dims=(4,)))
    port = free_port()
    transformer = ServeProcess(tmp_path, "--predictor=echo", "--predictor_host", f"127.0.0.1:{port}")

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(transformer.__enter__)
        assert transformer.logs(f"waiting for the predictor, 'echo' at 127.0.0.1:{port}: no connection")
        with ServeProcess(tmp_path, f"--http-port={port}"), started.result(timeout=200):
            assert ask(transformer.http, "GET", "/v2/models/echo/ready")[0] == 200


@needs_sdk
def test_the_clients_of_the_sdk_pass_unmodified(tmp_path: Path) -> None:
    datatypes = [datatype for datatype in DataType if datatype is not DataType.BF16]  # which the SDK does not have
    for datatype in datatypes:
        write_model(tmp_path, datatype.wire, "", config=identity_pbtxt(datatype=datatype, dims=(4,)))

    with ServeProcess(tmp_path, "--kserve-v1") as server:
        told = run_with_sdk("kserve_sdk_calls.py", server.http, server.grpc)

    outcomes = dict(map(json.loads, told.splitlines()))
    echoed = {what: outcome for what, outcome in outcomes.items() if what.split()[1] in {d.wire for d in datatypes}}
    assert len(echoed) == 4 * len(datatypes) - 2
    assert {what: outcome for what, outcome in echoed.items() if outcome is not True} == {}
    assert {what: outcome for what, outcome in outcomes.items() if what not in echoed} == {
        "v1 live": True,
        "v1 ready": True,
        "v1 unknown": "HTTPStatusError 404",
        "v1 rows": {"predictions": [[0, 1, 2, 3]]},
        "v1 columns": {"predictions": [[0, 1, 2, 3]]},
        "v1 wrong": "HTTPStatusError 400",
        "v2 live": True,
        "v2 ready": True,
        "v2 model ready": True,
        "v2 unknown": False,
        "v2 wrong": "HTTPStatusError 400",
        "v2 nothing": "HTTPStatusError 404",
        "grpc live": True,
        "grpc ready": True,
        "grpc model ready": True,
        "grpc unknown": False,
        "grpc wrong": "AioRpcError INVALID_ARGUMENT",
        "grpc nothing": "AioRpcError NOT_FOUND",
    }
