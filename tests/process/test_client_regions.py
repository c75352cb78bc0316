"""Tensors in shared memory with the stock clients: a real server, real memory objects."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tests.support.fork_server import run_command
from tests.support.models import PYTHON_IDENTITY, chain_pbtxt, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess

PROTOCOLS = pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
OTHERS = 16
"""Connections of both protocols; of so many, the kernel gives some to each front end."""
SENT = np.arange(6000, dtype=np.float32).reshape(2, 3000)


def identity(backend: str = "identity", more: str = "") -> str:
    return identity_pbtxt(backend, dims=(-1,), max_batch_size=8, more=more)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", "", config=identity())
    write_model(
        folder, "batching", "", config=identity(more="dynamic_batching { max_queue_delay_microseconds: 20000 }")
    )
    write_model(folder, "python", PYTHON_IDENTITY, config=identity(backend="python"))
    write_model(folder, "ensemble", "", config=chain_pbtxt("echo", "python", dims=(-1,), max_batch_size=8))
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(
        repository, "--allow-client-shm=true", "--client-shm-byte-size=1000000", *request.param
    ) as started:
        yield started


@contextmanager
def client_of(module: Any, server: ServeProcess) -> Iterator[Any]:
    with module.InferenceServerClient(
        server.http if module is httpclient else server.grpc, **concurrency(module)
    ) as client:
        yield client


def concurrency(module: Any) -> dict[str, int]:
    return {"concurrency": 8} if module is httpclient else {}


@contextmanager
def region(client: Any, byte_size: int, content: bytes = b"") -> Iterator[tuple[str, Any]]:
    """A registered memory object of its own; yields its name and its handle."""
    name = f"charonia_test_{uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region(name, f"/{name}", byte_size)
    try:
        if content:
            Path("/dev/shm", name).write_bytes(content.ljust(byte_size, b"\0"))
        client.register_system_shared_memory(name, f"/{name}", byte_size)
        try:
            yield name, handle
        finally:
            client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)


def infer(
    module: Any, client: Any, model: str, source: str, target: str = "", *, shape: Any = (2, 3000), size: int = 24000,
    offset: int = 0, datatype: str = "FP32", target_size: int = 0,
) -> Any:  # fmt: skip
    given = module.InferInput("INPUT0", list(shape), datatype)
    given.set_shared_memory(source, size, offset)
    asked = module.InferRequestedOutput("OUTPUT0")
    if target:
        asked.set_shared_memory(target, target_size or size)
    return client.infer(model, [given], outputs=[asked])


@PROTOCOLS
@pytest.mark.parametrize("model", ["echo", "batching", "python", "ensemble"])
def test_inputs_and_outputs_lie_in_shared_memory(server: ServeProcess, module: Any, model: str) -> None:
    with (
        client_of(module, server) as client,
        region(client, SENT.nbytes, SENT.tobytes()) as (source, _),
        region(client, SENT.nbytes) as (target, handle),
    ):
        result = infer(module, client, model, source, target)

        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, SENT.shape), SENT)
        assert result.get_output("OUTPUT0") is not None
        assert not len(result.get_response().raw_output_contents[0]) if module is grpcclient else True
        np.testing.assert_array_equal(infer(module, client, model, source).as_numpy("OUTPUT0"), SENT)


def test_what_one_connection_registers_can_be_used_over_every_other(server: ServeProcess) -> None:
    with (
        client_of(httpclient, server) as client,
        region(client, SENT.nbytes, SENT.tobytes()) as (source, _),
        region(client, SENT.nbytes) as (target, handle),
    ):
        for number in range(OTHERS):
            module = (httpclient, grpcclient)[number % 2]
            shm.set_shared_memory_region(handle, [np.zeros_like(SENT)])
            # A channel of its own: the stock client shares those with equal arguments.
            own = {"channel_args": [("number", number)]} if module is grpcclient else {}
            with module.InferenceServerClient(server.http if module is httpclient else server.grpc, **own) as other:
                infer(module, other, "echo", source, target)
                assert other.get_system_shared_memory_status() is not None
            np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, SENT.shape), SENT)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_charonia_perf_measures_with_shared_memory(server: ServeProcess, protocol: str) -> None:
    url = server.http if protocol == "http" else server.grpc

    result = run_command(
        *("perf", "-m", "echo", "-i", protocol, "-u", url),
        *("--shape", "INPUT0:64", "--shared-memory", "system", "--request-count", "200"),
    )

    assert result.returncode == 0, result.stderr
    assert "throughput" in result.stdout
    with client_of(httpclient, server) as client:
        assert client.get_system_shared_memory_status() == []
