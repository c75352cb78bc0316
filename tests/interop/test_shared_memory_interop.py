"""Shared memory of clients: the same regions and requests to both servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from tests.support.models import PYTHON_IDENTITY, write_model
from tests.support.peers import Pair
from tritonclient.grpc import service_pb2 as pb

CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
BASE = "/v2/systemsharedmemory"
INFER = "/v2/models/echo/infer"
VALUES = np.arange(64, dtype=np.float32)


@pytest.fixture(scope="module")
def pair(start_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", PYTHON_IDENTITY, config=CONFIG)
    started: Pair = start_pair(folder, ours=("--allow-client-shm=true",))  # this Triton has no such option
    return started


@pytest.fixture
def key(pair: Pair) -> Iterator[str]:
    """A memory object of 256 bytes; every region is unregistered afterwards."""
    path = Path("/dev/shm", f"charonia_interop_{uuid4().hex[:12]}")
    path.write_bytes(VALUES.tobytes())
    yield f"/{path.name}"
    pair.ask("POST", f"{BASE}/unregister")
    path.unlink()


@pytest.fixture
def region(pair: Pair, same_http: Any, key: str) -> str:
    same_http(pair, "POST", f"{BASE}/region/r/register", {"key": key, "byte_size": 256})
    return "r"


def place(region: object, byte_size: object = 16, offset: object = 0) -> dict[str, object]:
    return {"shared_memory_region": region, "shared_memory_byte_size": byte_size, "shared_memory_offset": offset}


def request(given: dict[str, object] | None = None, output: dict[str, object] | None = None) -> dict[str, object]:
    source = {"parameters": given} if given is not None else {"data": [1.0, 2.0, 3.0, 4.0]}
    document: dict[str, object] = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", **source}]}
    if output is not None:
        document["outputs"] = [{"name": "OUTPUT0", "parameters": output}]
    return document


def test_a_region_is_registered_listed_and_forgotten(pair: Pair, same_http: Any, key: str) -> None:
    body = {"key": key, "offset": 0, "byte_size": 256}
    assert same_http(pair, "POST", f"{BASE}/region/r/register", body).status == 200
    assert same_http(pair, "POST", f"{BASE}/region/r/register", body).status == 400
    assert same_http(pair, "GET", f"{BASE}/region/r/status").document == [{"name": "r", **body}]
    same_http(pair, "GET", f"{BASE}/status")
    same_http(pair, "GET", f"{BASE}/region/none/status")
    same_http(pair, "POST", f"{BASE}/region/none/unregister")
    same_http(pair, "POST", f"{BASE}/region/r/unregister")
    assert same_http(pair, "GET", f"{BASE}/status").document == []


@pytest.mark.parametrize(
    "change",
    [
        {"key": None},
        {"byte_size": None},
        {"key": "/charonia_interop_none"},
        {"byte_size": 0},
        {"byte_size": 257},
        {"offset": 200, "byte_size": 57},
        {"offset": 1000},
    ],
)
def test_what_cannot_be_registered_has_the_same_status(
    pair: Pair, same_http: Any, key: str, change: dict[str, object]
) -> None:
    body = {k: v for k, v in {"key": key, "byte_size": 256, **change}.items() if v is not None}

    assert same_http(pair, "POST", f"{BASE}/region/r/register", body).status >= 400
    assert same_http(pair, "GET", f"{BASE}/status").document == []


@pytest.mark.parametrize("key_given", ["/a/b", "../shm/x", "", "triton_python_backend_shm_region_1"])
def test_a_name_that_no_object_can_have_is_the_callers_mistake_here_and_triton_calls_it_its_own(
    pair: Pair, key_given: str
) -> None:
    ours, theirs = pair.ask("POST", f"{BASE}/region/r/register", {"key": key_given, "byte_size": 4})

    assert (ours.status, theirs.status) == (400, 500)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (place("r"), None),
        (place("r", 16, 64), None),
        (place("r", 16, 240), None),
        (None, place("r")),
        (None, place("r", 64, 64)),
        (None, {**place("r"), "binary_data": False}),
        (place("r", 16, 16), place("r", 16, 128)),
    ],
)
def test_tensors_lie_in_the_region(
    pair: Pair, same_http: Any, region: str, key: str, given: dict[str, object] | None, output: dict[str, object] | None
) -> None:
    assert same_http(pair, "POST", INFER, request(given, output)).status == 200

    if output is not None:
        offset = int(str(output["shared_memory_offset"]))
        start = int(str(given["shared_memory_offset"])) // 4 if given is not None else None
        expected = VALUES[start : start + 4] if start is not None else np.arange(1, 5, dtype=np.float32)
        written = Path("/dev/shm", key[1:]).read_bytes()[offset : offset + 16]
        np.testing.assert_array_equal(np.frombuffer(written, np.float32), expected)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"shared_memory_region": "r"}, None),
        (place("r", 15), None),
        (place("r", 32), None),
        (place("r", 0), None),
        (place("r", 16, 256), None),
        (place("r", 16, 257), None),
        (place("r", 16, 250), None),
        (place("none"), None),
        (None, place("r", 15)),
        (None, {"shared_memory_region": "r"}),
        (None, place("r", 16, 250)),
        (None, place("none")),
        (None, {**place("r"), "classification": 1}),
        (None, {**place("r"), "binary_data": True}),
    ],
)
def test_what_a_request_cannot_name_has_the_same_status(
    pair: Pair, same_http: Any, region: str, given: dict[str, object] | None, output: dict[str, object] | None
) -> None:
    assert same_http(pair, "POST", INFER, request(given, output)).status >= 400


def test_without_a_gpu_memory_of_one_is_not_registered(pair: Pair, same_http: Any) -> None:
    body = {"raw_handle": {"b64": "eHh4" * 22}, "device_id": 0, "byte_size": 4}

    same_http(pair, "GET", "/v2/cudasharedmemory/status")
    same_http(pair, "GET", "/v2/cudasharedmemory/region/r/status")
    same_http(pair, "POST", "/v2/cudasharedmemory/unregister")
    assert same_http(pair, "POST", "/v2/cudasharedmemory/region/r/register", body).status == 400


def test_regions_are_the_same_over_grpc(pair: Pair, same_grpc: Any, key: str) -> None:
    register = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=256)
    same_grpc(pair, "SystemSharedMemoryRegister", register)
    assert same_grpc(pair, "SystemSharedMemoryRegister", register) == "ALREADY_EXISTS"
    same_grpc(pair, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
    same_grpc(pair, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r"))
    same_grpc(pair, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="none"))
    same_grpc(pair, "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="none"))
    same_grpc(pair, "CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=b"h" * 64))
    same_grpc(pair, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="none"))
    same_grpc(pair, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest())


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (place("r"), None),
        (place("r", 16, 64), place("r", 16, 128)),
        (place("r", 15), None),
        (place("r", 16, 256), None),
        (place("r", 16, 250), None),
        (place("none"), None),
        (None, place("r", 64, 64)),
        (None, place("r", 8)),
        (None, place("none")),
    ],
)
def test_requests_that_name_regions_are_the_same_over_grpc(
    pair: Pair, same_grpc: Any, region: str, given: dict[str, object] | None, output: dict[str, object] | None
) -> None:
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=[4])
    if given is None:
        message.raw_input_contents.append(VALUES[:4].tobytes())
    else:
        fill(tensor.parameters, given)
    fill(message.outputs.add(name="OUTPUT0").parameters, output or {})

    same_grpc(pair, "ModelInfer", message)


def fill(target: Any, values: dict[str, object]) -> None:
    for name, value in values.items():
        setattr(target[name], "string_param" if isinstance(value, str) else "int64_param", value)
