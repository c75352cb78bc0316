"""Calls that are sent again with the same idempotency key, and COMMITs whose answers are lost, on each database."""

import json
import time
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from tests.platform.test_values import on_each

from charonia.platform import idempotency
from charonia.platform.database import connection
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import CallRow, KeyRow, ModelRow
from charonia.platform.people import login

MODELS = "/api/v1/projects/default/models"

__all__ = ["on_each"]


def database_of(client: TestClient) -> Database:
    found = client.app.state.platform.database  # type: ignore[attr-defined]
    assert isinstance(found, Database)
    return found


def rows(client: TestClient, table: type) -> int:
    with database_of(client).reading() as session:
        return session.query(table).count()


def send(client: TestClient, key: str = "k", path: str = MODELS, **body: Any) -> tuple[int, Any, bool]:
    """Send a change; return status, answer, and whether it is one that was given before."""
    answer = client.post(path, json=body or {"name": "reader"}, headers={"Idempotency-Key": key})
    return answer.status_code, answer.json(), "Idempotent-Replayed" in answer.headers


def test_a_call_that_is_sent_again_gets_the_first_answer_and_changes_nothing(on_each: TestClient) -> None:
    before = rows(on_each, ModelRow)

    status, first, _ = send(on_each)
    again = send(on_each)

    assert status == 201
    assert again == (201, first, True)
    assert rows(on_each, ModelRow) == before + 1
    assert send(on_each, key="another")[0] == 409


def test_a_secret_of_an_answer_is_given_again_and_not_stored(on_each: TestClient) -> None:
    body: dict[str, Any] = {"name": "ci", "roles": [{"role": "viewer"}]}
    status, made, _ = send(on_each, path="/api/v1/keys", **body)
    assert status == 201

    assert send(on_each, path="/api/v1/keys", **body) == (201, made, True)
    with database_of(on_each).reading() as session:
        (row,) = session.query(CallRow).all()
    assert made["key"] not in json.dumps([row.digest, row.request, row.answer])


def test_a_key_belongs_to_one_call_and_one_caller(on_each: TestClient) -> None:
    send(on_each)
    other = on_each.post("/api/v1/keys", json={"name": "other", "roles": [{"role": "admin"}]}).json()["key"]

    status, answer, _ = send(on_each, name="another")
    assert (status, answer["error"]) == (400, "Idempotency-Key: this key was used for another call")
    on_each.headers["Authorization"] = f"Bearer {other}"
    assert send(on_each) == (409, {"error": "model 'reader' already exists", "hint": "add a version to it"}, False)


def test_a_call_that_was_refused_is_handled_again(on_each: TestClient) -> None:
    assert send(on_each, name="-")[0] == 400
    assert rows(on_each, CallRow) == 0

    assert send(on_each, name="-")[0] == 400


@pytest.mark.parametrize("key", ["k" * (idempotency.KEY_CHARS_MAX + 1), "a\tb"])
def test_a_key_that_cannot_be_is_refused(key: str, on_each: TestClient) -> None:
    assert send(on_each, key=key)[0] == 400
    assert rows(on_each, ModelRow) == 1


def test_nobody_gets_an_answer_without_their_credentials(on_each: TestClient) -> None:
    send(on_each)
    del on_each.headers["Authorization"]
    on_each.cookies.clear()

    assert send(on_each)[0] == 401


def test_keys_expire_and_are_bounded(on_each: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CALLS_MAX", 2)
    for number in range(4):
        send(on_each, key=f"k{number}", name=f"m{number}")
    assert rows(on_each, CallRow) == 2
    assert send(on_each, key="k3", name="m3")[2]
    assert send(on_each, key="k0", name="m0")[0] == 409

    monkeypatch.setattr(connection, "now", lambda: time.time() + connection.KEPT_S + 1)
    send(on_each, key="later", name="later")
    assert rows(on_each, CallRow) == 1


@pytest.fixture
def losing(on_each: TestClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the COMMIT of a call with a key lose its answer after the transaction took place, once for each entry."""
    database, losses = database_of(on_each), list[str]()

    def lose(session: Session) -> None:
        Session.commit(session)
        call = connection.current_call.get()
        if losses and call is not None and call.digest and not call.is_recorded:
            losses.pop()
            raise OperationalError("COMMIT", {}, psycopg.OperationalError("lost"), connection_invalidated=True)

    monkeypatch.setattr(database.writing.class_, "commit", lose)
    return losses


def test_a_lost_answer_to_a_commit_is_no_failure_where_the_change_was_made(
    on_each: TestClient, losing: list[str]
) -> None:
    losing.append("after")

    status, first, _ = send(on_each)

    assert (status, losing) == (201, [])
    assert send(on_each) == (201, first, True)


def test_a_commit_that_did_not_take_place_is_a_failure_and_is_tried_again(
    on_each: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "AWAY_S", 0.0)
    database, before = database_of(on_each), rows(on_each, ModelRow)

    def lose(session: Session) -> None:
        session.rollback()
        raise OperationalError("COMMIT", {}, psycopg.OperationalError("lost"), connection_invalidated=True)

    with monkeypatch.context() as patch:
        patch.setattr(database.writing.class_, "commit", lose)
        assert send(on_each)[0] == 503
    assert rows(on_each, ModelRow) == before
    assert send(on_each)[::2] == (201, False)


def test_while_nobody_knows_whether_a_change_was_made_the_call_is_sent_again_with_its_key(
    on_each: TestClient, losing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losing.append("after")
    with monkeypatch.context() as patch:
        patch.setattr(connection, "LOOK_PAUSE_S", 0.0)
        patch.setattr(connection, "_record", fails_after(1, connection._record))
        answer = on_each.post(MODELS, json={"name": "reader"}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 503
    assert "not known" in answer.json()["error"]

    assert send(on_each)[0] == 409  # it was made


def test_an_answer_that_is_lost_for_good_is_said_so(on_each: TestClient) -> None:
    send(on_each)
    with database_of(on_each).transaction() as session:
        session.query(CallRow).update({"answer": ""})  # as when the platform ends between change and answer

    status, answer, _ = send(on_each)
    assert (status, answer["hint"]) == (409, "check the resource before you send another call")
    assert rows(on_each, KeyRow) == 1


def fails_after(count: int, call: Any) -> Any:
    """Return a function that works so often, then finds no database."""
    made = 0

    def wrapped(*given: Any) -> Any:
        nonlocal made
        made += 1
        if made > count:
            raise OperationalError("INSERT", {}, psycopg.OperationalError("away"))
        return call(*given)

    return wrapped


def test_a_call_whose_handler_fails_after_its_change_leaves_no_key(
    on_each: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("after the transaction")

    user = on_each.post("/api/v1/users", json={"name": "Ada"}).json()["id"]
    monkeypatch.setattr(login, "link", fail)
    answer = on_each.post(f"/api/v1/users/{user}/link", headers={"Idempotency-Key": "k"})

    assert answer.status_code == 500
    assert rows(on_each, CallRow) == 0
