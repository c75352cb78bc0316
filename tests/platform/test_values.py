"""The domains of numbers, times and texts in calls."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Le
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.testclient import TestClient
from pydantic import AfterValidator, AllowInfNan, BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from tests.platform.conftest import on_both
from tests.platform.test_app import api_routes
from tests.support.platform_models import add_version

from charonia.platform.app import OPENAPI_PATH, make_app
from charonia.platform.database.connection import Database
from charonia.platform.people import users
from charonia.platform.people.calls import caller
from charonia.platform.people.routes import KeyRequest
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.values import DEPTH_MAX, INTEGER_MAX, SIZE_MAX, TEXT_PATTERN, TIME_S_MAX, Whole, check_json

PROJECT = "/api/v1/projects/default"


def bounds(metadata: list[Any]) -> list[Any]:
    """Return what limits a value, from the annotations of its type and of its parameter."""
    found = []
    for entry in metadata:
        within = entry.metadata if isinstance(entry, FieldInfo) else list(entry) if isinstance(entry, Whole) else None
        found += [entry] if within is None else bounds(within)
    return found


def unbounded(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """Yield the types within a type that have no bounds."""
    limits = bounds(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from unbounded(inner, [*more, *metadata])
    elif annotation in (int, float):
        has_both = all(any(isinstance(each, kind) for each in limits) for kind in (Ge, Le))
        is_finite = annotation is int or any(
            isinstance(each, AllowInfNan) and not each.allow_inf_nan for each in limits
        )
        if not (has_both and is_finite):
            yield annotation.__name__
    elif annotation is str:
        patterns = {getattr(each, "pattern", None) for each in limits}
        if TEXT_PATTERN not in patterns:
            yield "str"
    elif origin is dict and get_args(annotation)[1] is Any:
        if not any(isinstance(each, AfterValidator) and each.func is check_json for each in limits):
            yield str(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        assert annotation.model_config["extra"] == "forbid", annotation
        for field in annotation.model_fields.values():
            yield from unbounded(field.annotation, field.metadata)
    elif origin is not Literal and annotation not in (bool, type(None), ...):
        assert get_args(annotation), f"a kind of type that this test does not know: {annotation}"
        for each in get_args(annotation):
            yield from unbounded(each, [])


def parameters(dependant: Dependant) -> Iterator[Any]:
    """Yield the parameters of a call and of what it depends on, except for who calls: those are hashed."""
    yield from [*dependant.path_params, *dependant.query_params, *dependant.header_params, *dependant.body_params]
    for each in dependant.dependencies:
        if each.call is not caller:
            yield from parameters(each)


def test_every_number_and_text_of_every_call_has_bounds(app: FastAPI) -> None:
    found = [
        (route.path, parameter.name, kind)
        for route in api_routes(app)
        for parameter in parameters(route.dependant)
        for kind in unbounded(parameter.field_info.annotation, parameter.field_info.metadata)
    ]

    assert found == []


@pytest.mark.parametrize("expires", [float("nan"), float("inf"), -1.0, 1e20, TIME_S_MAX + 1])
def test_a_time_without_a_date_is_refused(expires: float) -> None:
    with pytest.raises(ValidationError):
        KeyRequest.model_validate({"name": "a", "roles": [], "expires": expires})


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "value",
    [
        {"a": float("nan")},
        {"a": [{"b": float("-inf")}]},
        {"a": SIZE_MAX + 1},
        {"a": [-SIZE_MAX - 2]},
        {"a\0": 1},
        {"a": "\0"},
        {"a": "\ud800"},
        nested(DEPTH_MAX + 1),
    ],
)
def test_json_outside_of_its_domain_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(PydanticCustomError):
        check_json(value)


def test_json_within_its_domain_is_taken_as_it_is() -> None:
    value = {"a": [1.5, -SIZE_MAX - 1, SIZE_MAX, True, None, "\U0001f600"], "b": nested(DEPTH_MAX - 1)}

    assert check_json(value) == value


@pytest.fixture
def on_each(tmp_path: Path, database: Database) -> Iterator[TestClient]:
    """The owner's client of a platform without background work, on each kind of database."""
    url = database.engine.url.render_as_string(hide_password=False)
    app = make_app(PlatformSettings(tmp_path, isolation="available", database=url))
    with app.state.platform.database.transaction() as session:
        secret = prepare_owner(session, tmp_path)
    with app.state.platform.database.transaction() as session:
        cookie = users.use_link(session, secret, "") or ""
    add_version(app.state.platform.database, tmp_path, "echo", {"1/model.onnx": b"x"})
    client = TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)
    client.headers["Authorization"] = f"Bearer {(tmp_path / 'owner.key').read_text().strip()}"
    client.cookies.set(users.COOKIE, cookie)
    yield client
    app.state.platform.database.close()


HUGE = (INTEGER_MAX + 1, 3_000_000_000, 2**63, 10**400)


@on_both
def test_numbers_and_texts_that_a_database_cannot_store_are_refused(on_each: TestClient) -> None:
    refused = [
        *(f"/api/v1/tasks/{number}" for number in HUGE),
        *(f"{PROJECT}/models/echo/versions/{number}" for number in HUGE),
        *(f"{PROJECT}/models?offset={number}" for number in HUGE),
        *(f"{PROJECT}/tasks?before={number}" for number in HUGE),
        *(f"/api/v1/audit?before={number}" for number in HUGE),
        *(f"/p/default/audit?before={number}" for number in HUGE),
        *(f"/p/default/models/echo/versions/{number}" for number in HUGE),
        f"{PROJECT}/models?search=a%00b",
        f"{PROJECT}/models/a%00b",
        "/api/v1/audit?project=a%00b",
        "/p/default/models?search=%00",
        "/p/de%00fault/models",
    ]

    statuses = {path: on_each.get(path).status_code for path in refused}

    assert {path: status for path, status in statuses.items() if status != 400} == {}


VALUES = ("9223372036854775808", "3000000000", "-1", "a%00b", "%EF%BF%BF", "1e400", "NaN")


@on_both
def test_no_value_in_a_path_or_a_query_is_a_fault_of_the_platform(on_each: TestClient) -> None:
    calls = on_each.get(OPENAPI_PATH).json()["paths"]
    statuses = {}
    for path, operations in calls.items():
        for (method, call), value in itertools.product(operations.items(), VALUES):
            names = [each["name"] for each in call.get("parameters", ()) if each["in"] == "query"]
            query = "&".join(f"{name}={value}" for name in names)
            filled = re.sub(r"\{[^}]+\}", value, path).replace("projects/" + value, "projects/default")
            answer = on_each.request(method.upper(), f"{filled}?{query}", json={})
            statuses[method, path, value] = answer.status_code

    assert len(statuses) > 50 * len(VALUES)
    assert {call: status for call, status in statuses.items() if status >= 500} == {}


@on_both
def test_a_body_outside_of_its_domain_is_refused(on_each: TestClient) -> None:
    for path, body in (
        ("/api/v1/keys", '{"name": "a", "roles": [{"role": "viewer"}], "expires": 1e20}'),
        ("/api/v1/keys", '{"name": "a", "roles": [{"role": "viewer"}], "expires": NaN}'),
        ("/api/v1/users", '{"name": "a", "email": "\\u0000"}'),
        ("/api/v1/users", '{"name": "a", "email": "' + "a" * 300 + '"}'),
        (f"{PROJECT}/models", '{"name": "a", "description": "\\u0000"}'),
        (f"{PROJECT}/models", '{"name": "a", "tags": ["\\ud800"]}'),
        (f"{PROJECT}/models", '{"name": "a", "\\ud800": 1}'),
        (f"{PROJECT}/deployments", '{"name": "a", "models": [{"name": "echo", "config": {"a": NaN}}]}'),
        (f"{PROJECT}/deployments", '{"name": "a", "models": [{"name": "echo", "config": {"a": "\\u0000"}}]}'),
        (f"{PROJECT}/uploads", '{"files": [{"path": "a", "size": 9223372036854775808}]}'),
        (f"{PROJECT}/jobs/tune", '{"model": "echo", "version": 1, "minutes": NaN}'),
    ):
        answer = on_each.post(path, content=body, headers={"Content-Type": "application/json"})

        assert answer.status_code == 400, (path, body, answer.text)


@on_both
def test_a_key_whose_end_an_earlier_release_stored_without_bounds_is_shown(on_each: TestClient) -> None:
    on_each.post("/api/v1/keys", json={"name": "a", "roles": [{"role": "viewer"}], "expires": TIME_S_MAX})
    database = on_each.app.state.platform.database  # type: ignore[attr-defined]
    with database.transaction() as session:
        from charonia.platform.database.tables import KeyRow

        session.query(KeyRow).filter_by(name="a").update({"expires": 1e20})
    del on_each.headers["Authorization"]

    page = on_each.get("/p/default/people")

    assert page.status_code == 200, page.text
    assert "9999-12-31" in page.text


def test_a_model_without_versions_has_a_page(on_each: TestClient) -> None:
    on_each.post(f"{PROJECT}/models", json={"name": "empty", "description": "Soon"})

    page = on_each.get("/p/default/models/empty")

    assert page.status_code == 200
    assert "no versions" in page.text
    assert "Version 0" not in page.text


@on_both
def test_a_page_of_revisions_past_the_end_is_empty(on_each: TestClient) -> None:
    spec = {"name": "reader", "models": [{"name": "echo", "versions": [1]}]}
    assert on_each.post(f"{PROJECT}/deployments", json=spec).status_code == 201

    answer = on_each.get(f"{PROJECT}/deployments/reader/revisions?offset=7")

    assert (answer.status_code, answer.json()) == (200, {"revisions": [], "total": 1})
    assert on_each.get("/p/default/deployments/reader/revisions?offset=7").status_code == 200


def test_a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has(on_each: TestClient) -> None:
    answer = on_each.patch("/api/v1/keys")

    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")
