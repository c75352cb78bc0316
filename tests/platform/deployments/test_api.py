"""The API of deployments."""

import pytest
from fastapi.testclient import TestClient
from tests.support.fake_target import FakeTarget
from tests.support.platform_models import add_version

from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.state import Platform

AT = "/api/v1/projects/default/deployments"
SPEC = {"name": "reader", "models": [{"name": "echo", "versions": [1]}]}


@pytest.fixture(autouse=True)
def deployments(platform: Platform) -> FakeTarget:
    target, data = FakeTarget(start_s=0.0, stop_s=0.0), platform.settings.data
    for content in (b"one", b"two"):
        add_version(platform.database, data, "echo", {"1/model": content})
    made = Deployments(platform.database, {"local": target}, Workloads(data, open_artifacts("", data)))
    object.__setattr__(platform, "deployments", made)
    return target


def test_a_deployment_from_its_creation_to_its_removal(admin: TestClient, deployments: FakeTarget) -> None:
    two = {"name": "reader", "models": [{"name": "echo", "versions": [1, 2], "traffic": {"weights": {"2": 10}}}]}

    created = admin.post(AT, json=SPEC)
    again = admin.post(AT, json=SPEC)
    dry = admin.put(f"{AT}/reader?dry_run=true", json=two)
    changed = admin.put(f"{AT}/reader?revision=1&note=canary", json=two)
    late = admin.put(f"{AT}/reader?revision=1", json=SPEC)
    back = admin.post(f"{AT}/reader/rollback", json={"to": 1})
    listed = admin.get(AT)
    revisions = admin.get(f"{AT}/reader/revisions")
    difference = admin.get(f"{AT}/reader/revisions/1/diff?to=2")
    log = admin.get(f"{AT}/reader/log")
    key = admin.post(f"{AT}/reader/keys", json={"name": "ci"})
    keys = admin.get(f"{AT}/reader/keys")
    figures = admin.get(f"{AT}/reader/figures")
    stopped = admin.post(f"{AT}/reader/stop")
    started = admin.post(f"{AT}/reader/start")
    removed = admin.delete(f"{AT}/reader")

    assert (created.status_code, created.json()["revision"]) == (201, 1)
    assert again.status_code == 409
    assert dry.json()["changes"] == [
        "model 'echo': version 1 -> versions 1, 2",
        "model 'echo': traffic to the latest version -> version 2: 10",
    ]
    assert changed.json()["revision"] == 2
    assert late.status_code == 409
    assert "changed in the meantime" in late.json()["error"]
    assert back.json()["revision"] == 3
    assert (listed.json()["total"], listed.json()["deployments"][0]["revision"]) == (1, 3)
    assert [one["note"] for one in revisions.json()["revisions"]] == ["back to revision 1", "canary", ""]
    assert difference.json() == {"changes": dry.json()["changes"]}
    assert log.json() == {"text": "started\n"}
    assert key.json()["name"] == "ci"
    assert [one["name"] for one in keys.json()] == ["ci"]
    assert figures.json() == {"points": []}
    assert (stopped.status_code, started.status_code, removed.status_code) == (202, 202, 202)


def test_all_that_is_wrong_with_a_specification_is_said_at_once(admin: TestClient) -> None:
    spec = {"name": "No!", "models": [{"name": "echo", "versions": [0], "colour": 1}], "keys": "yes"}

    answer = admin.post(AT, json=spec)

    assert answer.status_code == 400
    assert answer.json()["error"].splitlines() == [
        "name: expected up to 63 of a-z, 0-9, - and _, with a letter or digit first, got 'No!'",
        "models[0].versions[0]: expected a whole number from 1 to 10000, got 0",
        "models[0].colour: unknown; expected one of name, versions, traffic, instances, batching, config",
        "keys: expected true or false, got 'yes'",
    ]


def test_a_name_that_contradicts_the_address_is_refused(admin: TestClient) -> None:
    answer = admin.put(f"{AT}/reader", json={"name": "other", "models": [{"name": "echo"}]})

    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "name: expected 'reader', as in the address, got 'other'",
    )


def test_what_is_not_there_is_not_found(admin: TestClient) -> None:
    assert admin.get(f"{AT}/nothing").status_code == 404
    assert admin.get("/api/v1/projects/other/deployments").status_code == 404
