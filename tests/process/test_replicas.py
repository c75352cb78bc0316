"""Several servers behind one address: clients that never repeat a request lose none while servers come and go."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tests.process.test_guarded_server import child
from tests.support.models import identity_pbtxt, write_model
from tests.support.ports import free_port
from tests.support.process import ServeProcess, eventually

pytestmark = pytest.mark.timeout(180)

BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    return folder


class Replica(ServeProcess):
    """A server that may share its address."""

    def __init__(self, repository: Path, beside: ServeProcess | None = None) -> None:
        self.own_port = free_port()
        arguments = [f"--replica-port={self.own_port}"]
        if beside is not None:
            arguments.append(f"--beside={beside.process.pid}")
        super().__init__(repository, "--front-ends=1", *arguments)

    @property
    def own(self) -> str:
        return f"127.0.0.1:{self.own_port}"


PAUSE_S = 0.015
"""Pause of a client: a connection and a channel each time take much of two cores, which the servers start on."""


class Load:
    """Clients that never repeat a request, of both protocols, over one connection and over fresh ones."""

    def __init__(self, http_address: str, grpc_address: str) -> None:
        self.answers = dict.fromkeys(("kept http", "fresh http", "kept grpc", "fresh grpc"), 0)
        self.errors: list[str] = []
        self._http, self._grpc = http_address, grpc_address
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(kind,), daemon=True) for kind in self.answers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def goes_on(self) -> None:
        """Wait until each kind of client has had some more answers."""
        before = dict(self.answers)
        assert eventually(lambda: all(self.answers[kind] > before[kind] + 20 for kind in before)), (before, self.errors)

    def _run(self, kind: str) -> None:
        while not self._is_over.is_set():
            try:
                (self._send_http if kind.endswith("http") else self._send_grpc)(kind)
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__} {error}")

    def _send_http(self, kind: str) -> None:
        with contextlib.closing(http.client.HTTPConnection(self._http, timeout=30)) as connection:
            connection.connect()
            while not self._is_over.is_set():
                connection.request("POST", "/v2/models/echo/infer", BODY, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
                assert response.status == 200, text
                self.answers[kind] += 1
                time.sleep(PAUSE_S)
                if kind.startswith("fresh") or response.will_close:
                    return

    def _send_grpc(self, kind: str) -> None:
        sent = np.ones((1, 4), np.float32)
        given = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
        given.set_data_from_numpy(sent)
        # Channels of one process share their connections unless they are told not to.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpcclient.InferenceServerClient(self._grpc, channel_args=options) as client:
            while not self._is_over.is_set():
                assert client.infer("echo", [given]).as_numpy("OUTPUT0").tolist() == sent.tolist()
                self.answers[kind] += 1
                time.sleep(PAUSE_S)
                if kind.startswith("fresh"):
                    return


def ask(address: str, path: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0


def is_ready(address: str) -> bool:
    return ask(address, "/v2/health/ready") == 200


def count(server: ServeProcess) -> int:
    with contextlib.closing(http.client.HTTPConnection(server.metrics, timeout=5)) as connection:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in page.splitlines()
        if line.startswith("nv_inference_request_success{")
    )


@pytest.fixture
def first(repository: Path) -> Iterator[Replica]:
    with Replica(repository) as server:
        yield server


def test_servers_come_and_go_behind_one_address_and_no_request_is_lost(repository: Path, first: Replica) -> None:
    address = first.http
    with Replica(repository, first) as second:
        with Load(address, first.grpc) as load:
            assert (second.http, second.grpc, second.own != first.own) == (address, first.grpc, True)
            assert eventually(lambda: count(second) > 20)
            assert first.stop() == 0
            load.goes_on()
            with Replica(repository, second) as third:
                load.goes_on()
                assert eventually(lambda: count(third) > 0)
        assert (is_ready(second.own), is_ready(address)) == (True, True)
    assert load.errors == []
    assert ask(address, "/v2/health/live") == 0


def test_new_connections_go_to_the_others_while_an_engine_is_away(repository: Path, first: Replica) -> None:
    with Replica(repository, first) as second:
        child(first, "engine").kill()
        assert eventually(lambda: ask(first.own, "/v2/health/live") == 0)
        away = [ask(first.http, "/v2/health/ready") for _ in range(50) if not ask(first.own, "/v2/health/live")]
        assert eventually(lambda: is_ready(first.own))
        before = count(first)
        with Load(first.http, first.grpc):
            assert eventually(lambda: count(first) > before and count(second) > 0)

    assert away
    assert set(away) == {200}


def test_a_server_that_is_killed_takes_only_its_own_connections_along(repository: Path, first: Replica) -> None:
    with Replica(repository, first) as second:
        with Load(first.http, first.grpc) as load:
            first.kill()
            load.goes_on()
            answered = count(second)
        assert answered > 0
        assert len(load.errors) <= 4, load.errors  # one request in flight of each client, at most
        assert is_ready(first.http)
