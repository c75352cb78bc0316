"""What tests of the registry share: how versions come, and a check without processes."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.conftest import when_ended

from charonia.platform.models import version_import

MODELS = "/api/v1/projects/default/models"
UPLOADS = "/api/v1/projects/default/uploads"


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks find nothing, at once."""
    monkeypatch.setattr(version_import, "full_check", lambda *_: {"is_checked": True})


@pytest.fixture
def as_caller(admin: TestClient) -> Callable[..., dict[str, str]]:
    """Returns the headers of a new caller with a role in the default project."""

    def make(role: str, **more: Any) -> dict[str, str]:
        body = {"name": f"{role}-{len(more)}", "roles": [{"role": role, "project": "default", **more}]}
        return {"Authorization": f"Bearer {admin.post('/api/v1/keys', json=body).json()['key']}"}

    return make


def send(client: TestClient, files: dict[str, bytes], headers: dict[str, str] | None = None) -> str:
    listed = [{"path": path, "size": len(content)} for path, content in files.items()]
    rows = client.post(UPLOADS, json={"files": listed}, headers=headers).json()
    for row in rows:
        answer = client.put(f"{UPLOADS}/{row['key']}", content=files[row["path"]], headers=headers)
        assert answer.json()["received"] == row["size"], answer.text
    return str(rows[0]["batch"])


def add(client: TestClient, name: str, headers: dict[str, str] | None = None, **source: Any) -> dict[str, Any]:
    answer = client.post(f"{MODELS}/{name}/versions", json={"source": source}, headers=headers)
    assert answer.status_code == 202, answer.text
    return settled(client, name, answer.json()["number"])


def add_files(
    client: TestClient, name: str, files: dict[str, bytes], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Add a version by upload and return it when it is settled."""
    return add(client, name, headers, kind="upload", place=send(client, files, headers))


def settled(client: TestClient, name: str, number: int) -> dict[str, Any]:
    """Return a version when it is ready or refused, and its task has ended."""
    when_ended(client, client.get(f"{MODELS}/{name}/versions/{number}").json()["task"], 300)
    found: dict[str, Any] = client.get(f"{MODELS}/{name}/versions/{number}").json()
    assert found["state"] in ("ready", "refused")
    return found
