from typing import Any

import pytest
from fastapi.testclient import TestClient

from charonia.platform.people import audit
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.state import Platform


def key_of(admin: TestClient, name: str, *roles: dict[str, Any]) -> dict[str, str]:
    """Make a key, and return the header of calls with it."""
    made = admin.post("/api/v1/keys", json={"name": name, "roles": roles})
    assert made.status_code == 201, made.text
    return {"Authorization": f"Bearer {made.json()['key']}"}


@pytest.fixture
def vision(admin: TestClient) -> dict[str, str]:
    """The key of an administrator of the project "vision"."""
    admin.post("/api/v1/projects", json={"name": "vision"})
    return key_of(admin, "vision-admin", {"role": "admin", "project": "vision"})


def test_projects_are_added_once(admin: TestClient) -> None:
    assert admin.post("/api/v1/projects", json={"name": "vision"}).json() == {"name": "vision"}
    assert admin.get("/api/v1/projects").json() == [{"name": "default"}, {"name": "vision"}]

    again = admin.post("/api/v1/projects", json={"name": "vision"})
    assert (again.status_code, again.json()["error"]) == (409, "project 'vision' already exists")


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a" * 129, "é", "a b", ".."])
def test_a_name_that_an_address_cannot_have_is_refused(name: str, admin: TestClient) -> None:
    assert admin.post("/api/v1/projects", json={"name": name}).status_code == 400


def test_somebody_sees_their_projects(admin: TestClient, vision: dict[str, str]) -> None:
    assert admin.get("/api/v1/projects", headers=vision).json() == [{"name": "vision"}]
    assert admin.post("/api/v1/projects", json={"name": "more"}, headers=vision).status_code == 403


def test_a_key_is_shown_once_and_works_until_it_is_revoked(admin: TestClient) -> None:
    key = key_of(admin, "ci", {"role": "deployer", "project": "default", "may_run_code": True})
    listed = {each["name"]: each for each in admin.get("/api/v1/keys").json()}

    assert admin.get("/api/v1/me", headers=key).json()["name"] == "key ci"
    assert listed["ci"]["roles"] == [{"role": "deployer", "project": "default", "may_run_code": True}]
    assert listed["ci"].keys() == {"name", "roles", "created", "expires", "used"}
    assert admin.delete("/api/v1/keys/ci").status_code == 204
    assert admin.get("/api/v1/me", headers=key).status_code == 401
    assert admin.delete("/api/v1/keys/ci").status_code == 404


def test_the_list_says_when_a_key_was_used(admin: TestClient) -> None:
    key = key_of(admin, "ci", {"role": "viewer"})
    before = {each["name"]: each["used"] for each in admin.get("/api/v1/keys").json()}
    admin.get("/api/v1/me", headers=key)
    after = {each["name"]: each["used"] for each in admin.get("/api/v1/keys").json()}

    assert before["ci"] == 0
    assert after["ci"] > 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "ci", "roles": []}, 400),
        ({"name": "", "roles": [{"role": "viewer"}]}, 400),
        ({"name": "a/b", "roles": [{"role": "viewer"}]}, 400),
        ({"name": "ci", "roles": [{"role": "root"}]}, 400),
        ({"name": "ci"}, 400),
        ({"name": "ci", "roles": [{"role": "viewer", "project": "nowhere"}]}, 404),
        ({"name": "owner", "roles": [{"role": "viewer"}]}, 409),
    ],
)
def test_a_key_that_cannot_be_made(body: dict[str, Any], status: int, admin: TestClient) -> None:
    answer = admin.post("/api/v1/keys", json=body)

    assert answer.status_code == status
    assert answer.json()["error"]


def test_an_administrator_of_a_project_gives_roles_in_it_only(admin: TestClient, vision: dict[str, str]) -> None:
    def make(name: str, *roles: dict[str, Any]) -> int:
        return admin.post("/api/v1/keys", json={"name": name, "roles": roles}, headers=vision).status_code

    assert make("own", {"role": "admin", "project": "vision"}) == 201
    assert make("everywhere", {"role": "viewer"}) == 403
    assert make("other", {"role": "viewer", "project": "default"}) == 403
    assert make("both", {"role": "viewer", "project": "vision"}, {"role": "viewer", "project": "default"}) == 403


def test_an_administrator_of_a_project_sees_and_revokes_its_keys_only(
    admin: TestClient, vision: dict[str, str]
) -> None:
    key_of(admin, "other", {"role": "viewer", "project": "default"})
    key_of(admin, "both", {"role": "viewer", "project": "default"}, {"role": "viewer", "project": "vision"})

    listed = [each["name"] for each in admin.get("/api/v1/keys", headers=vision).json()]
    revoked = [admin.delete(f"/api/v1/keys/{name}", headers=vision).status_code for name in ("owner", "other", "both")]

    assert listed == ["both", "vision-admin"]
    assert revoked == [404, 404, 403]  # of the first two they do not even learn that they exist
    assert admin.delete("/api/v1/keys/vision-admin", headers=vision).status_code == 204


def test_somebody_gets_a_link_and_roles(admin: TestClient) -> None:
    ada = admin.post("/api/v1/users", json={"name": "Ada", "email": "ada@example.org"}).json()
    role = {"role": "deployer", "project": "default", "may_run_code": True}
    given = admin.put(f"/api/v1/users/{ada['id']}/role", json=role)
    link = admin.post(f"/api/v1/users/{ada['id']}/link").json()["url"]
    del admin.headers["Authorization"]

    assert given.json()["roles"] == [role]
    assert admin.get(link).headers["location"] == "/"
    assert admin.get("/api/v1/me").json() == {"name": "Ada <ada@example.org>", "roles": [role]}


def test_a_role_takes_the_place_of_the_one_before_in_its_project(admin: TestClient) -> None:
    user = admin.post("/api/v1/users", json={"name": "Ada"}).json()["id"]

    def give(**body: Any) -> list[tuple[str, str]]:
        roles = admin.put(f"/api/v1/users/{user}/role", json=body).json()["roles"]
        return sorted((each["project"], each["role"]) for each in roles)

    assert give(role="viewer") == [("", "viewer")]
    assert give(role="deployer", project="default") == [("", "viewer"), ("default", "deployer")]
    assert give(role="admin", project="default") == [("", "viewer"), ("default", "admin")]
    assert give(role="none") == [("default", "admin")]
    assert admin.put(f"/api/v1/users/{user}/role", json={"role": "viewer", "project": "x"}).status_code == 404


def test_an_administrator_of_a_project_gives_people_roles_in_it_only(admin: TestClient, vision: dict[str, str]) -> None:
    def give(**body: Any) -> int:
        return admin.put("/api/v1/users/1/role", json=body, headers=vision).status_code

    assert give(role="viewer", project="vision") == 200
    assert give(role="none") == 403
    assert give(role="viewer", project="default") == 403
    assert admin.post("/api/v1/users/1/link", headers=vision).status_code == 403


def test_who_is_removed_is_out_at_once(admin: TestClient) -> None:
    user = admin.post("/api/v1/users", json={"name": "Ada"}).json()["id"]
    key = admin.headers.pop("Authorization")
    admin.get(admin.post(f"/api/v1/users/{user}/link", headers={"Authorization": key}).json()["url"])
    assert admin.get("/api/v1/me").status_code == 200

    assert admin.delete(f"/api/v1/users/{user}", headers={"Authorization": key}).status_code == 204
    assert admin.get("/api/v1/me").status_code == 401


def test_changes_are_listed_the_newest_first_and_by_pages(admin: TestClient) -> None:
    admin.post("/api/v1/projects", json={"name": "vision"})
    admin.post("/api/v1/projects", json={"name": "speech"})
    first = admin.get("/api/v1/audit", params={"limit": 1}).json()
    second = admin.get("/api/v1/audit", params={"limit": 1, "before": first[0]["id"]}).json()

    assert [(each["who"], each["action"], each["subject"], each["project"]) for each in first + second] == [
        ("key owner", "project.create", "speech", "speech"),
        ("key owner", "project.create", "vision", "vision"),
    ]
    assert first[0]["address"] == "testclient"
    assert admin.get("/api/v1/audit", params={"limit": 201}).status_code == 400


def test_the_log_has_every_change_of_people(admin: TestClient) -> None:
    key_of(admin, "ci", {"role": "viewer", "project": "default"})
    admin.delete("/api/v1/keys/ci")
    user = admin.post("/api/v1/users", json={"name": "Ada"}).json()["id"]
    admin.put(f"/api/v1/users/{user}/role", json={"role": "deployer", "may_run_code": True})
    admin.get(admin.post(f"/api/v1/users/{user}/link").json()["url"])
    admin.delete(f"/api/v1/users/{user}")

    found = [(each["action"], each["subject"], each["detail"]) for each in admin.get("/api/v1/audit").json()]
    assert found[-2::-1] == [
        ("key.create", "ci", {"roles": ["viewer in default"]}),
        ("key.revoke", "ci", {}),
        ("user.create", "Ada", {}),
        ("user.role", "Ada", {"project": "*", "role": "deployer everywhere, may run code"}),
        ("user.link", "Ada", {}),
        ("session.begin", "Ada", {}),
        ("user.remove", "Ada", {}),
    ]


def test_somebody_sees_the_changes_of_their_projects(
    admin: TestClient, vision: dict[str, str], platform: Platform
) -> None:
    root = Principal("root", everywhere=ProjectRole.ADMIN)
    with platform.database.transaction() as session:
        audit.record(session, root, "deployment.update", "default/reader", project_id=1)
        audit.record(session, root, "deployment.update", "vision/reader", project_id=2)

    def subjects(**parameters: str) -> list[str]:
        return [each["subject"] for each in admin.get("/api/v1/audit", params=parameters, headers=vision).json()]

    assert subjects() == ["vision/reader", "vision"]
    assert subjects(project="vision") == ["vision/reader", "vision"]
    assert admin.get("/api/v1/audit", params={"project": "default"}, headers=vision).status_code == 403
    assert [e["subject"] for e in admin.get("/api/v1/audit", params={"project": "default"}).json()] == [
        "default/reader"
    ]


def test_a_secret_is_listed_without_its_value_replaced_and_removed(admin: TestClient) -> None:
    place = "/api/v1/projects/default/secrets"
    assert admin.put(f"{place}/hub", json={"value": "s3cret"}).status_code == 204
    assert admin.put(f"{place}/hub", json={"value": "s3cret-2"}).status_code == 204
    assert admin.put(f"{place}/a b", json={"value": "x"}).status_code == 400
    assert admin.put(f"{place}/hub", json={"value": ""}).status_code == 400

    (listed,) = admin.get(place).json()
    assert listed.keys() == {"name", "author", "created"}
    assert "s3cret" not in admin.get("/api/v1/audit").text
    assert admin.delete(f"{place}/hub").status_code == 204
    assert admin.delete(f"{place}/hub").status_code == 404
