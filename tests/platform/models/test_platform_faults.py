"""Faults of a real platform: connections that are cut, processes that are killed."""

import contextlib
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from httpx2 import Client
from tests.platform.models.conftest import MODELS, UPLOADS
from tests.support.models import PYTHON_IDENTITY, identity, identity_pbtxt
from tests.support.platform_process import PlatformProcess
from tests.support.process import waited_for

SLOW_ONCE = PYTHON_IDENTITY.replace(
    "    def execute",
    '''    @staticmethod
    def auto_complete_config(config):
        """Take long the first time."""
        import pathlib, time
        if not pathlib.Path("{again}").exists():
            (pathlib.Path.home() / "seen").touch()
            time.sleep(600)
        return config

    def execute''',
)


def with_key(platform: PlatformProcess) -> Client:
    return Client(base_url=platform.url, timeout=200.0, headers={"Authorization": f"Bearer {platform.key}"})


def runs(text: str) -> bool:
    found = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found = found or any(text in argument for argument in process.cmdline())
    return found


def begin(client: Client, files: dict[str, int]) -> list[dict[str, Any]]:
    listed = [{"path": path, "size": size} for path, size in files.items()]
    rows: list[dict[str, Any]] = client.post(UPLOADS, json={"files": listed}).json()
    return rows


def add(client: Client, name: str, batch: str) -> None:
    answer = client.post(f"{MODELS}/{name}/versions", json={"source": {"kind": "upload", "place": batch}})
    assert answer.status_code == 202, answer.text


def settled(client: Client, name: str) -> dict[str, Any]:
    path = f"{MODELS}/{name}/versions/1"
    return dict(waited_for(lambda: client.get(path).json(), lambda found: found["state"] in ("ready", "refused")))


def send_a_part(platform: PlatformProcess, path: str, whole: int, content: bytes) -> None:
    """Say that `whole` bytes come, send some, and cut the connection."""
    address = urlsplit(platform.url)
    head = f"PUT {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {platform.key}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: {whole}\r\n\r\n".encode() + content)
        time.sleep(0.2)


def test_an_upload_survives_a_cut_connection_and_a_killed_platform(tmp_path: Path) -> None:
    model = identity()
    whole = model + bytes(3_000_000)  # what follows the graph is not read
    with PlatformProcess(tmp_path) as first, with_key(first) as client:
        (row,) = begin(client, {"echo.onnx": len(model)})
        path = f"{UPLOADS}/{row['key']}"
        send_a_part(first, path, len(model), model[:50])
        waited_for(lambda: client.get(path).json()["received"], lambda received: received == 50)
        (large,) = begin(client, {"large.onnx": len(whole)})
        send_a_part(first, f"{UPLOADS}/{large['key']}", len(whole), whole[:2_500_000])
        first.kill()
    with PlatformProcess(tmp_path) as second, with_key(second) as client:
        assert client.get(path).json()["received"] == 50
        received = client.get(f"{UPLOADS}/{large['key']}").json()["received"]
        assert 0 <= received <= 2_500_000
        rest = client.put(f"{UPLOADS}/{large['key']}", params={"offset": received}, content=whole[received:])
        assert rest.json()["received"] == len(whole)
        assert (tmp_path / "uploads" / large["key"]).read_bytes() == whole
        client.put(path, params={"offset": 50}, content=model[50:])
        add(client, "echo", row["batch"])

        version = settled(client, "echo")

    assert version["state"] == "ready", version
    assert version["report"]["inputs"][0]["name"] == "INPUT0"


@pytest.mark.parametrize("moment", ["while it is checked", "while its files arrive"])
def test_a_version_survives_a_killed_platform(tmp_path: Path, moment: str) -> None:
    data, again = tmp_path / "data", tmp_path / "readable" / "again"
    again.parent.mkdir()
    readable = f"--readable={again.parent}"
    code = SLOW_ONCE.replace("{again}", str(again)).encode()
    files = {
        "own/config.pbtxt": identity_pbtxt("python", dims=(4,), max_batch_size=0).encode(),
        "own/1/model.py": code,
        "own/1/weights": bytes(100_000_000),
    }
    if moment == "while it is checked":
        files["own/1/weights"] = b""
    with PlatformProcess(data, readable) as first, with_key(first) as client:
        rows = begin(client, {path: len(content) for path, content in files.items()})
        for row in rows:
            client.put(f"{UPLOADS}/{row['key']}", content=files[row["path"]])
        add(client, "own", rows[0]["batch"])
        if moment == "while it is checked":
            waited_for(lambda: list(data.glob("rooms/*/seen")), bool)
        else:
            waited_for(lambda: client.get(f"{MODELS}/own/versions/1").json()["task"], bool)
        first.kill()
    if moment == "while it is checked":
        waited_for(lambda: runs(str(data)), lambda found: not found)  # what the platform has started ends with it
    again.touch()
    with PlatformProcess(data, readable) as second, with_key(second) as client:
        version = settled(client, "own")

        task = client.get(f"/api/v1/tasks/{version['task']}").json()
        assert version["state"] == "ready", version["report"]
        assert [file["path"] for file in version["files"]] == ["1/model.py", "1/weights", "config.pbtxt"]
        assert task["result"] == {"version": 1, "state": "ready"}
        assert client.get(UPLOADS, params={"batch": rows[0]["batch"]}).status_code == 404
    assert list((data / "uploads").iterdir()) == []
