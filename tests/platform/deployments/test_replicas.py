"""Several servers of a deployment on this machine, behind one address, under clients that never repeat a request."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.platform.deployments.test_on_this_machine import ADA, Place
from tests.process.test_replicas import load_of
from tests.support.models import identity_pbtxt
from tests.support.platform_models import add_version
from tests.support.ports import free_ports
from tests.support.process import eventually
from tests.support.running_load import Load

from charonia.platform.deployments import collector, reconciler, scaler
from charonia.platform.deployments.collector import fetch_page
from charonia.platform.deployments.figures import read_page
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.targets.server_calls import ask

PORTS = free_ports(40)

SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "50" } }'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, PORTS)
    for content, more in ((b"one", ""), (b"two", ""), (b"three", SLOW)):
        files = {"config.pbtxt": identity_pbtxt("identity", dims=(4,), more=more).encode(), "1/model": content}
        add_version(place.database, tmp_path, "echo", files)
    yield place
    place.end()
    for pid in (tmp_path / "deployments").glob("*/*/server-*/pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    place.database.close()


def spec(version: int, replicas: int | dict[str, int], **more: object) -> dict[str, Any]:
    return {"name": "adder", "models": [{"name": "echo", "versions": [version], **more}], "replicas": replicas}


def with_servers(place: Place, count: int, **wanted: object) -> DeploymentView:
    """Wait until a deployment is so, and has so many servers, all ready."""

    def is_so() -> bool:
        view = place.get()
        are_ready = [replica.is_ready for replica in view.replicas] == [True] * count
        return are_ready and all(getattr(view, name) == value for name, value in wanted.items())

    assert eventually(is_so, 100), (place.get(), place.log())
    return place.get()


def load_on(view: DeploymentView) -> Load:
    return load_of(view.http.removeprefix("http://"), view.grpc)


def test_servers_come_and_go_and_are_upgraded_and_no_request_is_lost(place: Place) -> None:
    place.deployments.changes.create(ADA, "default", spec(1, 1))
    first = with_servers(place, 1, state="ready", serving=1)
    pids = {replica.name for replica in first.replicas}

    with load_on(first) as load:
        place.deployments.changes.change(ADA, "default", spec(1, 3))
        three = with_servers(place, 3, state="ready", serving=2)
        load.goes_on(20)
        place.deployments.changes.change(ADA, "default", spec(2, 3))
        upgraded = with_servers(place, 3, state="ready", serving=3)
        load.goes_on(20)
        place.end()  # the platform is away, then another one goes on
        place.begin()
        place.deployments.changes.change(ADA, "default", spec(2, 1))
        one = with_servers(place, 1, state="ready", serving=4)
        load.goes_on(20)

    assert load.errors == []
    assert {each.http for each in (first, three, upgraded, one)} == {first.http}
    assert pids < {replica.name for replica in three.replicas} == {replica.name for replica in upgraded.replicas}
    assert len({replica.http for replica in three.replicas}) == 3


def test_servers_are_added_while_requests_wait_and_closed_when_fewer_suffice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in (
        (collector, "WATCHED_S", 1.0),
        (reconciler, "STEADY_S", 1.0),
        (scaler, "GROW_AFTER_S", 3.0),
        (scaler, "SHRINK_AFTER_S", 6.0),
        (scaler, "AVERAGED_S", 6.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    place.deployments.changes.create(ADA, "default", spec(3, {"min": 1, "max": 2}))
    one = with_servers(place, 1, state="ready", serving=1)

    with load_on(one) as load:  # four clients, and one instance that takes 50 ms
        two = with_servers(place, 2, state="ready", serving=1)
        load.goes_on(20)
    before = place.get().scaling
    again = with_servers(place, 1, state="ready", serving=1)

    assert load.errors == []
    assert {replica.name for replica in one.replicas} < {replica.name for replica in two.replicas}
    assert again.http == one.http
    assert before == "2 of 1 to 2 servers; the last was added because requests waited"
    assert again.scaling == "1 of 1 to 2 servers; one was closed because the others suffice"


def test_one_that_is_killed_comes_back_beside_the_others_and_what_is_asked_reaches_all(place: Place) -> None:
    weights = {"weights": {"1": 100}}
    model = {"name": "echo", "versions": [1, 2], "traffic": weights}
    place.deployments.changes.create(ADA, "default", {"name": "adder", "models": [model], "replicas": 2})
    view = with_servers(place, 2, state="ready")

    with load_on(view) as load:
        os.kill(place.pid(), signal.SIGKILL)
        load.goes_on(20)
        assert eventually(lambda: sum(replica.restarts for replica in place.get().replicas) == 1)
        with_servers(place, 2, state="ready")
        load.goes_on(20)
    assert len(load.errors) <= len(load.answers), load.errors  # what was in flight at the one that was killed
    servers = place.deployments.servers
    servers.set_traffic(ADA, "default", "adder", "echo", {"weights": {"2": 100}})
    with_servers(place, 2, state="ready", serving=2)
    traffic = servers.traffic(ADA, "default", "adder", "echo")
    assert traffic["weights"] == {"2": 100.0}
    assert len(servers.explain(ADA, "default", "adder", "echo")["servers"]) == 2
    assert "==> server 2 <==" in servers.log(ADA, "default", "adder")
    figures = place.deployments.collector
    assert eventually(lambda: bool(figures.since(1, 0.0)))
    pages = [read_page(fetch_page(replica.metrics)) for replica in place.get().replicas]
    memory = sum(page.memory_bytes for page in pages)  # a server that was slow to answer is missing from a point
    assert eventually(lambda: figures.since(1, 0.0)[-1].memory_bytes > 0.7 * memory)
    servers.set_traffic(ADA, "default", "adder", "echo", {"canary": {"version": 1, "step_seconds": 3600}})
    plans = [ask(replica.http, "/v2/models/echo/traffic")["canary"]["state"] for replica in place.get().replicas]
    assert plans == ["running", "running"]
    place.deployments.changes.remove(ADA, "default", "adder")
    assert eventually(lambda: not place.deployments.reads.list(ADA, "default")[1])
    assert list((place.data / "deployments").rglob("*")) == []
