"""The access log of a server: a line for each request, for both protocols."""

import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

FIELDS = ["time", "protocol", "method", "model", "version", "id", "status", "bytes_in", "bytes_out", "duration_ms"]
EXECUTION = ["queue_ms", "compute_ms", "batch_size", "instance"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, backend, code in (("echo", "identity", ""), ("held", "python", gated(PYTHON_IDENTITY))):
        config = identity_pbtxt(backend, dims=(4,), max_batch_size=8, more="dynamic_batching { }")
        write_model(tmp_path / "models", name, code, config=config)
    return tmp_path / "models"


def input_of(module: Any) -> Any:
    return infer_input(module, "INPUT0", np.zeros((2, 4), np.float32))


def infer(client: Any, module: Any, model: str = "echo", **options: Any) -> None:
    client.infer(model, [input_of(module)], **options)


def ask(server: ServeProcess, repository: Path) -> None:
    """An inference, a failure, and something that is no inference, over each protocol; clients that leave."""
    for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
        with module.InferenceServerClient(address) as client:
            infer(client, module, request_id='the "id"')
            with suppress(InferenceServerException):
                infer(client, module, "nobody")
            client.get_model_metadata("echo")
            infer(client, module, request_id="last")
    given = [input_of(grpcclient)]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        leave_at_work(server, repository, lambda: client.async_infer("held", given, lambda result, error: None).cancel)
    host, port = server.http.split(":")
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}]})

    def send() -> Callable[[], None]:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(f"POST /v2/models/held/infer HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection.close

    leave_at_work(server, repository, send)


def leave_at_work(server: ServeProcess, repository: Path, ask: Callable[[], Callable[[], object]]) -> None:
    """Ask the model that is held up, and leave with what `ask` returned while it works."""
    gate = Gate(repository / "held" / "1")
    runs, left = gate.runs, cancelled(server)
    with gate.closed():
        leave = ask()
        assert eventually(lambda: gate.runs != runs)
        leave()
        assert eventually(lambda: cancelled(server) != left)


def cancelled(server: ServeProcess) -> int:
    return server.metric("nv_inference_request_failure", "held", reason="CANCELED")


def of_text(line: str) -> dict[str, Any]:
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    return {key: json.loads(value) if value.startswith('"') else value for key, value in pairs}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("text", of_text)])
def test_every_request_has_its_line(
    tmp_path: Path, repository: Path, form: str, read: Callable[[str], dict[str, Any]], shape: Shape
) -> None:
    file = tmp_path / "access.log"
    with ServeProcess(repository, f"--access-log={form}", f"--access-log-file={file}", *shape) as server:
        ask(server, repository)
        server.stop()

    entries = [read(line) for line in file.read_text().splitlines()]

    lines = [(e["protocol"], e["method"], str(e["status"]), e.get("model"), e.get("id")) for e in entries]
    expected = [
        ("http", "POST /v2/models/echo/infer", "200", "echo", 'the "id"'),
        ("http", "POST /v2/models/nobody/infer", "404", "nobody", None),
        ("http", "GET /v2/models/echo", "200", None, None),
        ("http", "POST /v2/models/echo/infer", "200", "echo", "last"),
        ("grpc", "ModelInfer", "OK", "echo", 'the "id"'),
        ("grpc", "ModelInfer", "NOT_FOUND", "nobody", None),
        ("grpc", "ModelMetadata", "OK", None, None),
        ("grpc", "ModelInfer", "OK", "echo", "last"),
        ("grpc", "ModelInfer", "CANCELLED", "held", None),
        ("http", "POST /v2/models/held/infer", "499", "held", None),
    ]
    if shape:  # a client may have its answer, and send the next request elsewhere, before the line is written
        lines.sort(key=str)
        expected.sort(key=str)
    assert lines == expected
    for entry in [entry for entry in entries if entry.get("id") == 'the "id"']:
        assert list(entry) == FIELDS + EXECUTION
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
        assert (entry["version"], int(entry["batch_size"])) == ("1", 2)
        assert int(entry["bytes_in"]) > 32
        assert int(entry["bytes_out"]) > 32
        assert 0 <= float(entry["queue_ms"]) <= float(entry["duration_ms"])
        assert entry["instance"] == "echo_0"


def test_without_a_file_the_lines_go_to_stderr_among_the_log(repository: Path) -> None:
    with (
        ServeProcess(repository, "--access-log=text") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        infer(client, httpclient, request_id="mine")
        client.close()
        server.stop()

    assert re.search(r"^time=\S+ protocol=http method=\S+.* id=mine status=200 ", server.log, re.MULTILINE)


def test_there_is_no_access_log_unless_asked_for(repository: Path) -> None:
    with ServeProcess(repository) as server:
        ask(server, repository)
        server.stop()

    assert "protocol=" not in server.log
    assert '"protocol"' not in server.log


def test_a_file_that_cannot_be_written_is_reported_at_start(repository: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="--access-log-file: cannot write"),
        ServeProcess(repository, "--access-log=text", f"--access-log-file={repository}"),
    ):
        pytest.fail("it started")
