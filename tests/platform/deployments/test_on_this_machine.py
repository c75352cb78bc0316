"""Deployments on this machine, with real servers."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from sqlalchemy import update
from tests.support.onnx_writer import GraphWriter
from tests.support.platform_models import add_version
from tests.support.ports import free_ports
from tests.support.process import eventually
from tests.support.running_load import Ask, Load

from charonia.client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database
from charonia.platform.database.lease import PlatformLease
from charonia.platform.database.tables import TaskRow, VersionRow
from charonia.platform.deployments.reads import ChangePlan, DeploymentView
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.environments import catalog
from charonia.platform.environments.catalog import EnvironmentRequest
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.targets.fit import MIB, LocalMachine
from charonia.platform.targets.local import LocalTarget
from charonia.platform.targets.local_server import ServerFolder
from charonia.platform.targets.server_calls import ask
from charonia.platform.tasks.runner import TaskRunner
from charonia.server.access.rules import METHODS, Scope
from charonia.server.grpc.methods import method_table

ADA = Principal.of("Ada", [Grant(ProjectRole.ADMIN)])
PORTS = free_ports(40)
ROOM = LocalMachine(8, 16_384 * MIB)  # whatever else runs here


def plus(number: float) -> bytes:
    """An ONNX model: y = x + number."""
    graph = GraphWriter()
    graph.input("x", DataType.FP32, ["batch", 4])
    graph.weight("number", DataType.FP32, np.full(1, number, np.float32))
    graph.node("Add", ["x", "number"], "y")
    graph.output("y", DataType.FP32, ["batch", 4])
    return graph.model()


class Place:
    """A platform without its page, on this machine."""

    def __init__(self, data: Path, ports: tuple[int, int] = PORTS) -> None:
        self.data = data
        self.ports = ports
        self.database = Database(f"sqlite:///{data / 'platform.sqlite'}")
        self.database.migrate()
        self.begin()

    def begin(self) -> None:
        self.target = LocalTarget(self.data / "deployments", self.ports, machine=lambda: ROOM)
        workloads = Workloads(self.data, open_artifacts("", self.data))
        self.deployments = Deployments(self.database, {"local": self.target}, workloads)
        self.deployments.start()

    def end(self) -> None:
        self.deployments.close()

    def get(self) -> DeploymentView:
        return self.deployments.reads.get(ADA, "default", "adder")

    def is_so(self, **wanted: object) -> bool:
        view = self.get()
        return all(getattr(view, name) == value for name, value in wanted.items())

    def until(self, **wanted: object) -> DeploymentView:
        assert eventually(lambda: self.is_so(**wanted)), (self.get(), self.log())
        return self.get()

    def log(self) -> str:
        return self.deployments.servers.log(ADA, "default", "adder")

    def pid(self) -> int:
        return int((self.data / "deployments" / "default" / "adder" / "server-1" / "pid").read_text())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    for number in (1.0, 2.0):
        add_version(place.database, tmp_path, "plus", {"1/model.onnx": plus(number)})
    add_version(place.database, tmp_path, "plus", {"1/model.onnx": b"no model"})
    yield place
    with contextlib.suppress(Exception):
        os.kill(place.pid(), signal.SIGKILL)
    place.end()
    place.database.close()


def spec(*versions: int, **more: object) -> dict[str, Any]:
    return {"name": "adder", "models": [{"name": "plus", "versions": list(versions), **more}]}


def result(address: str, x: float = 0.0) -> float:
    with Client(address) as client:
        return float(client.infer("plus", {"x": np.full((1, 4), x, np.float32)})["y"][0, 0])


@contextlib.contextmanager
def asking(url: str) -> Iterator[Ask]:
    with Client(url) as client:
        yield lambda _: float(client.infer("plus", {"x": np.zeros((1, 4), np.float32)})["y"][0, 0])


def load_on(view: DeploymentView) -> Load:
    """Return clients of both protocols; their results are the numbers of the versions that answer."""
    return Load({url: partial(asking, url) for url in (view.http, f"grpc://{view.grpc}")})


def test_a_port_that_another_program_takes_before_the_server_does_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[socket.socket] = []
    start = ServerFolder.start

    def late(server: ServerFolder, command: list[str], environment: dict[str, str]) -> None:
        if not taken:
            (port,) = [argument for argument in command if argument.startswith("--http-port=")]
            taken.append(socket.create_server(("127.0.0.1", int(port.partition("=")[2]))))
        start(server, command, environment)

    monkeypatch.setattr(ServerFolder, "start", late)
    place.deployments.changes.create(ADA, "default", spec(1))
    view = place.until(state="ready", serving=1)

    assert result(view.http) == 1.0
    assert not view.http.endswith(f":{taken[0].getsockname()[1]}")
    taken[0].close()


ADMINISTRATIVE: dict[str, dict[str, Any]] = {
    "/v2/models/plus/traffic": {"weights": {"1": 1}},
    "/v2/repository/models/plus/load": {},
    "/v2/repository/models/plus/unload": {},
    "/v2/logging": {"log_verbose_level": 1},
    "/v2/trace/setting": {"trace_level": ["OFF"]},
    "/v2/models/plus/trace/setting": {"trace_level": ["OFF"]},
    "/v2/systemsharedmemory/region/r/register": {"key": "/r", "offset": 0, "byte_size": 64},
    "/v2/systemsharedmemory/unregister": {},
}


def test_the_platform_alone_administers_a_deployment_without_keys(place: Place) -> None:
    place.deployments.changes.create(ADA, "default", spec(1, 2, traffic={"weights": {"1": 1}}))
    view = place.until(state="ready", serving=1)

    assert result(view.http) == result(f"grpc://{view.grpc}") == 1.0
    for path, body in ADMINISTRATIVE.items():
        for key in ("", "a-guess-of-sixteen"):
            with pytest.raises(ServingError, match="API key"):
                ask(view.http, path, key=key, body=body)
    with grpc.insecure_channel(view.grpc) as channel:
        operations = {path.decode(): METHODS[method.name] for path, method in method_table().items()}
        closed = [path for path, each in operations.items() if "SharedMemory" in path or each.scope is Scope.ADMIN]
        assert len(closed) == 12
        for path in closed:
            for headers in ((), (("x-api-key", "a-guess-of-sixteen"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(path)(b"", timeout=200, metadata=headers)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, path

    plan = {"canary": {"version": 2, "stable": 1, "steps": [50, 100]}}
    begun = place.deployments.servers.set_traffic(ADA, "default", "adder", "plus", plan)
    assert not isinstance(begun, ChangePlan)
    assert begun["canary"]["state"] == "running"
    assert result(view.http) in (1.0, 2.0)


def test_a_deployment_answers_and_its_next_revision_takes_over_without_a_lost_request(place: Place) -> None:
    place.deployments.changes.create(ADA, "default", spec(1))
    first = place.until(state="ready", serving=1)
    assert result(first.http) == 1.0

    with load_on(first) as load:
        place.deployments.changes.change(ADA, "default", spec(2))
        second = place.until(state="ready", serving=2)
        assert eventually(lambda: 2.0 in load.results)
        place.deployments.changes.change(ADA, "default", spec(3))
        third = place.until(latest_state="failed")
        load.goes_on(20)

    assert load.errors == []
    assert load.results.keys() == {1.0, 2.0}
    assert (second.http, second.grpc) == (first.http, first.grpc)
    assert (third.serving, third.state) == (2, "ready")
    assert third.latest_reason.startswith("not every model could be loaded:\nload failed for model 'plus'")
    assert result(third.http) == 2.0


def test_what_runs_survives_the_platform_and_is_adopted_and_a_server_that_is_killed_comes_back(place: Place) -> None:
    place.deployments.changes.create(ADA, "default", spec(1, 2, traffic={"weights": {"1": 100}}))
    place.end()  # while it is being started
    place.begin()
    place.until(state="ready", serving=1)
    pid = place.pid()
    place.end()
    assert result(place.get().http) == 1.0

    place.begin()
    time.sleep(1.0)
    assert place.until(state="ready", serving=1).replicas[0].name == f"pid {pid}"
    os.kill(pid, signal.SIGKILL)
    place.until(state="starting")
    again = place.until(state="ready")

    assert place.pid() != pid
    assert result(again.http) == 1.0
    assert again.replicas[0].restarts == 1
    pid = place.pid()
    place.deployments.servers.set_traffic(ADA, "default", "adder", "plus", {"weights": {"1": 75, "2": 25}})
    place.until(state="ready", serving=2)
    assert [result(again.http) for _ in range(20)].count(2.0) in (4, 5, 6)
    assert place.pid() == pid
    place.deployments.changes.stop(ADA, "default", "adder")
    place.until(state="stopped")
    assert eventually(lambda: not psutil.pid_exists(place.pid()))
    place.deployments.changes.start(ADA, "default", "adder")
    place.until(state="ready")
    assert [result(again.http) for _ in range(20)].count(2.0) in (4, 5, 6)
    assert place.get().http == again.http
    place.deployments.changes.remove(ADA, "default", "adder")
    assert eventually(lambda: not place.deployments.reads.list(ADA, "default")[1])
    assert list((place.data / "deployments").rglob("*")) == []


OLD_MODEL = b"""
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        version = np.array(sys.version_info[:2], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", version)]) for _ in requests]
"""
OLD_CONFIG = b"""backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }"""


def test_a_python_model_runs_in_an_environment_of_an_older_python(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [path.parent for path in Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")]
    if not own and shutil.which("python3.8") is None:
        pytest.skip("Python 3.8 is not installed")
    monkeypatch.setenv("PATH", ":".join([*map(str, own), os.environ["PATH"]]))
    isolation = Isolation(tmp_path, mode="available")
    handler = catalog.handler(place.database, tmp_path / "environments", isolation, lambda *_: None)
    runner = TaskRunner(place.database, tmp_path / "tasks", {catalog.KIND: handler}, PlatformLease(place.database))
    with place.database.transaction() as session:
        row, task = catalog.add(
            session, ADA, "default", EnvironmentRequest(name="old", requirements="iniconfig", python="3.8")
        )
    runner.start()
    try:

        def is_over() -> bool:
            with place.database.reading() as session:
                return session.get_one(TaskRow, task.id).state in ("done", "failed")

        assert eventually(is_over)
    finally:
        runner.close()
    assert "charonia" not in (runner.folder(task.id) / "log").read_text().partition("import ")[2]
    add_version(place.database, tmp_path, "old", {"config.pbtxt": OLD_CONFIG, "1/model.py": OLD_MODEL})
    with place.database.transaction() as session:
        session.execute(update(VersionRow).where(VersionRow.model.has(name="old")).values(backend="python"))

    with pytest.raises(ServingError, match=r"'old' has Python 3\.8, which only runs Python models"):
        place.deployments.changes.create(ADA, "default", {**spec(1), "environment": row.name})
    value = {"name": "adder", "environment": "old", "models": [{"name": "old"}]}
    place.deployments.changes.create(ADA, "default", value)
    with Client(place.until(state="ready").http) as client:
        assert client.infer("old", {"x": np.zeros(4, np.float32)})["y"].tolist() == [3.0, 8.0]
