"""A server of several processes of which one is killed: who notices, what clients are told, what comes back."""

import contextlib
import http.client
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually, started_by, wait_until_ended

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
).encode()
INFER = "/v2/models/{}/infer"
BACK = "the engine is back"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    write_model(folder, "slow", gated(PYTHON_IDENTITY), config=identity_pbtxt("python", dims=(4,)))
    return folder


@pytest.fixture
def gate(repository: Path) -> Gate:
    return Gate(repository / "slow" / "1")


@pytest.fixture
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--front-ends=2") as started:
        yield started


def in_flight(server: ServeProcess) -> int:
    """Return how many requests the engine works on or has in its queues."""
    document = ask(server.http, "GET", "/v2/load")[1]
    return int(json.loads(document)["named_metrics"]["requests_in_flight"])


def child(server: ServeProcess, name: str) -> psutil.Process:
    """Return the process of the server with a name, once it runs."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found.clear()
        for process in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "charonia.cli.serve_process" in process.cmdline() and name in process.cmdline():
                    found.append(process)
        return len(found) == 1

    assert eventually(look), server.log
    return found[0]


def kill_engine(server: ServeProcess, name: str = "engine", front_ends: int = 2) -> None:
    """Kill the engine and return when every front end has the next one: until it notices, it may still say "ready"."""
    engine = child(server, name)
    back = server.log.count(BACK)
    engine.kill()
    wait_until_ended(engine)
    assert server.logs(BACK, back + front_ends), server.log
    assert child(server, name) != engine
    assert eventually(lambda: is_ready(server)), server.log  # one that an upgrade replaces may have been counted


def ask(address: str, method: str, path: str, body: bytes | None = None) -> tuple[int, str, dict[str, str]]:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=200)) as connection:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.headers)


def is_ready(server: ServeProcess) -> bool:
    return ask(server.http, "GET", "/v2/health/ready")[0] == 200


def restarts(server: ServeProcess) -> dict[tuple[str, str], int]:
    """Return the number of restarts on the metrics page by process and reason."""
    series = r'^charonia_process_restarts_total\{process="(.+?)",reason="(.+?)"\} (\d+)$'
    lines = re.findall(series, server.metrics_page(), re.M)
    return {(name, reason): int(count) for name, reason, count in lines}


class Client(threading.Thread):
    """A client with a connection of its own that never stops asking, and notes the answers."""

    def __init__(self, server: ServeProcess) -> None:
        super().__init__(daemon=True)
        self.statuses: list[int] = []
        self.errors: list[str] = []
        self.breaks = 0
        self._address = server.http
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join(200)

    def run(self) -> None:
        while not self._is_over.is_set():
            with contextlib.closing(http.client.HTTPConnection(self._address, timeout=200)) as connection:
                try:
                    while not self._is_over.wait(0.01):
                        connection.request("POST", INFER.format("echo"), BODY)
                        response = connection.getresponse()
                        text = response.read().decode()
                        self.statuses.append(response.status)
                        if response.status != 200:
                            self.errors.append(text)
                except (OSError, http.client.HTTPException):
                    self.breaks += 1

    def is_answered(self, more: int = 5) -> bool:
        before = self.statuses.count(200)
        return eventually(lambda: self.statuses.count(200) >= before + more)


def test_a_front_end_that_is_killed_costs_its_connections_and_is_back(server: ServeProcess) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server)) for _ in range(8)]
        assert all(client.is_answered() for client in clients)
        engine, other = child(server, "engine"), child(server, "front_end_2")

        child(server, "front_end_1").kill()
        assert server.logs("front_end_1 (pid ")
        assert all(client.is_answered() for client in clients)
        assert eventually(lambda: restarts(server) == {("front_end_1", "SIGKILL"): 1})
        assert server.logs(") is ready again")
        assert all(client.is_answered() for client in clients)

    assert (child(server, "engine"), child(server, "front_end_2")) == (engine, other)
    assert all(client.statuses.count(200) == len(client.statuses) for client in clients)
    # Connections of the other front end went on; those of the killed one broke once, or twice if the client came back
    # while the system closed one socket of the process after the other.
    assert {client.breaks for client in clients} <= {0, 1, 2}
    assert server.stop() == 0


def test_an_engine_that_is_killed_comes_back_and_every_request_has_an_answer(server: ServeProcess, gate: Gate) -> None:
    running: list[tuple[int, str, dict[str, str]]] = []
    stuck = threading.Thread(target=lambda: running.append(ask(server.http, "POST", INFER.format("slow"), BODY)))
    with gate.closed(), Client(server) as client:
        stuck.start()
        assert eventually(lambda: gate.runs > 0)
        assert client.is_answered()
        engine = child(server, "engine")
        engine.kill()

        stuck.join(200)
        assert server.logs("engine (pid ")
        assert eventually(lambda: is_ready(server))
        assert client.is_answered()

    status, text, headers = running[0]
    assert status == 503
    assert "the engine ended before the request was answered" in text
    assert "Retry-After" in headers
    assert child(server, "engine") != engine
    # What was in flight failed; what came meanwhile waited, and was refused where that took too long.
    assert set(client.statuses) <= {200, 503}
    interrupted = [text for text in client.errors if "the engine ended before the request was answered" in text]
    assert len(interrupted) <= 1
    assert all("the engine is being started again" in text for text in client.errors if text not in interrupted)
    assert client.breaks == 0
    assert restarts(server) == {("engine", "SIGKILL"): 1}
    assert ask(server.http, "POST", INFER.format("slow"), BODY)[0] == 200
    explained = json.loads(ask(server.http, "GET", "/v2/models/echo/explain")[1])["processes"]
    assert [(each["name"], each["restarts"], each["last_exit"]) for each in explained] == [
        ("engine", 1, "SIGKILL"),
        ("front_end_1", 0, ""),
        ("front_end_2", 0, ""),
    ]
    assert server.stop() == 0


def test_while_the_engine_loads_its_models_the_server_is_live_and_not_ready(
    server: ServeProcess, repository: Path
) -> None:
    # The model does not load any more: the engine fails to start until it is repaired.
    config = repository / "echo" / "config.pbtxt"
    text = config.read_text()
    config.write_text("no configuration")
    child(server, "engine").kill()

    assert server.logs("exit status 1: not every model could be loaded")
    assert not is_ready(server)
    assert ask(server.http, "GET", "/v2/health/live")[0] == 200
    config.write_text(text)
    assert eventually(lambda: is_ready(server))
    assert ask(server.http, "POST", INFER.format("echo"), BODY)[0] == 200
    assert server.stop() == 0


@pytest.mark.cold_start
def test_when_the_guard_is_killed_every_process_ends(server: ServeProcess) -> None:
    processes = started_by(server.process.pid)
    assert len(processes) >= 3

    server.kill()

    for process in processes:
        wait_until_ended(process)


def test_a_stop_loses_no_request(server: ServeProcess, gate: Gate) -> None:
    answers: list[int] = []
    waiting = [
        threading.Thread(target=lambda: answers.append(ask(server.http, "POST", INFER.format("slow"), BODY)[0]))
        for _ in range(6)
    ]
    with gate.closed():
        for thread in waiting:
            thread.start()
        assert eventually(lambda: gate.runs > 0)
        assert eventually(lambda: in_flight(server) == 6)
        server.begin_to_stop()
        server.process.send_signal(signal.SIGTERM)  # within a second: the same one

    for thread in waiting:
        thread.join(200)
    assert server.wait() == 0
    assert answers == [200] * 6
