"""Bad input and faults against one server, while stock clients of both protocols go on getting right answers."""

import contextlib
import gzip
import http.client
import itertools
import json
import os
import re
import signal
import socket
import struct
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.gate import Gate, gated
from tests.support.process import SHAPES, ServeProcess, eventually, started_by
from tritonclient.utils import InferenceServerException

BODY_BYTES_MAX = 1_000_000

IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { }
"""


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


def write_model(repository: Path, name: str, config: str, code: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(code)


class Load:
    """Stock clients that never stop asking, and compare every answer."""

    def __init__(self, server: ServeProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self.answered = [0] * 4
        self.problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number, module, model))
            for number, (module, model) in enumerate(itertools.product((httpclient, grpcclient), ("echo", "steady")))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def is_fine(self) -> bool:
        """Whether all clients got right answers so far, and get them now."""
        before = list(self.answered)
        return (
            eventually(lambda: all(now > then for now, then in zip(self.answered, before, strict=True)))
            and not self.problems
        )

    def _ask(self, number: int, module: Any, model: str) -> None:
        address = self._server.http if module is httpclient else self._server.grpc
        with module.InferenceServerClient(address) as client:
            while not self._stop.wait(0.005):
                try:
                    self._ask_once(client, module, model, self.answered[number])
                except Exception as error:
                    self.problems.append(f"{model} by {module.__name__}: {error!r}")
                self.answered[number] += 1

    def _ask_once(self, client: Any, module: Any, model: str, value: int) -> None:
        if model == "echo":
            sent: np.ndarray[Any, Any] = np.full((1, 4), value, np.float32)
            result = client.infer("echo", [tensor(module, "INPUT0", sent, "FP32")]).as_numpy("OUTPUT0")
            assert result.tolist() == sent.tolist()
        else:
            sent = np.array([value % 500], np.int32)
            result = client.infer("steady", [tensor(module, "IN", sent, "INT32")]).as_numpy("OUT")
            assert result.tolist() == [value % 500 * 2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", IDENTITY)
    write_model(folder, "steady", PYTHON, MODEL_PY)
    write_model(folder, "moody", PYTHON + IMPATIENT, MODEL_PY)
    write_model(folder, "lavish", PYTHON, MODEL_PY)
    write_model(folder, "sleeper", PYTHON, gated(MODEL_PY))
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    options = (f"--http-max-input-size={BODY_BYTES_MAX}", f"--grpc-max-input-size={BODY_BYTES_MAX}")
    control = ("--model-control-mode=explicit", "--load-model=*")
    with ServeProcess(repository, *options, *control, *request.param) as started:
        yield started
        assert started.stop() == 0


@pytest.fixture(scope="module")
def load(server: ServeProcess) -> Iterator[Load]:
    with Load(server) as running:
        yield running


@pytest.fixture(autouse=True)
def other_clients_notice_nothing(server: ServeProcess, load: Load) -> Iterator[None]:
    yield
    assert load.is_fine(), load.problems
    assert answer(server.http, "GET", "/v2/health/ready")[0] == 200
    assert server.process.poll() is None


def tensor(module: Any, name: str, array: "np.ndarray[Any, Any]", datatype: str) -> Any:
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


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
    connection = http.client.HTTPConnection(address, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def talk(address: str, data: bytes) -> bytes:
    """Send, and return everything that comes until the server closes."""
    received = b""
    with connect(address) as connection, contextlib.suppress(ConnectionResetError):
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(data)
        while piece := connection.recv(65536):
            received += piece
    return received


def raw_infer(model: str, value: int) -> bytes:
    body = request_json("IN", "INT32", [1], [value])
    return b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        model.encode(),
        len(body),
        body,
    )


def request_json(name: str, datatype: str, shape: list[int], data: object, **more: object) -> bytes:
    return json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}], **more}).encode()


def metric(server: ServeProcess, name: str, model: str, **labels: str) -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    wanted = "".join(
        rf'(?=[^}}]*{label}="{value}")' for label, value in {"model": model, "version": "1", **labels}.items()
    )
    found = re.search(rf"^{name}{{{wanted}[^}}]*}} (\S+)$", text, re.M)
    assert found is not None, f"{name} of {model} {labels}"
    return float(found[1])


def cancelled(server: ServeProcess, model: str) -> float:
    return metric(server, "nv_inference_request_failure", model, reason="CANCELED")


def pending(server: ServeProcess, model: str) -> float:
    return metric(server, "nv_inference_pending_request_count", model)


def call_http(server: ServeProcess, model: str, value: int) -> list[int]:
    with httpclient.InferenceServerClient(server.http) as client:
        result = client.infer(model, [tensor(httpclient, "IN", np.array([value], np.int32), "INT32")])
        return [int(v) for v in result.as_numpy("OUT")]


def is_answered(server: ServeProcess, model: str) -> bool:
    with contextlib.suppress(InferenceServerException):
        return call_http(server, model, 1) == [2]
    return False


def call_grpc(server: ServeProcess, model: str, value: int) -> list[int]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer(model, [tensor(grpcclient, "IN", np.array([value], np.int32), "INT32")])
        return [int(v) for v in result.as_numpy("OUT")]


RIGHT = request_json("INPUT0", "FP32", [1, 4], [1, 2, 3, 4])
BINARY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}]}
).encode()
LENGTH = {"Inference-Header-Content-Length": str(len(BINARY))}
GZIP = {"Content-Encoding": "gzip"}
INFER = "/v2/models/echo/infer"


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "text"),
    [
        (INFER, b"", {}, 400, "parse"),
        (INFER, b'{"inputs": [', {}, 400, "parse"),
        (INFER, b"[]", {}, 400, "object"),
        (INFER, b"[" * 100_000, {}, 400, "parse"),
        (INFER, b"\xff\xfe\x00", {}, 400, "parse"),
        (INFER, b"{}", {}, 400, "inputs"),
        (INFER, RIGHT.replace(b"FP32", b"FP64"), {}, 400, "data-type is 'FP64'"),
        (INFER, RIGHT.replace(b"FP32", b"REAL"), {}, 400, "REAL"),
        (INFER, RIGHT.replace(b"[1, 4]", b"[4]"), {}, 400, "unexpected shape"),
        (INFER, RIGHT.replace(b"[1, 4]", b"[2, 4]"), {}, 400, "8 elements, got 4"),
        (INFER, RIGHT.replace(b"[1, 4]", b"[-1, 4]"), {}, 400, "non-negative"),
        (INFER, RIGHT.replace(b"[1, 4]", b"[1000000000, 1000000000]"), {}, 400, "larger than the maximum"),
        (INFER, RIGHT.replace(b"[1, 4]", b"[4294967296, 4294967296]"), {}, 400, "larger than the maximum"),
        (INFER, RIGHT.replace(b"INPUT0", b"INPUT9"), {}, 400, "INPUT9"),
        (INFER, RIGHT[:-1] + b', "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]}', {}, 400, "already exists"),
        (INFER, RIGHT[:-1] + b', "parameters": {"triton_x": 1}}', {}, 400, "reserved"),
        (INFER, RIGHT.replace(b"2, 3", b'"2", 3'), {}, 400, "FP32"),
        (INFER, BINARY + bytes(15), LENGTH, 400, "expecting 1 additional bytes"),
        (INFER, BINARY + bytes(17), LENGTH, 400, "1 bytes are left over"),
        (INFER, BINARY + bytes(16), {"Inference-Header-Content-Length": "99999"}, 400, "99999"),
        (INFER, BINARY + bytes(16), {"Inference-Header-Content-Length": "-1"}, 400, "-1"),
        (INFER, BINARY + bytes(16), {"Inference-Header-Content-Length": "9" * 40}, 400, "999"),
        (INFER, BINARY.replace(b"16", b"18446744073709551632"), {}, 400, "binary_data_size"),
        (INFER, BINARY.replace(b"16", b"12") + bytes(12), LENGTH, 400, "12"),
        (INFER, RIGHT, GZIP, 400, "gzip"),
        (INFER, gzip.compress(RIGHT, mtime=0)[:-9], GZIP, 400, "too early"),
        (INFER, RIGHT, {"Content-Encoding": "br"}, 501, "br"),
        (INFER, b"[" * (BODY_BYTES_MAX + 1), {}, 400, "--http-max-input-size"),
        ("/v2/models/nobody/infer", RIGHT, {}, 404, "unknown model: 'nobody'"),
        ("/v2/models/echo/versions/7/infer", RIGHT, {}, 404, "version 7"),
        ("/v2/models/echo/versions/x/infer", RIGHT, {}, 404, "expected a number for the version, got 'x'"),
        ("/v2/models/echo/infer/more", RIGHT, {}, 404, ""),
        ("/v2/health/live", RIGHT, {}, 405, ""),
    ],
)
def test_a_bad_http_request_is_answered_with_what_is_wrong(
    server: ServeProcess, path: str, body: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    got, message = answer(server.http, "POST", path, body, headers)

    assert got == status
    assert text in json.loads(message)["error"]


def test_a_decompression_bomb_is_not_unpacked(server: ServeProcess) -> None:
    bomb = zlib.compress(bytes(200_000_000), 1)
    assert len(bomb) < BODY_BYTES_MAX
    processes = processes_of(server)
    before = sum(process.memory_info().rss for process in processes)

    status, message = answer(server.http, "POST", INFER, bomb, {"Content-Encoding": "deflate"})

    assert status == 400
    assert "Decompressed data size exceeds" in message
    assert sum(process.memory_info().rss for process in processes) - before < 50_000_000


@pytest.mark.parametrize(
    ("model", "version", "name", "array", "datatype", "status", "text"),
    [
        ("nobody", "", "INPUT0", np.zeros((1, 4), np.float32), "FP32", "NOT_FOUND", "unknown model: 'nobody'"),
        ("echo", "7", "INPUT0", np.zeros((1, 4), np.float32), "FP32", "NOT_FOUND", "version 7"),
        ("echo", "x", "INPUT0", np.zeros((1, 4), np.float32), "FP32", "INVALID_ARGUMENT", "'x'"),
        ("echo", "", "INPUT0", np.zeros((1, 5), np.float32), "FP32", "INVALID_ARGUMENT", "unexpected shape"),
        ("echo", "", "INPUT0", np.zeros((1, 4), np.float64), "FP64", "INVALID_ARGUMENT", "data-type is 'FP64'"),
        ("echo", "", "INPUT0", np.zeros((9, 4), np.float32), "FP32", "INVALID_ARGUMENT", "batch-size must be <= 8"),
        ("echo", "", "INPUT9", np.zeros((1, 4), np.float32), "FP32", "INVALID_ARGUMENT", "INPUT9"),
        ("echo", "", "INPUT0", np.zeros((1, 300_000), np.float32), "FP32", "RESOURCE_EXHAUSTED", "1000000"),
    ],
)
def test_a_bad_grpc_request_is_answered_with_what_is_wrong(
    server: ServeProcess,
    model: str,
    version: str,
    name: str,
    array: "np.ndarray[Any, Any]",
    datatype: str,
    status: str,
    text: str,
) -> None:
    with (
        grpcclient.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match=text) as caught,
    ):
        client.infer(model, [tensor(grpcclient, name, array, datatype)], model_version=version)

    assert caught.value.status() == f"StatusCode.{status}"


def test_bytes_that_do_not_fit_the_shape_are_refused_over_grpc(server: ServeProcess) -> None:
    sent = tensor(grpcclient, "INPUT0", np.zeros((1, 4), np.float32), "FP32")
    sent._raw_content = bytes(15)

    with (
        grpcclient.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="15") as caught,
    ):
        client.infer("echo", [sent])

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


HEAD = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"
TLS_HELLO = bytes.fromhex("16030100c4010000c00303") + bytes(range(185))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n", 431),
        (HEAD + b"X: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"v" * 10_000 + b" HTTP/1.1\r\n\r\n", 414),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"\x00\x01\x02\x03\r\n\r\n", 400),
        (TLS_HELLO, 400),
        (PREFACE + SETTINGS, 400),
    ],
    ids=["many fields", "long field", "long url", "two lengths", "smuggling", "bad chunk", "noise", "TLS", "HTTP/2"],
)
def test_what_is_no_fair_http_request_is_answered_and_the_connection_closed(
    server: ServeProcess, data: bytes, status: int
) -> None:
    assert talk(server.http, data).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "data",
    [
        TLS_HELLO,
        bytes(range(256)) * 100,
        PREFACE + bytes(range(256)) * 100,
        PREFACE + SETTINGS + struct.pack(">I", 0xFFFFFF << 8) + bytes(1000),
        PREFACE + SETTINGS + bytes.fromhex("00000801250000000100000000ffffffff"),
    ],
    ids=["TLS", "noise", "noise after the preface", "frame too large", "bad header block"],
)
def test_what_is_no_http2_ends_its_grpc_connection(server: ServeProcess, data: bytes) -> None:
    assert not talk(server.grpc, data).startswith(b"HTTP/1.1 200")


def test_http1_on_the_grpc_port_is_told_so(server: ServeProcess) -> None:
    assert talk(server.grpc, raw_infer("steady", 1)).startswith(b"HTTP/1.1 505 ")


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


@pytest.mark.parametrize("cut", [1, 30, 80, 120])
def test_a_body_that_breaks_off_is_dropped(server: ServeProcess, cut: int) -> None:
    whole = raw_infer("steady", 1)
    with connect(server.http) as connection:
        connection.sendall(whole[: min(cut, len(whole) - 1)])
        connection.shutdown(socket.SHUT_WR)

        assert connection.recv(65536) == b""


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


def test_requests_behind_a_dying_process_run_on_the_next(server: ServeProcess) -> None:
    with ThreadPoolExecutor(6) as threads:
        dying = threads.submit(call_http, server, "moody", EXIT)
        others = [threads.submit(call, server, "moody", 4) for call in (call_http, call_grpc) * 2]

        assert isinstance(dying.exception(), InferenceServerException)
        assert [other.result() for other in others] == [[8]] * 4


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
    sent = tensor(grpcclient, "IN", np.array([value], np.int32), "INT32")
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
    before, runs = cancelled(server, "sleeper"), gate.runs
    with gate.closed():
        leave_running = ask(server, 1)
        assert eventually(lambda: gate.runs == runs + 1)
        leave_queued = ask(server, 2)
        assert eventually(lambda: pending(server, "sleeper") == 1)

        leave_queued()

        assert eventually(lambda: pending(server, "sleeper") == 0)
        assert cancelled(server, "sleeper") == before + 1
        leave_running()
        assert eventually(lambda: cancelled(server, "sleeper") == before + 2)
    assert call_http(server, "sleeper", 3) == [6]
    assert gate.runs == runs + 2  # it did not run what had left the queue


def test_reloads_lose_no_request_whether_they_succeed_or_fail(server: ServeProcess, repository: Path) -> None:
    config = repository / "steady" / "config.pbtxt"
    broken = 'backend: "python" max_batch_size: "eight"'
    with httpclient.InferenceServerClient(server.http) as client:
        for text, succeeds in ((PYTHON, True), (broken, False), (PYTHON.replace("python", "pithon"), False)):
            config.write_text(text)
            if succeeds:
                client.load_model("steady")
            else:
                with pytest.raises(InferenceServerException, match="steady"):
                    client.load_model("steady")
            assert client.is_model_ready("steady")
        config.write_text(PYTHON)
