import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from charonia.platform.app import make_app
from charonia.platform.people import keys, oidc, users
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform

ROOT = Principal("root", everywhere=ProjectRole.ADMIN)


@pytest.fixture
def browser(anybody: TestClient, link: str) -> TestClient:
    anybody.get(f"/login/link?token={link}")
    return anybody


def csrf(platform: Platform, browser: TestClient) -> str:
    with platform.database.reading() as session:
        visitor = users.visitor(session, browser.cookies[users.COOKIE], "")
    assert visitor is not None
    return visitor.csrf


@pytest.mark.parametrize("header", ["Bearer charonia_unknown", "Bearer ", "Basic YTpi"])
def test_another_key_is_refused(header: str, anybody: TestClient) -> None:
    assert anybody.get("/api/v1/projects", headers={"Authorization": header}).status_code == 401


def test_a_wrong_key_is_refused_where_the_browser_is_signed_in(browser: TestClient) -> None:
    assert browser.get("/api/v1/me").status_code == 200
    assert browser.get("/api/v1/me", headers={"Authorization": "Bearer charonia_x"}).status_code == 401


def test_a_key_says_who_calls(admin: TestClient) -> None:
    roles = [{"role": "admin", "project": "", "may_run_code": False}]

    assert admin.get("/api/v1/me").json() == {"name": "key owner", "roles": roles}


def test_a_key_that_has_expired_is_refused(anybody: TestClient, platform: Platform) -> None:
    grants = [Grant(ProjectRole.VIEWER)]
    with platform.database.transaction() as session:
        gone = keys.create(session, ROOT, "gone", grants, expires=time.time() - 1)[1]
        valid = keys.create(session, ROOT, "valid", grants, expires=time.time() + 60)[1]

    assert anybody.get("/api/v1/me", headers={"Authorization": f"Bearer {gone}"}).status_code == 401
    assert anybody.get("/api/v1/me", headers={"Authorization": f"Bearer {valid}"}).status_code == 200


def test_a_link_signs_in_once(anybody: TestClient, link: str) -> None:
    first = anybody.get(f"/login/link?token={link}")
    anybody.cookies.clear()
    second = anybody.get(f"/login/link?token={link}")

    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(first.headers["set-cookie"].split("; "))
    assert (second.status_code, second.headers["location"]) == (303, "/login?problem=link")
    assert "set-cookie" not in second.headers


def test_strangers_keep_nobody_out_where_there_is_no_single_sign_on(anybody: TestClient, link: str) -> None:
    for _ in range(oidc.STARTS_MAX + 10):
        for path in ("/login/sso", "/login/callback?code=a&state=b"):
            assert anybody.get(path).headers["location"].startswith("/login?problem=")
        assert anybody.get("/login/link?token=guess").headers["location"] == "/login?problem=link"

    assert anybody.get(f"/login/link?token={link}").headers["location"] == "/"
    assert anybody.get("/api/v1/me").status_code == 200


def test_a_link_that_has_expired_signs_nobody_in(
    anybody: TestClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "LINK_S", -1.0)
    with platform.database.transaction() as session:
        secret = users.new_link(session, users.owner(session))

    assert anybody.get(f"/login/link?token={secret}").headers["location"] == "/login?problem=link"


def test_a_session_ends_after_its_time(
    anybody: TestClient, link: str, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "SESSION_S", 0.0)
    anybody.get(f"/login/link?token={link}")
    anybody.cookies.set(users.COOKIE, "x")  # Max-Age=0 has removed it

    assert anybody.get("/api/v1/me").status_code == 401


def test_a_browser_reads_without_the_token_and_changes_with_it(browser: TestClient, platform: Platform) -> None:
    token = csrf(platform, browser)

    assert browser.get("/api/v1/projects").status_code == 200
    assert browser.post("/api/v1/projects", json={"name": "vision"}).status_code == 403
    assert browser.post("/api/v1/projects", json={"name": "vision"}, headers={"X-CSRF-Token": "x"}).status_code == 403
    assert browser.post("/api/v1/projects", json={"name": "vision"}, headers={"X-CSRF-Token": token}).status_code == 201


def test_a_form_carries_the_token_in_a_field(browser: TestClient, platform: Platform) -> None:
    token = csrf(platform, browser)

    assert browser.post("/logout", data={"csrf": "x"}).status_code == 403
    assert browser.post("/logout", data={"csrf": token}).headers["location"] == "/login"


def test_who_signs_out_is_out_also_with_the_cookie_of_before(browser: TestClient, platform: Platform) -> None:
    cookie = browser.cookies[users.COOKIE]
    browser.post("/logout", headers={"X-CSRF-Token": csrf(platform, browser)})
    browser.cookies.set(users.COOKIE, cookie)

    assert browser.get("/api/v1/me").status_code == 401


def test_the_token_of_another_session_is_refused(browser: TestClient, platform: Platform) -> None:
    with platform.database.transaction() as session:
        other = users.visitor(session, users.begin_session(session, users.owner(session), ""), "")
    assert other is not None

    response = browser.post("/api/v1/projects", json={"name": "vision"}, headers={"X-CSRF-Token": other.csrf})
    assert response.status_code == 403


def test_a_page_leads_a_browser_to_the_login_page(anybody: TestClient) -> None:
    response = anybody.get("/p/default/models?tag=a", headers={"Accept": "text/html,*/*;q=0.8"})

    assert (response.status_code, response.headers["location"]) == (303, "/login?next=%2Fp%2Fdefault%2Fmodels")


def test_the_database_has_no_secret(admin: TestClient, link: str, platform: Platform) -> None:
    key = admin.headers["Authorization"].removeprefix("Bearer ")
    admin.get(f"/login/link?token={link}")
    secrets = [key, link, admin.cookies[users.COOKIE]]
    files = list(platform.settings.data.glob("platform.sqlite*"))

    assert len(files) == 3  # with the log of changes
    assert [secret for secret in secrets if any(secret.encode() in file.read_bytes() for file in files)] == []


def test_the_key_of_the_folder_is_for_its_owner_and_stays(admin: TestClient, platform: Platform) -> None:
    path = platform.settings.data / "owner.key"
    before = path.read_text()
    with platform.database.transaction() as session:
        prepare_owner(session, platform.settings.data)

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == before


def test_a_name_of_another_site_is_not_the_platform(anybody: TestClient) -> None:
    def status(host: str) -> int:
        return anybody.get("/login", headers={"Host": host}).status_code

    assert [status(host) for host in ("evil.example", "evil.example:8080")] == [403, 403]
    assert [status(host) for host in ("127.0.0.1:8080", "localhost", "[::1]:8080")] == [200, 200, 200]


def test_a_platform_behind_a_proxy_has_the_name_of_its_address(tmp_path: Path) -> None:
    def statuses(host: str, *hosts: str) -> list[int]:
        app = make_app(
            PlatformSettings(tmp_path / host, isolation="available", host=host, public_url="https://models.example.org")
        )
        with TestClient(app, base_url="http://x") as client:
            return [client.get("/login", headers={"Host": host}).status_code for host in hosts]

    assert statuses("127.0.0.1", "models.example.org", "127.0.0.1", "evil.example") == [200, 200, 403]
    assert statuses("0.0.0.0", "models.example.org", "charonia.svc.cluster.local") == [200, 200]
