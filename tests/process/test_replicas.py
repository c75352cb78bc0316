"""Several servers behind one address: clients that never repeat a request lose none while servers come and go."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tests.process.test_guarded_server import child
from tests.support.models import identity_pbtxt, write_model
from tests.support.ports import free_port
from tests.support.process import ServeProcess, eventually
from tests.support.running_load import Ask, Load, Opened, echo, stock

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


@contextlib.contextmanager
def over_http(address: str) -> Iterator[Ask]:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=200)) as connection:

        def ask(_: int) -> None:
            connection.request("POST", "/v2/models/echo/infer", BODY, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text

        yield ask


def afresh(opened: Opened) -> Opened:
    """Return what opens the client anew for each request."""

    def ask(number: int) -> None:
        with opened() as one:
            one(number)

    return lambda: contextlib.nullcontext(ask)


def load_of(http_address: str, grpc_address: str) -> Load:
    # Channels of one process share their connections unless they are told not to.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    kept = {
        "http": partial(over_http, http_address),
        "grpc": partial(stock, grpcclient, grpc_address, partial(echo, "echo"), channel_args=options),
    }
    return Load({**kept, **{f"fresh {protocol}": afresh(opened) for protocol, opened in kept.items()}}, PAUSE_S)


def ask(address: str, path: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=200)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0


def is_ready(address: str) -> bool:
    return ask(address, "/v2/health/ready") == 200


def count(server: ServeProcess) -> int:
    with contextlib.closing(http.client.HTTPConnection(server.metrics, timeout=200)) as connection:
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
        with load_of(first.http, first.grpc) as load:
            assert (second.http, second.grpc, second.own != first.own) == (address, first.grpc, True)
            assert eventually(lambda: count(second) > 20)
            assert first.stop() == 0
            load.goes_on(20)
            with Replica(repository, second) as third:
                load.goes_on(20)
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
        with load_of(first.http, first.grpc):
            assert eventually(lambda: count(first) > before and count(second) > 0)

    assert away
    assert set(away) == {200}


def test_a_server_that_is_killed_takes_only_its_own_connections_along(repository: Path, first: Replica) -> None:
    with Replica(repository, first) as second:
        with load_of(first.http, first.grpc) as load:
            first.kill()
            load.goes_on(20)
            answered = count(second)
        assert answered > 0
        assert len(load.errors) <= 4, load.errors  # one request in flight of each client, at most
        assert is_ready(first.http)
