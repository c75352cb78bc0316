"""What holds for every call."""

import contextlib
import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from openapi_spec_validator import validate

from charonia.core.errors import Code, ServingError
from charonia.platform.app import BODY_BYTES_MAX, OPENAPI_PATH, make_app
from charonia.platform.database import connection
from charonia.platform.people.calls import caller
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings

HOOK = "/hooks/{project}/{model}"
"""What hosts of Git repositories call, with a signature."""

PUBLIC = {"/login", "/login/link", "/login/sso", "/login/callback", "/assets/{digest}/{name}", OPENAPI_PATH}
"""What browsers call before they have signed in."""


def document(client: TestClient) -> dict[str, Any]:
    answer = client.get(OPENAPI_PATH)
    assert answer.status_code == 200
    found = answer.json()
    assert isinstance(found, dict)
    return found


def api_routes(app: FastAPI) -> list[APIRoute]:
    found, waiting = list[APIRoute](), list(app.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        else:
            waiting += getattr(getattr(route, "original_router", None), "routes", [])
    return found


def test_every_call_but_those_before_signing_in_knows_its_caller(app: FastAPI) -> None:
    def knows(route: APIRoute) -> bool:
        waiting = list(route.dependant.dependencies)
        while waiting:
            found = waiting.pop()
            if found.call is caller:
                return True
            waiting += found.dependencies
        return False

    assert api_routes(app)
    assert {route.path for route in api_routes(app) if not knows(route)} == {HOOK, *PUBLIC} - {OPENAPI_PATH}


def test_the_openapi_document_is_valid_and_has_every_call(app: FastAPI, anybody: TestClient) -> None:
    found = document(anybody)
    described = {(path, method) for path, calls in found["paths"].items() for method in calls}
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in api_routes(app)
        if route.path.startswith("/api/")
        for method in route.methods or ()
    }

    validate(found)
    assert described == routes


def test_every_call_of_the_document_has_words_errors_and_security(anybody: TestClient) -> None:
    found = document(anybody)
    calls = {f"{method} {path}": call for path, each in found["paths"].items() for method, call in each.items()}

    assert [name for name, call in calls.items() if not call.get("description")] == []
    assert [name for name, call in calls.items() if call.get("security") != [{"key": []}, {"session": []}]] == []
    assert [name for name, call in calls.items() if "default" not in call["responses"]] == []
    assert "422" not in {status for call in calls.values() for status in call["responses"]}
    assert len({call["operationId"] for call in calls.values()}) == len(calls)


@pytest.mark.parametrize("path", ["/api/v1/me", "/login/link", "/nowhere", OPENAPI_PATH])
def test_every_answer_tells_browsers_what_pages_may_do(path: str, anybody: TestClient) -> None:
    headers = anybody.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))

    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_a_route_may_say_more_itself(app: FastAPI, anybody: TestClient) -> None:
    @app.get("/asset")
    def asset() -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse("", headers={"Cache-Control": "public, max-age=60"})

    assert anybody.get("/asset").headers.get_list("Cache-Control") == ["public, max-age=60"]


@pytest.mark.parametrize(
    ("error", "status", "content"),
    [
        (ServingError(Code.NOT_FOUND, "no a", hint="make one"), 404, {"error": "no a", "hint": "make one"}),
        (ServingError(Code.INTERNAL, "a fault"), 500, {"error": "a fault"}),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            507,
            {"error": "the disk is full", "hint": "make room in the data folder, then try again"},
        ),
        (
            OSError(errno.EIO, "of a disk"),
            500,
            {"error": "the platform failed at this call", "hint": "its log says why"},
        ),
        (
            connection.DatabaseFullError(Code.UNAVAILABLE, "the database cannot be used: full", hint="make room"),
            507,
            {"error": "the database cannot be used: full", "hint": "make room"},
        ),
        (KeyError("secret"), 500, {"error": "the platform failed at this call", "hint": "its log says why"}),
    ],
)
def test_an_error_has_its_status_and_words(
    error: Exception, status: int, content: dict[str, str], app: FastAPI
) -> None:
    @app.get("/api/v1/broken")
    def broken() -> None:
        raise error

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/api/v1/broken")
    assert (answer.status_code, answer.json()) == (status, content)
    assert "Content-Security-Policy" in answer.headers


def test_a_call_that_does_not_fit_its_description(admin: TestClient) -> None:
    answer = admin.post("/api/v1/projects", json={"nam": "x"})

    assert answer.status_code == 400
    assert answer.json() == {
        "error": "body.name: expected a value, got nothing; body.nam: unknown; expected one of name",
        "hint": f"{OPENAPI_PATH} describes the calls",
    }


def test_a_body_that_is_not_json(admin: TestClient) -> None:
    answer = admin.post("/api/v1/projects", content=b'{"name": x}', headers={"Content-Type": "application/json"})

    assert (answer.status_code, answer.json()["error"]) == (400, "body[9]: expected JSON: Expecting value")


def test_a_body_that_is_too_large_is_refused_before_it_is_read(anybody: TestClient) -> None:
    answer = anybody.post("/api/v1/projects", content=b" " * (BODY_BYTES_MAX + 1))
    form = anybody.post("/logout", data={"csrf": "x" * BODY_BYTES_MAX})

    pieces = anybody.post("/api/v1/projects", content=(b" " * 2**20 for _ in range(BODY_BYTES_MAX // 2**20 + 1)))

    assert (answer.status_code, form.status_code, pieces.status_code) == (413, 413, 413)
    assert answer.json() == pieces.json()
    assert answer.json() == {
        "error": "the body of this call is too large",
        "hint": f"{OPENAPI_PATH} describes uploads in pieces",
    }
    assert "Content-Security-Policy" in answer.headers


def test_a_piece_of_an_upload_may_be_larger(admin: TestClient) -> None:
    size = BODY_BYTES_MAX + 1
    asked = {"files": [{"path": "model.onnx", "size": size}]}
    [upload] = admin.post("/api/v1/projects/default/uploads", json=asked).json()

    sent = admin.put(f"/api/v1/projects/default/uploads/{upload['key']}", content=b" " * size)
    assert sent.json()["received"] == size


def test_an_address_that_is_none(admin: TestClient) -> None:
    assert admin.get("/api/v1/nowhere").json() == {
        "error": "there is nothing at /api/v1/nowhere",
        "hint": "/api/openapi.json describes the calls",
    }
    assert admin.delete("/api/v1/me").status_code == 405


def test_a_call_while_another_program_keeps_the_database_locked_is_refused_and_looking_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOCK_WAIT_S", 0.2)
    app = make_app(PlatformSettings(tmp_path, isolation="available"))
    with app.state.platform.database.transaction() as session:
        prepare_owner(session, tmp_path)
    headers = {"Authorization": f"Bearer {(tmp_path / 'owner.key').read_text().strip()}"}
    body = {"name": "vision"}

    with TestClient(app, headers=headers) as client:
        with contextlib.closing(sqlite3.connect(tmp_path / "platform.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = client.post("/api/v1/projects", json=body)
            seen = client.get("/api/v1/projects")
            other.execute("ROLLBACK")
        accepted = client.post("/api/v1/projects", json=body)

    assert (refused.status_code, refused.json()) == (
        503,
        {"error": "the database cannot be used: database is locked", "hint": "try again"},
    )
    assert seen.json() == [{"name": "default"}]
    assert accepted.status_code == 201
