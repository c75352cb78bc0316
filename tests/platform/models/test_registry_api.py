"""The registry over its API, with real checks."""

import time
from typing import Any

from fastapi.testclient import TestClient
from tests.support.models import identity

MODELS = "/api/v1/projects/default/models"
UPLOADS = "/api/v1/projects/default/uploads"


def send(client: TestClient, files: dict[str, bytes]) -> str:
    """Send files and return their batch."""
    listed = [{"path": path, "size": len(content)} for path, content in files.items()]
    rows = client.post(UPLOADS, json={"files": listed}).json()
    for row in rows:
        answer = client.put(f"{UPLOADS}/{row['key']}", content=files[row["path"]])
        assert answer.json()["received"] == row["size"]
    return str(rows[0]["batch"])


def add(client: TestClient, name: str, source: dict[str, Any]) -> dict[str, Any]:
    """Add a version and return it when it is settled."""
    answer = client.post(f"{MODELS}/{name}/versions", json={"source": source})
    assert answer.status_code == 202, answer.text
    return settled(client, name, answer.json()["number"])


def settled(client: TestClient, name: str, number: int) -> dict[str, Any]:
    for _ in range(600):
        found = client.get(f"{MODELS}/{name}/versions/{number}").json()
        if found["state"] in ("ready", "refused"):
            return dict(found)
        time.sleep(0.1)
    raise AssertionError(found)


def test_an_uploaded_file_becomes_a_version(admin: TestClient) -> None:
    batch = send(admin, {"echo.onnx": identity()})

    version = add(admin, "echo", {"kind": "upload", "place": batch})

    assert version["state"] == "ready", version
