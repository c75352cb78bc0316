"""The API of environments and of the tasks that build them."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.conftest import when_ended

from charonia.platform.environments import builder

ENVIRONMENTS = "/api/v1/projects/default/environments"


@pytest.fixture(autouse=True)
def _without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_uv", lambda: "false")


def test_an_environment_is_created_and_its_build_followed(admin: TestClient) -> None:
    made = admin.post(ENVIRONMENTS, json={"name": "reader", "requirements": "iniconfig"})
    assert made.status_code == 202, made.text
    task = when_ended(admin, made.json()["task"])

    assert (task["kind"], task["subject"], task["state"]) == ("environment", "reader", "failed")
    shown = admin.get(f"{ENVIRONMENTS}/reader").json()
    assert (shown["state"], shown["task"]) == ("failed", task["id"])
    assert "was not found" in shown["reason"]
    log = admin.get(f"/api/v1/tasks/{task['id']}/log")
    assert "was not found" in log.text
    assert admin.get(f"/api/v1/tasks/{task['id']}/log?offset={log.headers['x-log-offset']}").text == ""
    assert [each["name"] for each in admin.get(ENVIRONMENTS).json()] == ["reader"]


def test_a_script_states_what_its_environment_has(admin: TestClient) -> None:
    script = '# /// script\n# dependencies = ["iniconfig"]\n# ///\n'

    made = admin.post(ENVIRONMENTS, json={"name": "reader", "script": script}).json()

    assert (made["requirements"], made["state"]) == ("iniconfig", "waiting")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"name": "a/b"}, "environment: expected a name"),
        ({"name": "a", "requirements": "-r other.txt"}, "line 1: "),
        ({"name": "a", "python": "2.7"}, "python: expected one of"),
        ({"name": "a", "script": "import numpy"}, "states no dependencies"),
    ],
)
def test_what_cannot_be_built_is_refused(admin: TestClient, body: dict[str, Any], problem: str) -> None:
    answer = admin.post(ENVIRONMENTS, json=body)

    assert answer.status_code == 400
    assert problem in answer.json()["error"]


def test_tasks_are_listed_by_kind_newest_first(admin: TestClient) -> None:
    numbers = [admin.post(ENVIRONMENTS, json={"name": f"e{n}"}).json()["task"] for n in range(3)]
    tasks = "/api/v1/projects/default/tasks"

    assert [each["id"] for each in admin.get(tasks, params={"kind": "environment", "limit": 2}).json()] == numbers[
        :0:-1
    ]
    assert [each["id"] for each in admin.get(tasks, params={"before": numbers[1]}).json()] == numbers[:1]
    assert admin.get(tasks, params={"kind": "perf"}).json() == []


def test_removing_an_environment_frees_its_name(admin: TestClient) -> None:
    when_ended(admin, admin.post(ENVIRONMENTS, json={"name": "reader"}).json()["task"])

    assert admin.delete(f"{ENVIRONMENTS}/reader").status_code == 204
    assert admin.delete(f"{ENVIRONMENTS}/reader").status_code == 404
    assert admin.post(ENVIRONMENTS, json={"name": "reader"}).status_code == 202


def test_choices_begin_with_the_platforms_own_python(admin: TestClient) -> None:
    choices = admin.get("/api/v1/environments/choices").json()

    assert choices["pythons"][0] == builder.pythons()[0]
    assert {"pytorch-2", "tensorflow-2"} <= {each["name"] for each in choices["presets"]}
