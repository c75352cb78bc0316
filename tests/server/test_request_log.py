"""The request log: records, what is left out of them, their files, and what a full disk costs."""

import asyncio
import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_memory import MemoryClient as GrpcClient
from tests.support.http_memory import MemoryClient, request
from tests.support.s3_server import s3_server
from tritonclient.grpc import service_pb2

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.request import SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Outcome
from charonia.core.tensor import Array, Tensor
from charonia.server import request_log
from charonia.server.access.options import HeaderForward
from charonia.server.facade import Services
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.http.frontend import HttpFrontend, HttpLimits
from charonia.server.options import RequestLogOptions
from charonia.server.request_log import RequestRecorder
from charonia.stores.location import parse_address
from charonia.stores.remote import ObjectStore

INFER = "/v2/models/identity/infer"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1] * 16}]}).encode()


def tensor(name: str, array: Array, datatype: DataType = DataType.FP32) -> Tensor:
    return Tensor(name, datatype, array)


def asked(**fields: Any) -> InferRequest:
    inputs = {"A": tensor("A", np.array([[1.5, 2.0]], np.float32))}
    return InferRequest("m", fields.pop("inputs", inputs), **fields)


def answer(*outputs: Tensor, execution: ExecutionRecord | None = None) -> InferResponse:
    return InferResponse("m", "3", "", list(outputs or (tensor("Y", np.array([3.0], np.float32)),)), None, execution)


@contextmanager
def recorder(folder: Path, **options: Any) -> Iterator[RequestRecorder]:
    made = RequestRecorder(RequestLogOptions(str(folder), **options))
    try:
        yield made
    finally:
        made.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def logged(
    folder: Path, request: InferRequest, *outcomes: Outcome, headers: dict[bytes, bytes] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the record of a request."""
    with recorder(folder, **options) as made:
        reply = made.begin("http", request, lambda outcome, final: None, (headers or {}).get, None)
        for number, outcome in enumerate(outcomes or (answer(),), 1):
            reply(outcome, number == max(len(outcomes), 1))
    (record,) = lines(folder)
    return record


def test_a_record_has_the_request_as_a_body_and_the_answer(tmp_path: Path) -> None:
    outputs = (RequestedOutput("Y"), RequestedOutput("Z", 2))
    request = asked(id="a", parameters={"k": 1}, correlation_id=7, flags=SEQUENCE_START, outputs=outputs, priority=2)

    record = logged(tmp_path, request, answer(execution=ExecutionRecord("m_0", 1, 2_000_000, 3_000_000)))

    assert record.pop("time").endswith("Z")
    assert record.pop("latency_ms") >= 0
    assert record == {
        "protocol": "http",
        "model": "m",
        "version": "3",
        "id": "a",
        "queue_ms": 2.0,
        "compute_ms": 3.0,
        "request": {
            "inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
            "parameters": {"k": 1, "sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 2},
            "outputs": [{"name": "Y"}, {"name": "Z", "parameters": {"classification": 2}}],
        },
        "responses": [{"outputs": [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [3.0]}]}],
    }


def test_every_response_and_the_error_are_written(tmp_path: Path) -> None:
    record = logged(tmp_path, asked(), answer(), answer(), invalid("no", hint="try"))

    assert len(record["responses"]) == 2
    assert record["error"] == {"code": "INVALID_ARG", "message": "no (hint: try)"}


@pytest.mark.parametrize(
    ("array", "datatype"),
    [
        (np.array([np.nan], np.float32), DataType.FP32),
        (np.array([1], np.float16), DataType.FP16),
        (np.array([b"\xff"], object), DataType.BYTES),
    ],
)
def test_values_without_a_json_form_are_base64(tmp_path: Path, array: Array, datatype: DataType) -> None:
    record = logged(tmp_path, asked(inputs={"A": tensor("A", array, datatype)}))

    assert sorted(record["request"]["inputs"][0]) == ["b64", "datatype", "name", "shape"]


def test_a_record_has_the_values_at_the_time_of_the_request(tmp_path: Path) -> None:
    array = np.array([1.0], np.float32)
    with recorder(tmp_path) as made:
        reply = made.begin("grpc", asked(inputs={"A": tensor("A", array)}), lambda *_: None, _no_header, None)
        array[0] = 9  # a client uses its shared memory again
        reply(answer(), True)

    assert lines(tmp_path)[0]["request"]["inputs"][0]["data"] == [1.0]


def test_large_tensors_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "RECORD_BYTES_MAX", 10)

    record = logged(tmp_path, asked(), answer(tensor("Y", np.zeros(2, np.float32)), tensor("Z", np.zeros(0))))

    assert record["responses"][0]["outputs"][0] == {"name": "Y", "datatype": "FP32", "shape": [2]}
    assert record["responses"][0]["outputs"][1]["data"] == []


def test_named_values_are_left_out_and_so_is_the_text_of_errors(tmp_path: Path) -> None:
    request = asked(parameters={"token": "secret", "k": 1})

    record = logged(tmp_path, request, answer(), invalid("got 'secret'"), redact=("A", "Y", "token"))

    assert "secret" not in json.dumps(record)
    assert record["request"]["parameters"] == {"token": "[redacted]", "k": 1}
    assert record["request"]["inputs"][0]["data"] == record["responses"][0]["outputs"][0]["data"] == "[redacted]"
    assert record["error"] == {"code": "INVALID_ARG"}


def test_only_named_headers_are_written(tmp_path: Path) -> None:
    headers = {b"authorization": b"Bearer s", b"x-user": b"ann"}

    assert "headers" not in logged(tmp_path / "a", asked(), headers=headers)
    with recorder(tmp_path / "c", headers=("X-User",)) as made:
        made.begin("http", asked(), lambda *_: None, headers.get, None)(answer(), True)
    assert lines(tmp_path / "c")[0]["headers"] == {"x-user": "ann"}


def test_forwarded_headers_are_no_parameters(tmp_path: Path) -> None:
    request = asked(parameters={"X-Key": "secret", "triton_http_request": "{}", "k": 1})
    with recorder(tmp_path) as made:
        made.begin("http", request, lambda *_: None, _no_header, HeaderForward("x-key"))(answer(), True)

    assert lines(tmp_path)[0]["request"]["parameters"] == {"k": 1}
    assert request.parameters["X-Key"] == "secret"


def test_a_function_changes_and_discards_records(tmp_path: Path) -> None:
    file = tmp_path / "hook.py"
    file.write_text(
        "def clean(record):\n"
        "    if record['id'] == 'drop':\n        return None\n"
        "    if record['id'] == 'fail':\n        raise ValueError('secret')\n"
        "    record['request'] = {}\n    return record\n"
    )
    with recorder(tmp_path / "log", hook=f"{file}:clean") as made:
        for name in ("drop", "fail", "keep"):
            made.begin("http", asked(id=name), lambda *_: None, _no_header, None)(answer(), True)

    assert [(record["id"], record["request"]) for record in lines(tmp_path / "log")] == [("keep", {})]
    assert made.dropped == 1


@pytest.mark.parametrize(("text", "message"), [("x.py:f", "cannot be loaded"), ("{}:other", "has no function 'other'")])
def test_a_function_that_cannot_be_used_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hook.py").write_text("")
    options = RequestLogOptions(str(tmp_path / "log"), hook=text.format(tmp_path / "hook.py"))

    with pytest.raises(ServingError, match=message):
        RequestRecorder(options)


def test_a_share_of_the_requests_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0.1, 0.3, 0.2, 0.9])
    monkeypatch.setattr(request_log, "random", lambda: next(numbers))
    with recorder(tmp_path, sample=0.25) as made:
        for name in "abcd":
            made.begin("http", asked(id=name), lambda *_: None, _no_header, None)(answer(), True)

    assert [record["id"] for record in lines(tmp_path)] == ["a", "c"]


def test_only_the_server_can_read_it(tmp_path: Path) -> None:
    logged(tmp_path / "log", asked())

    (file,) = (tmp_path / "log").iterdir()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "log").chmod(0o777)
    with pytest.raises(ServingError, match="every user can write"):
        RequestRecorder(RequestLogOptions(str(tmp_path / "log")))


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine")
    old = tmp_path / "requests-20200101T000000Z-1-0.jsonl"
    old.write_text("x" * 9000)
    with recorder(tmp_path, bytes_max=8000) as made:
        for number in range(60):
            made.begin("http", asked(id=str(number)), lambda *_: None, _no_header, None)(answer(), True)

    files = [path for path in tmp_path.iterdir() if path.name != "notes.jsonl"]
    assert not old.exists()
    assert 1 < len(files) <= 8
    assert sum(path.stat().st_size for path in files) <= 8000 + 1000
    assert (tmp_path / "notes.jsonl").exists()


def test_a_full_disk_costs_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Outcome] = []
    made = RequestRecorder(RequestLogOptions(str(tmp_path)))
    monkeypatch.setattr(os, "write", _full)
    for _ in range(3):
        made.begin("http", asked(), lambda outcome, final: answers.append(outcome), _no_header, None)(answer(), True)
    made.close()

    assert (len(answers), made.dropped, lines(tmp_path)) == (3, 3, [])
    assert "1 records of requests were dropped" in caplog.text


def _full(file: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_records_go_to_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as server:
        made = RequestRecorder(RequestLogOptions(server.uri + "/log"))
        made.begin("http", asked(id="a"), lambda *_: None, _no_header, None)(answer(), True)
        spool = made._files.folder
        made.close()
        store = ObjectStore(parse_address(server.uri + "/log"))
        (file,) = store.files()
        text = b"".join(map(bytes, store.read(file, 0, file.size)))

    assert file.path.startswith("requests-")
    assert json.loads(text)["id"] == "a"
    assert not spool.exists()


def test_http_requests_are_logged(tmp_path: Path) -> None:
    with recorder(tmp_path, headers=("x-user",)) as made:
        endpoint = HttpFrontend(FakeEngine(), HttpLimits(), services=Services(request_log=made))
        (response,) = MemoryClient(endpoint).send(request(INFER, method="POST", body=BODY, headers={"X-User": "ann"}))

    (record,) = lines(tmp_path)
    assert response.status == 200
    assert (record["protocol"], record["headers"]) == ("http", {"x-user": "ann"})
    assert record["responses"][0]["outputs"][0]["data"] == [1.0] * 16
    assert record["request"] == json.loads(BODY)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_grpc_requests_are_logged(tmp_path: Path, method: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="identity", id="g")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(np.zeros(16, "<f4").tobytes())
    with recorder(tmp_path) as made:

        async def main() -> None:
            frontend = GrpcFrontend(FakeEngine(), services=Services(request_log=made))
            await GrpcClient(frontend.connect()).call(method, message.SerializeToString())

        asyncio.run(main())

    (record,) = lines(tmp_path)
    assert (record["protocol"], record["id"], record["version"]) == ("grpc", "g", "1")


def test_other_options_need_a_folder() -> None:
    assert list(RequestLogOptions(sample=0.5).problems()) == [
        "--request-log-...: expected --request-log=FOLDER, too; nothing is logged"
    ]


def _no_header(name: bytes) -> bytes | None:
    return None
