"""What lies in the folder that a platform is started in is not imported: not by it, not by processes that it starts."""

import contextlib
import io
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Client
from tests.support.hostile_folder import hostile_files_that_ran, write_hostile_files
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt
from tests.support.platform_process import PlatformProcess
from tests.support.ports import free_ports
from tests.support.process import waited_for

PROJECT = "/api/v1/projects/default"
NOWHERE = "127.0.0.1:9"

pytestmark = [pytest.mark.cold_start, pytest.mark.timeout(580)]


def archive(number: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        made.writestr("echo/config.pbtxt", identity_pbtxt("python", dims=(4,), max_batch_size=0))
        made.writestr("echo/1/model.py", f"{PYTHON_IDENTITY}\nVERSION = {number}\n")
    return content.getvalue()


def until(look: Callable[[], dict[str, Any]], name: str, *values: object) -> dict[str, Any]:
    """Wait until a member of what a call answers has one of these values."""
    return waited_for(look, lambda found: found.get(name) in values)


class Owner:
    def __init__(self, platform: PlatformProcess) -> None:
        self._client = Client(base_url=platform.url, timeout=200.0, headers={"Authorization": f"Bearer {platform.key}"})
        self._page = Client(base_url=platform.url, timeout=200.0, headers={"Origin": platform.url})
        self._page.get(platform.link)

    def get(self, path: str) -> dict[str, Any]:
        return dict(self._client.get(path).json())

    def send(self, method: str, path: str, body: object) -> dict[str, Any]:
        answer = self._client.request(method, path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def add_version(self, number: int) -> None:
        """Upload an archive with a Python model, which is unpacked and checked."""
        content = archive(number)
        listed = {"files": [{"path": "echo.zip", "size": len(content)}]}
        (row,) = self._client.post(f"{PROJECT}/uploads", json=listed).json()
        self._client.put(f"{PROJECT}/uploads/{row['key']}", content=content)
        source = {"kind": "upload", "place": row["batch"]}
        self.send("POST", f"{PROJECT}/models/echo/versions", {"source": source})
        path = f"{PROJECT}/models/echo/versions/{number}"
        version = until(lambda: self.get(path), "state", "ready", "refused")
        assert version["state"] == "ready", version

    def deploy(self, method: str, path: str, version: int) -> None:
        spec = {"name": "echo", "models": [{"name": "echo", "versions": [version]}]}
        self.send(method, f"{PROJECT}/deployments{path}", spec)
        until(lambda: self.get(f"{PROJECT}/deployments/echo"), "serving", version)
        until(lambda: self.get(f"{PROJECT}/deployments/echo"), "state", "ready")

    def run(self, task: int) -> dict[str, Any]:
        """Return a task that has ended, with its log."""
        found = waited_for(lambda: self.get(f"/api/v1/tasks/{task}"), lambda found: bool(found["ended"]))
        return {**found, "log": self._client.get(f"/api/v1/tasks/{task}/log").text}

    def try_version(self) -> None:
        """Start the server of a version, and wait until it answers."""
        path = "/p/default/models/echo/versions/1"
        (token,) = re.findall(r'name="csrf-token" content="([^"]+)"', self._page.get(f"{path}/try").text)
        sent = self._page.post(f"{path}/try/start", data={"environment": ""}, headers={"X-CSRF-Token": token})
        assert sent.status_code < 400, sent.text
        waited_for(lambda: self._page.get(f"{path}/server/openapi.json"), lambda answer: answer.status_code == 200)

    def end(self) -> None:
        self._client.delete(f"{PROJECT}/deployments/echo")
        waited_for(lambda: self._client.get(f"{PROJECT}/deployments/echo"), lambda answer: answer.status_code != 200)

    def close(self) -> None:
        self._client.close()
        self._page.close()


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """The data folder; servers that a failed test leaves are ended."""
    yield tmp_path / "data"
    for path in (tmp_path / "data").glob("deployments/*/*/server-*/pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    folder = tmp_path / "hostile"
    folder.mkdir()
    write_hostile_files(folder)
    return folder


def test_a_platform_and_its_processes_import_nothing_from_there(
    data: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without isolation, the folder is that of all processes."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{NOWHERE}/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    (hostile / "uv.toml").write_text("settings of another program")
    ports = "--ports={}-{}".format(*free_ports(40))
    with PlatformProcess(data, ports, "--isolation=off", folder=hostile) as platform:
        owner = Owner(platform)
        owner.add_version(1)
        environment = owner.send("POST", f"{PROJECT}/environments", {"name": "small", "requirements": "absent==1"})
        built = owner.run(environment["task"])
        owner.deploy("POST", "", 1)
        load = {"deployment": "echo", "model": "echo", "concurrency": "1", "requests": 100}
        measured = owner.run(owner.send("POST", f"{PROJECT}/jobs/perf", load)["id"])
        owner.add_version(2)
        owner.deploy("PUT", "/echo", 2)
        search = {"model": "echo", "version": 1, "minutes": 0.05}
        searched = owner.run(owner.send("POST", f"{PROJECT}/jobs/tune", search)["id"])
        owner.try_version()
        owner.end()
        owner.close()

    assert hostile_files_that_ran(hostile) == set()
    assert NOWHERE in built["log"], built  # Python was found, and packages were looked for
    assert measured["state"] == "done", measured
    assert searched["state"] == "done", searched


def test_what_isolates_a_process_imports_nothing_from_there(data: Path, hostile: Path) -> None:
    with PlatformProcess(data, "--isolation=available", folder=hostile) as platform:
        owner = Owner(platform)
        owner.add_version(1)
        owner.close()

    assert hostile_files_that_ran(hostile) == set()
