"""The story of a platform over its API and pages, on PostgreSQL."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from tests.platform.models.conftest import add_files
from tests.support.fake_target import FakeTarget
from tests.support.models import identity
from tests.support.process import waited_for

from charonia.platform.app import make_app
from charonia.platform.deployments.service import Deployments
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings

AT = "/api/v1/projects/default/deployments"
CALLERS = 6


@contextmanager
def started(data: Path, url: str, target: FakeTarget) -> Iterator[TestClient]:
    """A platform with its reconciler and tasks at work, and a client with the owner's key."""
    app = make_app(PlatformSettings(data, isolation="available", database=url))
    platform = app.state.platform
    made = Deployments(platform.database, {"local": target}, platform.workloads, platform.lease)
    object.__setattr__(platform, "deployments", made)
    with platform.database.transaction() as session:
        prepare_owner(session, data)
    with TestClient(app, base_url="http://127.0.0.1:8080", follow_redirects=False) as client:
        client.headers["Authorization"] = f"Bearer {(data / 'owner.key').read_text().strip()}"
        yield client


def until(client: TestClient, target: FakeTarget, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        target.pass_s(1.0)
        return dict(client.get(f"{AT}/reader").json())

    return waited_for(look, is_so)


def spec(version: int, **more: object) -> dict[str, Any]:
    return {"name": "reader", "models": [{"name": "echo", "versions": [version]}], **more}


def test_from_a_model_to_a_deployment_that_is_rolled_back(tmp_path: Path, postgresql_url: str) -> None:
    target = FakeTarget()
    with started(tmp_path, postgresql_url, target) as admin:
        for content in (identity(), identity(dims=(4,))):
            version = add_files(admin, "echo", {"echo.onnx": content})
            assert version["state"] == "ready", version
        assert admin.post(AT, json=spec(1)).status_code == 201
        assert until(admin, target, lambda view: bool(view["serving"] == 1))["state"] == "ready"

        with ThreadPoolExecutor(CALLERS) as pool:
            asked = [spec(2, ready_within_s=100 + number) for number in range(CALLERS)]
            answers = list(pool.map(lambda body: admin.put(f"{AT}/reader?revision=1", json=body).status_code, asked))
        assert sorted(answers) == [200] + [409] * (CALLERS - 1)
        until(admin, target, lambda view: bool(view["serving"] == 2))
        target.broken[3] = "no such file"
        assert admin.put(f"{AT}/reader", json=spec(1, keys=True)).json()["revision"] == 3
        failed = until(admin, target, lambda view: bool(view["latest_state"] == "failed"))
        assert (failed["serving"], failed["latest_reason"]) == (2, "no such file")
        assert admin.post(f"{AT}/reader/rollback", json={"to": 1}).json()["revision"] == 4
        assert admin.delete("/api/v1/projects/default/models/echo").status_code == 409

    with started(tmp_path, postgresql_url, target) as admin:  # it starts again
        until(admin, target, lambda view: bool(view["serving"] == 4))
        revisions = admin.get(f"{AT}/reader/revisions").json()["revisions"]
        assert [(one["number"], one["state"]) for one in revisions] == [
            (4, "serving"),
            (3, "failed"),
            (2, "replaced"),
            (1, "replaced"),
        ]
        assert admin.get("/api/v1/projects/default/models?search=ECH").json()["total"] == 1
        assert "deployment.create" in [entry["action"] for entry in admin.get("/api/v1/audit").json()]
        for page in ("models", "models/echo", "deployments", "deployments/reader", "jobs", "audit", "people"):
            assert admin.get(f"/p/default/{page}").status_code == 200, page
        assert admin.delete(f"{AT}/reader").status_code == 202
        until(admin, target, lambda answer: "error" in answer)
        assert admin.delete("/api/v1/projects/default/models/echo").status_code == 204
