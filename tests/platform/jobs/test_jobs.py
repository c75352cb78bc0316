"""Measurements of real deployments and real models, started through the API."""

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from tests.platform.conftest import when_ended
from tests.support.models import mlp
from tests.support.platform_models import add_version, short_levels
from tests.support.process import waited_for

from charonia.platform.state import Platform

PROJECT = "/api/v1/projects/default"


@pytest.fixture
def model(platform: Platform, admin: TestClient) -> str:
    files = {"1/model.onnx": mlp(), "config.pbtxt": b'backend: "onnxruntime" max_batch_size: 8'}
    add_version(platform.database, platform.settings.data, "mlp", files)
    return "mlp"


@pytest.fixture
def deployment(admin: TestClient, model: str) -> Iterator[str]:
    spec = {"name": "reader", "models": [{"name": model}], "keys": True}
    made = admin.post(f"{PROJECT}/deployments", json=spec)
    assert made.status_code in (200, 201, 202), made.text
    waited_for(lambda: admin.get(f"{PROJECT}/deployments/reader").json(), lambda shown: shown["state"] == "ready")
    yield "reader"
    admin.delete(f"{PROJECT}/deployments/reader")
    waited_for(lambda: admin.get(f"{PROJECT}/deployments/reader").status_code, lambda status: status != 200)


def test_a_model_of_a_deployment_is_measured(
    admin: TestClient, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_levels(monkeypatch)
    body = {"deployment": deployment, "model": "mlp", "concurrency": "1:2"}

    task = when_ended(admin, admin.post(f"{PROJECT}/jobs/perf", json=body).json()["id"])

    assert task["state"] == "done", admin.get(f"/api/v1/tasks/{task['id']}/log").text
    assert [level["load"] for level in task["result"]["levels"]] == [1, 2]
    assert all(level["throughput"] > 10 and level["p99"] >= level["p50"] > 0 for level in task["result"]["levels"])
    assert {"measurements.csv", "report.html"} <= set(task["files"])
    report = admin.get(f"/api/v1/tasks/{task['id']}/files/report.html")
    assert report.text.startswith("<!doctype html>")
    assert report.headers["content-security-policy"].startswith("sandbox allow-scripts; default-src 'none'")


@pytest.mark.timeout(400)
def test_no_command_line_shows_the_key_of_a_deployment_while_it_is_measured(
    admin: TestClient, platform: Platform, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_levels(monkeypatch, 600)
    (key,) = [path.read_text() for path in platform.settings.data.rglob("platform.key")]
    body = {"deployment": deployment, "model": "mlp", "concurrency": "1", "protocol": "grpc"}
    number = admin.post(f"{PROJECT}/jobs/perf", json=body).json()["id"]
    lines = set[str]()
    deadline = time.monotonic() + 300

    while not (task := admin.get(f"/api/v1/tasks/{number}").json())["ended"] and time.monotonic() < deadline:
        lines |= {" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
        time.sleep(0.3)  # looking is work, too

    assert task["state"] == "done", admin.get(f"/api/v1/tasks/{number}/log").text
    assert any("charonia perf -m mlp" in line for line in lines)
    assert [line for line in lines if key in line] == []
    assert key not in admin.get(f"/api/v1/tasks/{number}/log").text


def test_what_does_not_serve_is_not_measured(admin: TestClient, model: str) -> None:
    body = {"deployment": "none", "model": model}

    assert admin.post(f"{PROJECT}/jobs/perf", json=body).status_code == 404
    assert admin.post(f"{PROJECT}/jobs/perf", json={**body, "concurrency": "0"}).status_code == 400


def test_a_model_that_a_deployment_lacks_is_named(admin: TestClient, deployment: str) -> None:
    answer = admin.post(f"{PROJECT}/jobs/perf", json={"deployment": deployment, "model": "other"})

    assert answer.status_code == 404
    assert answer.json()["hint"] == "it has mlp"


def test_a_search_that_would_run_code_needs_the_permission_for_it(admin: TestClient, platform: Platform) -> None:
    add_version(platform.database, platform.settings.data, "greet", {"1/model.py": b""}, runs_code=True)
    roles = [{"role": "deployer", "project": "default"}]
    key = admin.post("/api/v1/keys", json={"name": "ci", "roles": roles}).json()["key"]
    body = {"model": "greet", "version": 1}

    refused = admin.post(f"{PROJECT}/jobs/tune", json=body, headers={"Authorization": f"Bearer {key}"})

    assert (refused.status_code, refused.json()["error"]) == (
        403,
        "key ci: may not use models that run code in 'default'",
    )


def test_a_search_finds_a_configuration_that_is_offered(admin: TestClient, model: str) -> None:
    body = {"model": model, "version": 1, "minutes": 0.1}

    task = when_ended(admin, admin.post(f"{PROJECT}/jobs/tune", json=body).json()["id"])

    assert task["state"] == "done", admin.get(f"/api/v1/tasks/{task['id']}/log").text
    assert task["files"] == ["report.html", "tune.json"]
    found = admin.get(f"{PROJECT}/models/{model}/found", params={"version": 1}).json()
    assert (found["task"], found["version"]) == (task["id"], 1)
    assert found["result"]["sentences"]
    assert found["result"]["change"].keys() <= {"instances", "batching", "config"}
    assert admin.get(f"{PROJECT}/models/{model}/found", params={"version": 2}).json()["task"] == 0


def test_a_search_is_cancelled(admin: TestClient, model: str) -> None:
    answer = admin.post(f"{PROJECT}/jobs/tune", json={"model": model, "version": 1, "minutes": 5})
    number = answer.json()["id"]
    waited_for(lambda: admin.get(f"/api/v1/tasks/{number}").json()["progress"], lambda progress: progress >= 0.05)

    admin.post(f"/api/v1/tasks/{number}/cancel")

    assert when_ended(admin, answer.json()["id"])["state"] == "cancelled"


@pytest.mark.parametrize("body", [{"model": "none", "version": 1}, {"model": "mlp", "version": 9}])
def test_what_is_not_there_is_not_searched(admin: TestClient, model: str, body: dict[str, Any]) -> None:
    assert admin.post(f"{PROJECT}/jobs/tune", json=body).status_code == 400
