"""Every call, by those who administer one project, about what lies in another: they see and change nothing there."""

import json
import re
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.platform.test_app import PUBLIC, api_routes
from tests.support.platform_models import add_version

from charonia.platform.database.connection import now
from charonia.platform.database.tables import (
    AuditRow,
    DeploymentRow,
    EnvironmentRow,
    ProjectRow,
    RevisionRow,
    ServerKeyRow,
    TaskRow,
)
from charonia.platform.state import Platform

OTHER = "hidden"
"""The other project, and a part of the name of all that lies in it."""

MODEL, DEPLOYMENT, ENVIRONMENT, KEY = "hidden-model", "hidden-reader", "hidden-python", "hidden-key"
SECRET = "hidden-token"

SPEC = {"models": [{"name": MODEL, "versions": [1]}], "environment": ENVIRONMENT}

BODIES: dict[str, Any] = {
    "POST /api/v1/keys": {"name": "more", "roles": [{"role": "viewer", "project": OTHER}]},
    "POST /api/v1/projects": {"name": "more"},
    "POST /api/v1/projects/{project}/alerts": {"name": "more", "condition": "not_ready", "secret": SECRET},
    "POST /api/v1/projects/{project}/deployments": {"name": "more", **SPEC},
    "PUT /api/v1/projects/{project}/deployments/{name}": SPEC,
    "POST /api/v1/projects/{project}/deployments/{name}/keys": {"name": "more"},
    "POST /api/v1/projects/{project}/deployments/{name}/rollback": {"to": 1},
    "POST /api/v1/projects/{project}/deployments/{name}/traffic": {"model": MODEL, "weights": {"1": 1}},
    "POST /api/v1/projects/{project}/environments": {"name": "more", "requirements": ""},
    "POST /api/v1/projects/{project}/jobs/perf": {"deployment": DEPLOYMENT, "model": MODEL},
    "POST /api/v1/projects/{project}/jobs/tune": {"model": MODEL, "version": 1},
    "POST /api/v1/projects/{project}/models": {"name": "more"},
    "PATCH /api/v1/projects/{project}/models/{model}": {"owner": "me"},
    "PATCH /api/v1/projects/{project}/models/{model}/versions/{number}": {"notes": "mine"},
    "PUT /api/v1/projects/{project}/models/{model}/follow": {"place": "git@h.org:g/r.git", "hook": "hidden"},
    "PUT /api/v1/projects/{project}/secrets/{name}": {"value": "mine"},
    "POST /api/v1/users": {"name": "more"},
    "PUT /api/v1/users/{id}/role": {"role": "admin", "project": OTHER},
}

WITHOUT_PROJECT = {
    "GET /",
    "GET /api/v1/audit",
    "GET /api/v1/environments/choices",
    "GET /api/v1/keys",
    "GET /api/v1/me",
    "GET /api/v1/projects",
    "GET /api/v1/users",
}
"""What answers everybody, with what they may see."""

NOTHING_THERE = ("/found", "/try/stop", "/secrets/{name}")
"""Calls that have an answer also for a model that there is not, or make a secret in the own project."""

FOR_ONE = {"POST /logout"} | {f"GET {path}" for path in PUBLIC}


class Stranger(NamedTuple):
    """Somebody of the project "default", and what there is in the other one."""

    headers: dict[str, str]
    values: dict[str, str]
    queries: dict[str, str]


@pytest.fixture(params=["viewer", "admin"])
def stranger(request: pytest.FixtureRequest, platform: Platform, admin: TestClient) -> Stranger:
    platform.tasks.close()  # what waits goes on waiting
    platform.deployments.close()
    add_version(platform.database, platform.settings.data, MODEL, {"1/model.onnx": b"hidden"}, project=OTHER)
    with platform.database.transaction() as session:
        project = session.query(ProjectRow).filter_by(name=OTHER).one()
        at = {"project_id": project.id, "created": now()}
        spec = {"name": DEPLOYMENT, **SPEC}
        revision = RevisionRow(number=1, spec=spec, state="serving", created=now())
        deployment = DeploymentRow(
            name=DEPLOYMENT, target="local", latest=1, wanted=1, serving=1, state="ready", revisions=[revision], **at
        )
        environment = EnvironmentRow(
            name=ENVIRONMENT, python="3.11", requirements="hidden", digest="0", state="ready", **at
        )
        task = TaskRow(kind="perf", subject=f"{DEPLOYMENT}/{MODEL}", state="waiting", **at)
        session.add_all([deployment, environment, task])
        session.flush()
        session.add(ServerKeyRow(deployment_id=deployment.id, name=KEY, scopes=["read"], digest="0", created=now()))
        number = task.id
    folder = platform.tasks.folder(number)
    folder.mkdir(parents=True)
    (folder / "log").write_text("hidden")
    (folder / "report.html").write_text("hidden")
    files = {"files": [{"path": "hidden.onnx", "size": 6}]}
    (upload,) = admin.post(f"/api/v1/projects/{OTHER}/uploads", json=files).json()
    admin.post("/api/v1/keys", json={"name": KEY, "roles": [{"role": "viewer", "project": OTHER}]})
    admin.put(f"/api/v1/projects/{OTHER}/secrets/{SECRET}", json={"value": "hidden"})
    user = admin.post("/api/v1/users", json={"name": "Ada"}).json()["id"]
    admin.put(f"/api/v1/users/{user}/role", json={"role": "viewer", "project": OTHER})
    roles = [{"role": request.param, "project": "default", "may_run_code": True}]
    key = admin.post("/api/v1/keys", json={"name": "stranger", "roles": roles}).json()["key"]
    values = {"project": OTHER, "model": MODEL, "number": "1", "version": "1", "path": "1/model.onnx", "id": str(user)}
    BODIES["POST /api/v1/projects/{project}/models/{model}/versions"] = {
        "source": {"kind": "upload", "place": upload["batch"]}
    }
    BODIES["POST /api/v1/projects/{project}/uploads"] = {**files, "batch": upload["batch"]}
    return Stranger(
        {"Authorization": f"Bearer {key}", "Accept": "text/html, application/json"},
        values | {"upload": upload["key"], "task": str(number)},
        {"model": MODEL, "to": "1", "from": "1", "batch": upload["batch"]},
    )


def value_of(stranger: Stranger, path: str, name: str) -> str:
    if name == "key":
        return stranger.values["upload"] if "/uploads/" in path else KEY
    if name == "name":
        before = path.partition("/{name}")[0].rpartition("/")[2]
        names = {
            "deployments": DEPLOYMENT,
            "environments": ENVIRONMENT,
            "models": MODEL,
            "branches": MODEL,
            "keys": KEY,
            "alerts": KEY,
            "secrets": SECRET,
        }
        return {**names, "files": "report.html"}[before]
    if name == "number" and ("/tasks/" in path or "/jobs/" in path):
        return stranger.values["task"]
    if name == "number" and "/users/" in path:
        return stranger.values["id"]
    return stranger.values[name]


def calls(app: FastAPI) -> list[tuple[str, str]]:
    """Return every call: its method and its path."""
    found = {(method, route.path) for route in api_routes(app) for method in route.methods or ()}
    return sorted(each for each in found if " ".join(each) not in FOR_ONE)


def send(client: TestClient, stranger: Stranger, method: str, path: str, **other: str) -> tuple[int, str]:
    """Make a call about the other project, and return its status and its answer."""
    is_absent = "_absent" in other

    def value(found: re.Match[str]) -> str:
        known = other.get(found[1]) or value_of(stranger, path, found[1])
        return ABSENT.get(known, "999999" if known.isdecimal() else known) if is_absent else known

    filled = re.sub(r"\{(\w+)(?::path)?\}", value, path)
    body, queries = BODIES.get(f"{method} {path}"), stranger.queries
    if is_absent:
        body, queries = _without_names(body), _without_names(queries)
    answer = client.request(
        method, filled, params=queries, headers=stranger.headers, **({"json": body} if body else {})
    )
    return answer.status_code, answer.text


ABSENT = {name: f"absent-{number}" for number, name in enumerate((MODEL, DEPLOYMENT, ENVIRONMENT, KEY))}


def _without_names(value: Any) -> Any:
    text = json.dumps(value)
    for name, absent in ABSENT.items():
        text = text.replace(f'"{name}"', f'"{absent}"')
    return json.loads(text)


def _said(answer: tuple[int, str]) -> tuple[int, str]:
    """Return an answer without names and numbers."""
    status, text = answer
    for name, absent in ABSENT.items():
        text = text.replace(name, "it").replace(absent, "it")
    return status, re.sub(r"\d+", "0", text)


@pytest.mark.parametrize("name", [KEY, "more"])
def test_nobody_learns_which_names_another_project_has(
    name: str, app: FastAPI, anybody: TestClient, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission comes before existence: what there is and what there is not has the same answer."""
    for call, body in list(BODIES.items()):
        if isinstance(body, dict) and body.get("name") == "more":
            monkeypatch.setitem(BODIES, call, {**body, "name": name})
    different = {
        f"{method} {path}": (there, absent)
        for method, path in calls(app)
        if f"{method} {path}" not in WITHOUT_PROJECT
        and (there := _said(send(anybody, stranger, method, path)))
        != (absent := _said(send(anybody, stranger, method, path, _absent="yes")))
    }

    assert different == {}


def test_no_call_reaches_into_another_project(
    app: FastAPI, anybody: TestClient, platform: Platform, stranger: Stranger
) -> None:
    before = changes(platform)
    for method, path in calls(app):
        status, text = send(anybody, stranger, method, path)
        if f"{method} {path}" in WITHOUT_PROJECT:
            assert OTHER not in text, path
        else:
            assert status in (403, 404), (method, path, status, text[:300])

    assert changes(platform) == before


def test_no_call_takes_what_belongs_to_another_project(
    app: FastAPI, anybody: TestClient, platform: Platform, stranger: Stranger
) -> None:
    named = [
        (method, path)
        for method, path in calls(app)
        if "{project}" in path and path.count("{") > 1 and "/people/" not in path
    ]
    before = changes(platform)
    for method, path in named:
        status, text = send(anybody, stranger, method, path, project="default")
        assert 400 <= status < 500 or (status < 300 and path.endswith(NOTHING_THERE)), (method, path, status, text)

    assert changes(platform) == before


def changes(platform: Platform) -> list[object]:
    with platform.database.reading() as session:
        project = session.query(ProjectRow).filter_by(name=OTHER).one()
        rows = session.query(AuditRow).filter_by(project_id=project.id).count()
        states = [(row.wanted, row.latest, row.removed) for row in session.query(DeploymentRow).all()]
        tasks = [(row.id, row.state, row.is_cancelled) for row in session.query(TaskRow).all()]
    return [rows, states, tasks]
