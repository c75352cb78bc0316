"""Bad input and faults against one server, while stock clients of both protocols go on getting right answers."""

import contextlib
import http.client
import json
import os
import signal
import socket
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.gate import Gate, gated
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, eventually, started_by
from tests.support.running_load import Load, echo, over_both
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

BODY_BYTES_MAX = 1_000_000


PYTHON = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""

IMPATIENT = """
parameters { key: "EXECUTE_TIMEOUT_SECONDS" value { string_value: "1" } }
"""

RAISE, EXIT, HANG, KILL, PID, LARGE = -1, -2, -3, -4, -5, -6

LARGE_ELEMENTS = 8_000_000

MODEL_PY = f"""
import os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.answer(
            int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])))]) for request in requests]

    def answer(self, value):
        if value == {RAISE}:
            raise ValueError("minus one is not for me")
        if value == {EXIT}:
            print("good bye")
            os._exit(3)
        if value == {HANG}:
            time.sleep(3600)
        if value == {KILL}:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == {PID}:
            return np.array([os.getpid()], np.int32)
        if value == {LARGE}:
            return np.arange({LARGE_ELEMENTS}, dtype=np.int32)
        if value >= 1000:
            time.sleep(value / 1000 - 1)
        return np.array([value * 2], np.int32)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", "", config=identity_pbtxt(dims=(4,), max_batch_size=8, more="dynamic_batching { }"))
    write_model(folder, "steady", MODEL_PY, config=PYTHON)
    write_model(folder, "moody", MODEL_PY, config=PYTHON + IMPATIENT)
    write_model(folder, "lavish", MODEL_PY, config=PYTHON)
    write_model(folder, "sleeper", gated(MODEL_PY), config=PYTHON)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    options = (f"--http-max-input-size={BODY_BYTES_MAX}", f"--grpc-max-input-size={BODY_BYTES_MAX}")
    control = ("--model-control-mode=explicit", "--load-model=*")
    with ServeProcess(repository, *options, *control, *request.param) as started:
        yield started
        assert started.stop() == 0


def ask_steady(module: Any, client: Any, number: int) -> None:
    sent = np.array([number % 500], np.int32)
    result = client.infer("steady", [infer_input(module, "IN", sent)]).as_numpy("OUT")
    assert result.tolist() == [number % 500 * 2]


@pytest.fixture(scope="module")
def load(server: ServeProcess) -> Iterator[Load]:
    with Load(over_both(server, echo=partial(echo, "echo"), steady=ask_steady)) as running:
        yield running


@pytest.fixture(autouse=True)
def other_clients_notice_nothing(server: ServeProcess, load: Load) -> Iterator[None]:
    yield
    load.goes_on()
    assert load.errors == []
    assert answer(server.http, "GET", "/v2/health/ready")[0] == 200
    assert server.process.poll() is None


def processes_of(server: ServeProcess) -> list[psutil.Process]:
    """Return the processes of the server that stay: all but the workers of models."""
    children = started_by(server.process.pid)
    return [
        psutil.Process(server.process.pid),
        *(child for child in children if "charonia.cli.serve_process" in child.cmdline()),
    ]


def answer(
    address: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=200)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=200)


def raw_infer(model: str, value: int) -> bytes:
    body = request_json("IN", "INT32", [1], [value])
    return b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        model.encode(),
        len(body),
        body,
    )


def request_json(name: str, datatype: str, shape: list[int], data: object, **more: object) -> bytes:
    return json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}], **more}).encode()


def cancelled(server: ServeProcess) -> int:
    return server.metric("nv_inference_request_failure", "sleeper", reason="CANCELED")


def call_http(server: ServeProcess, model: str, value: int) -> list[int]:
    with httpclient.InferenceServerClient(server.http) as client:
        result = client.infer(model, [infer_input(httpclient, "IN", np.array([value], np.int32))])
        return [int(v) for v in result.as_numpy("OUT")]


def is_answered(server: ServeProcess, model: str) -> bool:
    with contextlib.suppress(InferenceServerException):
        return call_http(server, model, 1) == [2]
    return False


def call_grpc(server: ServeProcess, model: str, value: int) -> list[int]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer(model, [infer_input(grpcclient, "IN", np.array([value], np.int32))])
        return [int(v) for v in result.as_numpy("OUT")]


INFER = "/v2/models/echo/infer"


def test_a_decompression_bomb_is_not_unpacked(server: ServeProcess) -> None:
    bomb = zlib.compress(bytes(200_000_000), 1)
    assert len(bomb) < BODY_BYTES_MAX
    processes = processes_of(server)
    before = sum(process.memory_info().rss for process in processes)

    status, message = answer(server.http, "POST", INFER, bomb, {"Content-Encoding": "deflate"})

    assert status == 400
    assert "Decompressed data size exceeds" in message
    assert sum(process.memory_info().rss for process in processes) - before < 50_000_000


HEAD = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"


def test_a_thousand_connections_that_come_and_go_leave_nothing_behind(server: ServeProcess) -> None:
    processes = processes_of(server)
    before = sum(process.num_fds() for process in processes)
    half = raw_infer("steady", 1)[:-3]

    for address in (server.http, server.grpc):
        for sent in (b"", half):
            with contextlib.ExitStack() as connections:
                for _ in range(250):
                    connections.enter_context(connect(address)).sendall(sent)

    assert eventually(lambda: sum(process.num_fds() for process in processes) <= before + 5)


@pytest.mark.parametrize("call", [call_http, call_grpc])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (RAISE, "ValueError: minus one is not for me"),
        (EXIT, "exited with status 3; its last output:\ngood bye"),
        (KILL, "ended by SIGKILL"),
        (HANG, "did not finish within 1 s"),
    ],
    ids=["raises", "exits", "is killed", "hangs"],
)
def test_a_model_that_fails_fails_its_request_only(
    server: ServeProcess, call: Callable[[ServeProcess, str, int], list[int]], value: int, text: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call(server, "moody", value)

    assert text in str(caught.value)
    assert caught.value.status() in ("500", "StatusCode.INTERNAL")
    assert call(server, "moody", 21) == [42]


def test_a_response_is_whole_though_its_process_was_killed_meanwhile(server: ServeProcess) -> None:
    (pid,) = call_http(server, "lavish", PID)
    body = request_json("IN", "INT32", [1], [LARGE], parameters={"binary_data_output": True})
    with connect(server.http) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(HEAD.replace(b"echo", b"lavish") + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        received = bytearray(connection.recv(4096))
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(pid) and is_answered(server, "lavish"))
        head, _, _ = bytes(received).partition(b"\r\n\r\n")
        whole = len(head) + 4 + int(head.lower().split(b"content-length: ")[-1].split(b"\r\n")[0])
        while len(received) < whole and (piece := connection.recv(1 << 20)):
            received += piece

    values = np.frombuffer(received[-4 * (LARGE_ELEMENTS // 2) :], np.int32)
    assert len(received) == whole > 4 * LARGE_ELEMENTS
    assert (np.diff(values) == 1).all()


def leave_http(server: ServeProcess, value: int) -> Callable[[], None]:
    connection = connect(server.http)
    connection.sendall(raw_infer("sleeper", value))
    return connection.close


def leave_grpc(server: ServeProcess, value: int) -> Callable[[], None]:
    client = grpcclient.InferenceServerClient(server.grpc)
    sent = infer_input(grpcclient, "IN", np.array([value], np.int32))
    call = client.async_infer("sleeper", [sent], lambda result, error: None)

    def leave() -> None:
        call.cancel()
        client.close()

    return leave


@pytest.mark.parametrize("ask", [leave_http, leave_grpc])
def test_a_client_that_leaves_takes_its_requests_along(
    server: ServeProcess, repository: Path, ask: Callable[[ServeProcess, int], Callable[[], None]]
) -> None:
    gate = Gate(repository / "sleeper" / "1")
    before, runs = cancelled(server), gate.runs
    with gate.closed():
        leave_running = ask(server, 1)
        assert eventually(lambda: gate.runs == runs + 1)
        leave_queued = ask(server, 2)
        assert eventually(lambda: server.pending("sleeper") == 1)

        leave_queued()

        assert eventually(lambda: server.pending("sleeper") == 0)
        assert cancelled(server) == before + 1
        leave_running()
        assert eventually(lambda: cancelled(server) == before + 2)
    assert call_http(server, "sleeper", 3) == [6]
    assert gate.runs == runs + 2  # it did not run what had left the queue
