"""Models and versions over the API, without real checks."""

import asyncio
import json
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from tests.platform.conftest import on_both, when_ended
from tests.platform.models.conftest import MODELS, UPLOADS, add_files, send, settled
from tests.support.process import eventually
from tests.support.statements import noted

from charonia.platform.database.connection import now
from charonia.platform.database.tables import (
    DeploymentRow,
    EnvironmentRow,
    ModelRow,
    ProjectRow,
    RevisionRow,
    VersionRow,
)
from charonia.platform.models import registry, uploads
from charonia.platform.models.check import CheckingPython
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.state import Platform
from charonia.platform.tasks import queue
from charonia.platform.tasks.runner import TaskRun

Caller = Callable[..., dict[str, str]]
ROOT = Principal("root", everywhere=ProjectRole.ADMIN)

pytestmark = pytest.mark.usefixtures("quick_checks")


def deploy(platform: Platform, name: str, models: list[dict[str, Any]]) -> None:
    with platform.database.transaction() as session:
        project = session.query(ProjectRow).filter_by(name="default").one()
        row = DeploymentRow(
            project_id=project.id, name=name, target="local", latest=1, wanted=1, state="ready", created=now()
        )
        row.revisions = [RevisionRow(number=1, spec={"models": models}, state="serving", created=now())]
        session.add(row)


@on_both
def test_a_model_is_made_changed_found_and_removed(admin: TestClient) -> None:
    made = admin.post(MODELS, json={"name": "resnet", "description": "Finds cats", "tags": ["vision", "cat"]})
    assert made.status_code == 201, made.text
    assert made.json()["owner"] == "key owner"
    changed = admin.patch(f"{MODELS}/resnet", json={"owner": "Ada", "links": {"card": "https://example.org/card"}})
    assert changed.json()["links"] == {"card": "https://example.org/card"}
    assert (changed.json()["description"], changed.json()["tags"]) == ("Finds cats", ["cat", "vision"])

    for search in ("res", "RESNET", "ada", "cats", "vis"):
        assert [m["name"] for m in admin.get(MODELS, params={"search": search}).json()["models"]] == ["resnet"]
    for search in ("dog", "%", "_"):
        assert admin.get(MODELS, params={"search": search}).json()["models"] == []
    assert admin.get(MODELS, params={"tag": "vision"}).json()["total"] == 1
    assert admin.get(MODELS, params={"tag": "visio"}).json()["total"] == 0
    assert admin.get(MODELS).json()["tags"] == {"cat": 1, "vision": 1}

    assert admin.delete(f"{MODELS}/resnet").status_code == 204
    assert admin.get(f"{MODELS}/resnet").status_code == 404


@on_both
def test_a_list_comes_in_pages(admin: TestClient) -> None:
    for name in ("c", "a", "b"):
        admin.post(MODELS, json={"name": name})

    page = admin.get(MODELS, params={"limit": 2, "offset": 1}).json()

    assert ([model["name"] for model in page["models"]], page["total"]) == (["b", "c"], 3)
    assert admin.get(MODELS, params={"limit": 201}).status_code == 400


@on_both
def test_models_that_cannot_be_are_refused(admin: TestClient) -> None:
    admin.post(MODELS, json={"name": "taken"})
    for body, status in (
        ({"name": "a/b"}, 400),
        ({"name": ""}, 400),
        ({"name": "x" * 200}, 400),
        ({"name": "a", "tags": [""]}, 400),
        ({"name": "a", "links": {"x": "javascript:alert(1)"}}, 400),
        ({"name": "a", "color": "red"}, 400),
        ({"name": "taken"}, 409),
    ):
        answer = admin.post(MODELS, json=body)

        assert (answer.status_code, bool(answer.json()["error"])) == (status, True), body


@on_both
def test_an_upload_becomes_a_version_with_its_files(admin: TestClient) -> None:
    files = {"net/config.pbtxt": b"max_batch_size: 2", "net/1/model.onnx": b"weights", "net/.git/HEAD": b""}

    version = add_files(admin, "net", files)

    assert (version["state"], version["number"], version["size"]) == ("ready", 1, 24)
    assert [(file["path"], file["size"]) for file in version["files"]] == [("1/model.onnx", 7), ("config.pbtxt", 17)]
    assert version["report"]["left_out"] == ["net/.git/HEAD"]
    assert version["report"]["backend"] == "onnxruntime"
    assert version["source"] == "upload of net and others (3 files)"
    file = admin.get(f"{MODELS}/net/versions/1/files/1/model.onnx")
    assert (file.content, file.headers["content-type"]) == (b"weights", "application/octet-stream")
    assert admin.get(f"{MODELS}/net/versions/1/files/1/%2E%2E/config.pbtxt").status_code == 404
    assert admin.get(f"{MODELS}/net/versions/1/files/none").status_code == 404
    (summary,) = admin.get(MODELS).json()["models"]
    assert (summary["version_count"], summary["latest"]["number"], summary["latest"]["state"]) == (1, 1, "ready")


def test_what_was_sent_is_gone_when_it_is_a_version(admin: TestClient, platform: Platform) -> None:
    batch = send(admin, {"a.onnx": b"weights"})
    answer = admin.post(f"{MODELS}/a/versions", json={"source": {"kind": "upload", "place": batch}})
    settled(admin, "a", answer.json()["number"])

    assert admin.get(UPLOADS, params={"batch": batch}).status_code == 404
    assert list(platform.uploads.folder.iterdir()) == []


def test_an_upload_that_was_cut_off_goes_on_where_it_was(admin: TestClient) -> None:
    (row,) = admin.post(UPLOADS, json={"files": [{"path": "a.onnx", "size": 10}]}).json()
    path = f"{UPLOADS}/{row['key']}"
    admin.put(path, content=b"abcd")

    assert admin.get(path).json()["received"] == 4
    body = {"source": {"kind": "upload", "place": row["batch"]}}
    early = admin.post(f"{MODELS}/a/versions", json=body)
    assert (early.status_code, early.json()["error"]) == (400, "file 'a.onnx': expected 10 bytes, 4 have arrived")
    assert admin.put(path, params={"offset": 6}, content=b"ghij").status_code == 409
    assert admin.put(path, params={"offset": 4}, content=b"efghijk").status_code == 413
    assert admin.put(path, params={"offset": 4}, content=b"efghij").json()["received"] == 10
    number = admin.post(f"{MODELS}/a/versions", json=body).json()["number"]
    assert admin.post(f"{MODELS}/a/versions", json=body).status_code in (404, 409)
    assert settled(admin, "a", number)["size"] == 10


def test_uploads_that_cannot_be_are_refused(admin: TestClient) -> None:
    cases: list[tuple[list[dict[str, Any]], int]] = [
        ([], 400),
        ([{"path": "../a", "size": 1}], 400),
        ([{"path": "a", "size": -1}], 400),
        ([{"path": "a", "size": 2**41}], 400),
        ([{"path": "a", "size": 1}, {"path": "a", "size": 1}], 400),
        ([{"path": "a", "size": 1}, {"path": "a/b", "size": 1}], 400),
        ([{"path": "a", "size": 2**40}], 507),
    ]
    for files, status in cases:
        answer = admin.post(UPLOADS, json={"files": files})

        assert answer.status_code == status, (files, answer.text)


@on_both
def test_a_project_has_a_limit_of_uploads_in_progress(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
    monkeypatch.setattr(uploads, "UPLOADS_BYTES_MAX", 100)
    admin.post(UPLOADS, json={"files": [{"path": "a", "size": 60}]})

    large = admin.post(UPLOADS, json={"files": [{"path": "a", "size": 41}]})
    many = admin.post(UPLOADS, json={"files": [{"path": "a", "size": 1}, {"path": "b", "size": 1}]})

    assert large.status_code == 413
    assert large.json()["error"] == "uploads to 'default': expected at most 100 bytes at a time, got 101"
    assert many.status_code == 429
    assert many.json()["error"] == "uploads to 'default': expected at most 2 files at a time, got 3"
    assert "delete other uploads" in large.json()["hint"] == many.json()["hint"]
    assert int(many.headers["Retry-After"]) > 0


@on_both
def test_a_project_has_a_limit_of_versions_that_wait(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "PROJECT_WAITING_MAX", 0)

    answer = admin.post(f"{MODELS}/a/versions", json={"source": {"kind": "upload", "place": send(admin, {"a": b""})}})

    assert (answer.status_code, "of this project wait already" in answer.json()["error"]) == (429, True)


def test_an_upload_that_its_client_cuts_is_no_fault(
    app: FastAPI, admin: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    (row,) = admin.post(UPLOADS, json={"files": [{"path": "a.onnx", "size": 10}]}).json()
    path = f"{UPLOADS}/{row['key']}"
    received = iter([{"type": "http.request", "body": b"abcd", "more_body": True}, {"type": "http.disconnect"}])
    scope = {
        "type": "http",
        "method": "PUT",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", admin.headers["Authorization"].encode()), (b"content-length", b"10")],
        "scheme": "http",
        "server": ("127.0.0.1", 8080),
        "client": ("127.0.0.1", 9),
        "http_version": "1.1",
    }
    sent = list[Any]()

    async def receive() -> Any:
        return next(received)

    async def send_message(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send_message))

    assert admin.get(path).json()["received"] == 4
    assert sent[0]["status"] == 400
    assert not caplog.records


def test_lack_of_memory_is_not_a_bad_request(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Request) -> None:
        raise MemoryError

    monkeypatch.setattr(Request, "json", fail)

    answer = admin.post(UPLOADS, json={"files": []})

    assert (answer.status_code, answer.json()["error"]) == (503, "the platform has no memory left for this call")
    assert int(answer.headers["Retry-After"]) > 0


@on_both
def test_files_are_added_to_a_batch_and_a_batch_is_given_up(admin: TestClient) -> None:
    batch = send(admin, {"1/model.onnx": b"w"})
    more = admin.post(UPLOADS, json={"files": [{"path": "config.pbtxt", "size": 1}], "batch": batch}).json()
    assert [row["batch"] for row in more] == [batch]
    assert len(admin.get(UPLOADS, params={"batch": batch}).json()) == 2
    assert admin.post(UPLOADS, json={"files": [{"path": "x", "size": 1}], "batch": "other"}).status_code == 404

    assert admin.delete(UPLOADS, params={"batch": batch}).status_code == 204
    assert admin.get(f"{UPLOADS}/{more[0]['key']}").status_code == 404


@on_both
def test_two_uploads_at_once_become_two_versions(admin: TestClient) -> None:
    batches = [send(admin, {"a.onnx": bytes([number])}) for number in range(6)]
    numbers: list[int] = []

    def post(batch: str) -> None:
        answer = admin.post(f"{MODELS}/a/versions", json={"source": {"kind": "upload", "place": batch}})
        numbers.append(answer.json()["number"])

    threads = [threading.Thread(target=post, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]
    assert {settled(admin, "a", number)["state"] for number in numbers} == {"ready"}


def test_the_same_files_are_one_version(admin: TestClient) -> None:
    add_files(admin, "a", {"a.onnx": b"weights"})

    again = add_files(admin, "a", {"b.onnx": b"weights"})

    assert (again["state"], again["report"]["problem"]) == ("refused", "version 1 has the same files")
    assert add_files(admin, "b", {"b.onnx": b"weights"})["state"] == "ready"


def test_what_is_no_model_is_refused_and_can_be_sent_anew(admin: TestClient) -> None:
    batch = send(admin, {"a.onnx": b"1", "b.onnx": b"2"})
    body = {"source": {"kind": "upload", "place": batch}}
    number = admin.post(f"{MODELS}/a/versions", json=body).json()["number"]

    version = settled(admin, "a", number)

    assert version["report"]["problem"] == "expected one model, got 'a.onnx', 'b.onnx'"
    assert "upload one of them" in version["report"]["hint"]
    assert admin.get(f"{MODELS}/a").json()["versions"][0]["problem"] == version["report"]["problem"]
    assert {row["received"] for row in admin.get(UPLOADS, params={"batch": batch}).json()} == {1}


@on_both
def test_a_configuration_that_is_no_text_is_told(admin: TestClient) -> None:
    for name, text in {"a": b'default_model_filename: "\xff\x00"', "b": b"\xff\x00: 5", "c": b"\x00"}.items():
        version = add_files(admin, name, {"config.pbtxt": text, "requirements.txt": b"\xff\x00", "1/model.onnx": b"w"})

        assert version["state"] in ("ready", "refused")
        assert admin.get(f"{MODELS}/{name}").status_code == 200


def test_code_needs_the_permission_for_it(admin: TestClient, as_caller: Caller) -> None:
    code = {"greet.py": b"def greet(): pass"}

    refused = add_files(admin, "greet", code, as_caller("deployer"))
    allowed = add_files(admin, "greet", code, as_caller("deployer", may_run_code=True))

    assert (refused["state"], refused["runs_code"]) == ("refused", True)
    assert refused["report"]["problem"] == "the model is not known to be data: 1/model.py: Python code"
    assert (allowed["state"], allowed["runs_code"]) == ("ready", True)


def test_what_is_not_known_to_be_data_needs_the_permission(admin: TestClient, as_caller: Caller) -> None:
    deployer = as_caller("deployer")
    cases: list[tuple[dict[str, bytes], str]] = [
        ({"net.pt": b"PK"}, "1/model.pt: TorchScript, a program that can read and write files"),
        ({"1/model.savedmodel/saved_model.pb": b""}, "1/model.savedmodel/saved_model.pb: a TensorFlow graph"),
        ({"net.onnx": b"\x3b"}, "1/model.onnx: it cannot be examined"),
        ({"1/model.txt": b"\4\0\0\0\1\0\0\0"}, "1/model.txt: it does not begin like a file that"),
        (
            {"1/model.gguf": b"GGUF", "1/model.json": b'{"mmproj": "../../../x.gguf"}'},
            "parameter mmproj: not on the list of harmless parameters",
        ),
        (
            {"config.pbtxt": b'parameters { key: "CACHE_DIR" value { string_value: "/tmp/x" } }', "1/model.xml": b""},
            "parameter CACHE_DIR: it names a folder to write",
        ),
    ]
    for files, problem in cases:
        refused = add_files(admin, "net", files, deployer)

        assert (refused["state"], refused["runs_code"]) == ("refused", True)
        assert problem in refused["report"]["problem"]


def test_folders_of_the_machine_are_for_administrators(admin: TestClient, as_caller: Caller) -> None:
    body = {"source": {"kind": "folder", "place": "/etc"}}

    answer = admin.post(f"{MODELS}/a/versions", json=body, headers=as_caller("deployer", may_run_code=True))

    assert answer.status_code == 403
    assert admin.post(f"{MODELS}/a/versions", json={"source": {"kind": "folder", "place": "etc"}}).status_code == 400


@on_both
def test_changes_are_in_the_audit_log(admin: TestClient) -> None:
    add_files(admin, "a", {"a.onnx": b"weights"})
    admin.patch(f"{MODELS}/a/versions/1", json={"notes": "good"})
    admin.delete(f"{MODELS}/a/versions/1")

    entries = admin.get("/api/v1/audit", params={"project": "default"}).json()

    found = [(entry["action"], entry["subject"]) for entry in entries]
    assert found[:4] == [
        ("version.delete", "default/a/1"),
        ("version.annotate", "default/a/1"),
        ("version.add", "default/a/1"),
        ("model.create", "default/a"),
    ]


def test_versions_are_compared(admin: TestClient) -> None:
    add_files(admin, "a", {"config.pbtxt": b"max_batch_size: 2", "1/model.onnx": b"weights", "labels.txt": b"cat"})
    add_files(admin, "a", {"config.pbtxt": b"max_batch_size: 4", "1/model.onnx": b"weights", "1/new.bin": b"x"})

    found = admin.get(f"{MODELS}/a/versions/2/difference", params={"from": 1}).json()

    assert (found["added"], found["removed"], found["changed"]) == (["1/new.bin"], ["labels.txt"], ["config.pbtxt"])
    assert found["config"] == [{"path": "max_batch_size", "before": 2, "after": 4}]


@on_both
def test_what_is_deployed_stays(admin: TestClient, platform: Platform) -> None:
    for content in (b"1", b"2", b"3"):
        add_files(admin, "a", {"a.onnx": content})
    deploy(platform, "first", [{"name": "a", "versions": [1]}])
    deploy(platform, "latest", [{"name": "b"}, {"name": "a"}])

    assert admin.get(f"{MODELS}/a").json()["deployments"] == ["first", "latest"]
    assert admin.get(f"{MODELS}/a/versions/1").json()["deployments"] == ["first"]
    assert admin.get(f"{MODELS}/a/versions/3").json()["deployments"] == ["latest"]
    for number, by in ((1, "first"), (3, "latest")):
        answer = admin.delete(f"{MODELS}/a/versions/{number}")
        assert (answer.status_code, answer.json()["error"]) == (409, f"version {number} of 'a' is deployed by {by}")
    assert admin.delete(f"{MODELS}/a").status_code == 409
    assert admin.delete(f"{MODELS}/a/versions/2").status_code == 204


@on_both
def test_a_number_is_not_given_twice_and_files_go_with_their_last_version(
    admin: TestClient, platform: Platform
) -> None:
    add_files(admin, "a", {"a.onnx": b"one"})
    version = add_files(admin, "a", {"a.onnx": b"two"})
    blob = platform.artifacts.local.path(version["files"][0]["sha256"])
    assert blob.exists()

    admin.delete(f"{MODELS}/a/versions/2")

    number = max(task["id"] for task in admin.get("/api/v1/projects/default/tasks").json())
    assert when_ended(admin, number)["result"] == {"files": 1, "bytes": 3, "uploads": 0}
    assert not blob.exists()
    assert add_files(admin, "a", {"a.onnx": b"three"})["number"] == 3


def test_a_version_whose_task_was_cancelled_before_it_began_is_refused(admin: TestClient, platform: Platform) -> None:
    batch = send(admin, {"a.onnx": b"weights"})
    platform.tasks.close()  # nobody works
    body = {"source": {"kind": "upload", "place": batch}}
    added = admin.post(f"{MODELS}/a/versions", json=body).json()
    assert admin.delete(f"{MODELS}/a/versions/1").status_code == 409

    admin.post(f"/api/v1/tasks/{added['task']}/cancel")

    version = admin.get(f"{MODELS}/a/versions/1").json()
    assert (version["state"], version["report"]["problem"]) == ("refused", "it was cancelled")
    assert admin.get(f"{MODELS}/a").json()["versions"][0]["state"] == "refused"
    assert admin.delete(f"{MODELS}/a/versions/1").status_code == 204


@on_both
def test_a_check_that_runs_is_cancelled(admin: TestClient, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(run: TaskRun, *_: object) -> None:
        while True:
            run.check()

    monkeypatch.setattr("charonia.platform.models.version_import.full_check", endless)
    batch = send(admin, {"a.onnx": b"weights"})
    body = {"source": {"kind": "upload", "place": batch}}
    added = admin.post(f"{MODELS}/a/versions", json=body).json()
    assert eventually(lambda: bool(admin.get(f"{MODELS}/a/versions/1").json()["state"] == "checking"))

    admin.post(f"/api/v1/tasks/{added['task']}/cancel")

    version = settled(admin, "a", 1)
    assert (version["state"], version["report"]["problem"]) == ("refused", "it was cancelled")
    monkeypatch.setattr("charonia.platform.models.version_import.full_check", lambda *_: {"is_checked": True})
    admin.post(f"{MODELS}/a/versions/1/check")
    assert settled(admin, "a", 1)["report"]["problem"] == ""


def test_what_was_refused_is_added_with_the_permission(admin: TestClient, as_caller: Caller) -> None:
    batch = send(admin, {"greet.py": b"def greet(): pass"})
    body = {"source": {"kind": "upload", "place": batch}}
    admin.post(f"{MODELS}/a/versions", json=body, headers=as_caller("deployer"))
    assert settled(admin, "a", 1)["state"] == "refused"

    admin.post(f"{MODELS}/a/versions", json=body)

    assert settled(admin, "a", 2)["state"] == "ready"


def test_a_fault_of_the_platform_leaves_no_version_on_its_way(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("charonia.platform.models.version_import.full_check", fail)

    assert add_files(admin, "a", {"a.onnx": b"weights"})["report"]["problem"] == "RuntimeError: a fault"


def test_a_version_has_many_files(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 80  # more than may be open at a time
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
    try:
        version = add_files(admin, "a", {"1/model.onnx": b"w"} | {f"1/part{n}": b"%d" % n for n in range(count)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert (version["state"], len(version["files"])) == ("ready", count + 1)


def test_a_version_whose_framework_is_nowhere_is_not_checked_until_it_is(
    admin: TestClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.platform.models.check.importlib.util.find_spec", lambda name: None)
    version = add_files(admin, "a", {"a.pt": b"weights"})

    assert (version["state"], version["report"]["is_checked"]) == ("ready", False)
    assert version["report"]["needs"] == [{"name": "torch", "extra": "torch", "is_here": False}]
    assert version["report"]["warnings"] == [
        "it needs torch, which neither the platform nor an environment has: it is not checked"
    ]

    python = platform.settings.data / "environments" / "1" / "d1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with platform.database.transaction() as session:
        owner = session.query(ProjectRow).filter_by(name="default").one()
        row = EnvironmentRow(
            project_id=owner.id, name="torch2", python="3.11", requirements="torch", digest="d1", state="ready"
        )
        row.packages, row.created = [["torch", "2.9"]], now()
        session.add(row)
    used: list[CheckingPython] = []
    monkeypatch.setattr(
        "charonia.platform.models.version_import.full_check",
        lambda *args: used.append(args[-2]) or {"is_checked": True, "checked_with": args[-2].name},  # type: ignore[func-returns-value]
    )

    assert admin.post(f"{MODELS}/a/versions/1/check").status_code == 202

    checked = settled(admin, "a", 1)
    assert used == [CheckingPython("torch2", python)]
    assert (checked["report"]["checked_with"], checked["report"]["warnings"]) == ("torch2", [])


@on_both
def test_a_page_of_many_models_takes_few_statements(admin: TestClient, platform: Platform) -> None:
    with platform.database.transaction() as session:
        project = session.query(ProjectRow).filter_by(name="default").one()
        for number in range(300):
            row = ModelRow(project_id=project.id, name=f"m{number:04}", tags=["t"], links={}, created=now())
            row.versions = [
                VersionRow(number=n, state="ready", created=now(), files={}, report={"config": {"x": "y" * 1000}})
                for n in (1, 2, 3)
            ]
            session.add(row)

    with noted(platform.database.engine) as statements, platform.database.reading() as session:
        page = registry.models(session, ROOT, "default", limit=200)

    assert (len(page.models), page.total, page.tags) == (200, 300, {"t": 300})
    assert {(each.version_count, each.latest.number) for each in page.models if each.latest} == {(3, 3)}
    assert 0 < len(statements) <= 6, json.dumps(statements, indent=1)


def test_a_check_by_someone_without_the_permission_runs_nothing_that_was_once_taken_for_data(
    admin: TestClient, platform: Platform, as_caller: Caller, quick_checks: None
) -> None:
    config = (
        b'backend: "onnxruntime" parameters { key: "session.optimized_model_filepath" value { string_value: "x" } }'
    )
    add_files(admin, "a", {"config.pbtxt": config, "1/model.onnx": b""})
    with platform.database.transaction() as session:
        session.query(VersionRow).one().runs_code = False

    assert admin.post(f"{MODELS}/a/versions/1/check", headers=as_caller("deployer")).status_code == 202

    version = settled(admin, "a", 1)
    assert (version["state"], version["runs_code"], version["report"]["is_checked"]) == ("ready", True, False)
    assert "the caller may not run code" in version["report"]["warnings"][0]
