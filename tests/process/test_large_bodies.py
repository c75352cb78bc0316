"""Large requests to a server whose front ends are processes: they are received in memory that the engine reads."""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually, started_by

from charonia.client import Client

SIZE = 100_000
IN_ENGINE = 'parameters { key: "front_end" value { string_value: "no" } }'
NAME = "memfd:charonia"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder: Path = tmp_path_factory.mktemp("large") / "models"
    write_model(folder, "echo", "", config=identity_pbtxt(dims=(-1,), more=IN_ENGINE))
    write_model(folder, "worker", PYTHON_IDENTITY, config=identity_pbtxt("python", dims=(-1,)))
    with ServeProcess(folder, "--front-ends=1") as started:
        yield started


def child(server: ServeProcess, name: str) -> psutil.Process:
    (found,) = [each for each in started_by(server.process.pid) if name in each.cmdline()]
    return found


def regions(process: psutil.Process) -> int:
    """Return how many regions a process has made, or has of another one."""
    count = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += NAME in os.readlink(entry)
    return count


@pytest.mark.parametrize("model", ["echo", "worker"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_large_requests_together_each_get_their_own_answer(server: ServeProcess, protocol: str, model: str) -> None:
    def ask(number: int) -> bool:
        sent = np.arange(number, number + SIZE + number, dtype=np.float32).reshape(1, -1)
        return np.array_equal(client.infer(model, {"INPUT0": sent}).outputs["OUTPUT0"], sent)

    url = server.http if protocol == "http" else f"grpc://{server.grpc}"
    with Client(url) as client, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(64)))


def test_memory_of_requests_is_used_again_whether_they_are_answered_refused_or_left(server: ServeProcess) -> None:
    front_end = child(server, "front_end_1")
    sent = np.zeros((1, SIZE), np.float32)
    head = (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"
        b"Inference-Header-Content-Length: 10\r\n\r\n" % (4 * SIZE)
    )
    host, port = server.http.split(":")

    def answered_left_and_refused(client: Client) -> None:
        client.infer("echo", {"INPUT0": sent})
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(head + bytes(1000))
        with socket.create_connection((host, int(port))) as refused:
            refused.sendall(head + bytes(4 * SIZE))
            assert refused.recv(100).startswith(b"HTTP/1.1 400 ")

    with Client(server.http) as client:
        for _ in range(10):
            answered_left_and_refused(client)
        before = regions(front_end)
        for _ in range(40):
            answered_left_and_refused(client)

    assert regions(front_end) < before + 40  # some more are in use together when the machine is slow


def test_the_engine_keeps_nothing_of_a_front_end_that_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "echo", "", config=identity_pbtxt(dims=(-1,), more=IN_ENGINE))
    sent = np.zeros((1, SIZE), np.float32)
    with ServeProcess(tmp_path / "models", "--front-ends=1") as server:
        engine, front_end = child(server, "engine"), child(server, "front_end_1")
        with Client(server.http) as client:
            client.infer("echo", {"INPUT0": sent})
            assert regions(engine) > 0

            front_end.send_signal(signal.SIGKILL)

            assert eventually(lambda: regions(engine) == 0), server.log
        assert server.logs(") is ready again")
        with Client(server.http) as client:
            client.infer("echo", {"INPUT0": sent})
