"""The platform's process is killed while it works: what runs goes on, and what was begun comes to its end."""

import contextlib
import json
import os
import signal
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as httpclient
from tests.platform.deployments.test_on_this_machine import load_on, plus, spec
from tests.support.platform_models import add_version
from tests.support.platform_process import PlatformProcess
from tests.support.ports import free_ports
from tests.support.process import eventually, waited_for
from tests.support.stock_clients import infer_input

from charonia.platform.database.connection import Database
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.targets.local_server import ServerFolder


def call(platform: PlatformProcess, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{platform.url}/api/v1/projects/default/deployments{path}", data, method=method)
    request.add_header("Authorization", f"Bearer {platform.key}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def view(platform: PlatformProcess) -> DeploymentView:
    return DeploymentView(**call(platform, "GET", "/adder"))


def until(platform: PlatformProcess, **wanted: object) -> DeploymentView:
    return waited_for(lambda: view(platform), lambda found: wanted.items() <= asdict(found).items())


def result(address: str) -> float:
    with httpclient.InferenceServerClient(address.removeprefix("http://")) as client:
        given = infer_input(httpclient, "x", np.zeros((1, 4), np.float32))
        return float(client.infer("plus", [given]).as_numpy("y")[0, 0])


def test_a_platform_that_is_killed_finds_its_servers_again_and_finishes_what_it_had_begun(tmp_path: Path) -> None:
    arguments = ("--ports={}-{}".format(*free_ports(40)),)
    folder = tmp_path / "deployments" / "default" / "adder"
    try:
        with PlatformProcess(tmp_path, *arguments) as platform:
            database = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
            for number in (1.0, 2.0):
                add_version(database, tmp_path, "plus", {"1/model.onnx": plus(number)})
            database.close()
            call(platform, "POST", "", spec(1))
            assert eventually((folder / "server-1" / "pid").exists)
            platform.kill()  # while its server starts
        left = Isolation(tmp_path, mode="off").prepare_room(tmp_path / "rooms" / "of-a-check")
        with PlatformProcess(tmp_path, *arguments) as platform:
            first = until(platform, state="ready", serving=1)
            pid = (folder / "server-1" / "pid").read_text()
            assert not left.home.exists()
            assert not left.temporary.exists()
            assert Path(ServerFolder(folder / "server-1").read("room")["temporary"]).is_dir()
            with load_on(first) as load:
                call(platform, "PUT", "/adder", spec(2))
                assert eventually((folder / "server-1" / "steps").exists)
                platform.kill()  # while the next revision is brought about
                with PlatformProcess(tmp_path, *arguments) as again:
                    second = until(again, state="ready", serving=2)
                    assert eventually(lambda: 2.0 in load.results)
                    again.kill()
                    load.goes_on(20)  # without a platform
        assert load.errors == []
        assert load.results.keys() == {1.0, 2.0}
        assert (folder / "server-1" / "pid").read_text() == pid
        assert second.http == first.http
        assert result(second.http) == 2.0
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "server-1" / "pid").read_text()), signal.SIGKILL)
