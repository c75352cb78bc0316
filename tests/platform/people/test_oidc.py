import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import pytest
from fastapi.testclient import TestClient
from joserfc.jwk import KeySet, OctKey, RSAKey
from tests.platform.people.oidc_provider import CLIENT, SECRET, OidcProvider

from charonia.core.errors import ServingError, unavailable
from charonia.platform.app import make_app
from charonia.platform.people import login, oidc
from charonia.platform.settings import Oidc, PlatformSettings

HOME = "http://127.0.0.1:8080"


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with OidcProvider() as found:
        yield found


@pytest.fixture
def browser(tmp_path: Path, provider: OidcProvider) -> Iterator[TestClient]:
    sso = Oidc(provider.issuer, CLIENT, SECRET, admins=("Ada@example.org",))
    with TestClient(
        make_app(PlatformSettings(tmp_path, isolation="available", oidc=sso)), base_url=HOME, follow_redirects=False
    ) as client:
        yield client


def at_provider(address: str) -> str:
    """Go to the provider as a browser does, and return where it leads back to."""

    class Stay(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None: ...

    with pytest.raises(HTTPError) as raised:
        build_opener(Stay).open(address)
    with raised.value as answer:
        return str(answer.headers["Location"])


def sign_in(browser: TestClient, next: str = "/p/default/models") -> str:
    """Sign in, and return where the browser ends."""
    sent = browser.get("/login/sso", params={"next": next})
    return browser.get(at_provider(sent.headers["location"])).headers["location"]


def test_somebody_whom_the_provider_names_is_signed_in(browser: TestClient) -> None:
    assert sign_in(browser) == "/p/default/models"
    assert browser.get("/api/v1/me").json() == {
        "name": "Ada Lovelace <ada@example.org>",
        "roles": [{"role": "admin", "project": "", "may_run_code": False}],
    }


def test_the_provider_gets_state_nonce_and_the_hash_of_the_verifier(
    browser: TestClient, provider: OidcProvider
) -> None:
    first = parse_qs(urlsplit(browser.get("/login/sso").headers["location"]).query)
    second = parse_qs(urlsplit(browser.get("/login/sso").headers["location"]).query)

    assert first["code_challenge_method"] == ["S256"]
    assert first["redirect_uri"] == [f"{HOME}/login/callback"]
    assert all(
        len(first[name][0]) >= 43 and first[name] != second[name] for name in ("state", "nonce", "code_challenge")
    )
    assert "code_verifier" not in first


def test_the_same_person_is_the_same_user_by_the_name_of_today(browser: TestClient, provider: OidcProvider) -> None:
    sign_in(browser)
    provider.claims = {"name": "Ada King"}
    sign_in(browser)

    found = [user["name"] for user in browser.get("/api/v1/users").json() if user["issuer"] == provider.issuer]
    assert found == ["Ada King"]


@pytest.mark.parametrize(
    "claims", [{"email_verified": False}, {"email_verified": None}, {"email_verified": "true"}, {"email": None}]
)
def test_an_email_that_is_not_verified_makes_no_administrator(
    claims: dict[str, object], browser: TestClient, provider: OidcProvider
) -> None:
    provider.claims = claims
    sign_in(browser)

    assert browser.get("/api/v1/me").json() == {"name": "Ada Lovelace (42)", "roles": []}


THIN = {"name": None, "email": None, "email_verified": None}
"""An ID token as OpenID Connect 5.4 has it: who somebody is, and nothing else."""


def test_a_provider_that_has_the_address_elsewhere_is_asked_for_it(browser: TestClient, provider: OidcProvider) -> None:
    provider.claims = THIN
    provider.userinfo = {"sub": "42", "name": "Ada L.", "email": "ada@example.org", "email_verified": True}
    sign_in(browser)

    assert browser.get("/api/v1/me").json() == {
        "name": "Ada L. <ada@example.org>",
        "roles": [{"role": "admin", "project": "", "may_run_code": False}],
    }


def test_what_the_provider_says_of_somebody_else_does_not_count(
    browser: TestClient, provider: OidcProvider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.claims = THIN
    provider.userinfo = {"sub": "43", "email": "ada@example.org", "email_verified": True}

    assert sign_in(browser) == "/login?problem=refused"
    assert "not about the user of its token" in caplog.text


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        pytest.param({"nonce": "another"}, "Invalid claim: 'nonce'", id="wrong-nonce"),
        pytest.param({"nonce": None}, "Missing claim: 'nonce'", id="no-nonce"),
        pytest.param({"exp": int(time.time()) - 3600}, "The token is expired", id="expired"),
        pytest.param({"exp": None}, "Missing claim: 'exp'", id="never-expires"),
        pytest.param({"iss": "https://elsewhere.example"}, "Invalid claim: 'iss'", id="wrong-issuer"),
        pytest.param({"aud": "another"}, "Invalid claim: 'aud'", id="for-another"),
        pytest.param({"sub": None}, "Missing claim: 'sub'", id="nobody"),
        pytest.param({"at_hash": "AAAA"}, "Invalid claim: 'at_hash'", id="another-access-token"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(
    claims: dict[str, object],
    reason: str,
    browser: TestClient,
    provider: OidcProvider,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider.claims = claims

    assert sign_in(browser) == "/login?problem=refused"
    assert reason in caplog.text
    assert browser.get("/api/v1/me").status_code == 401


def test_a_token_that_somebody_else_signed_is_refused(
    browser: TestClient, provider: OidcProvider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "1"}, private=True)

    assert sign_in(browser) == "/login?problem=refused"
    assert "bad_signature" in caplog.text


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_a_token_that_anybody_can_sign_is_refused(
    algorithm: str, browser: TestClient, provider: OidcProvider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.algorithm = algorithm
    provider.signing_key = OctKey.import_key("published by mistake, or known to others", {"kid": "1"})
    provider.keys = KeySet([provider.signing_key])

    assert sign_in(browser) == "/login?problem=refused"
    assert f"Algorithm of '{algorithm}' is not allowed" in caplog.text


def test_new_keys_of_the_provider_are_read(browser: TestClient, provider: OidcProvider) -> None:
    sign_in(browser)
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "2"}, private=True)
    provider.keys = KeySet([provider.signing_key])
    provider.key_id = "2"

    assert sign_in(browser) == "/p/default/models"


def test_a_browser_that_was_not_sent_is_refused(browser: TestClient) -> None:
    back = at_provider(browser.get("/login/sso").headers["location"])
    browser.cookies.clear()

    assert browser.get(back).headers["location"] == "/login?problem=refused"


def test_another_state_is_refused(browser: TestClient) -> None:
    back = at_provider(browser.get("/login/sso").headers["location"])

    assert browser.get(back.replace("state=", "state=x")).headers["location"] == "/login?problem=refused"


def test_a_browser_comes_back_once(browser: TestClient) -> None:
    back = at_provider(browser.get("/login/sso").headers["location"])
    cookie = browser.cookies[login.SIGN_IN_COOKIE]
    assert browser.get(back).headers["location"] == "/"
    browser.cookies.clear()
    browser.cookies.set(login.SIGN_IN_COOKIE, cookie)

    assert browser.get(back).headers["location"] == "/login?problem=refused"


def test_a_browser_that_comes_back_too_late_is_refused(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(oidc, "now", lambda: 0.0)
    back = at_provider(browser.get("/login/sso").headers["location"])
    monkeypatch.undo()

    assert browser.get(back).headers["location"] == "/login?problem=refused"
    assert "or too long ago" in caplog.text


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_cookie_that_somebody_has_changed_is_refused(
    part: int, browser: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    back = at_provider(browser.get("/login/sso").headers["location"])
    parts = browser.cookies[login.SIGN_IN_COOKIE].split(".")
    parts[part] = parts[part][:-2] + ("AA" if parts[part][-2:] != "AA" else "BB")
    browser.cookies.clear()
    browser.cookies.set(login.SIGN_IN_COOKIE, ".".join(parts))

    assert browser.get(back).headers["location"] == "/login?problem=refused"
    assert "did not start this sign-in" in caplog.text


def test_a_cookie_without_a_signature_is_refused(browser: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    claims = {"state": "s", "nonce": "n", "verifier": "v", "next": "/", "exp": 2**40}
    parts = [urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "none"}, claims)]
    browser.cookies.set(login.SIGN_IN_COOKIE, ".".join([*parts, ""]))

    back = browser.get("/login/callback", params={"code": "c", "state": "s"})

    assert back.headers["location"] == "/login?problem=refused"
    assert "did not start this sign-in" in caplog.text


def test_a_code_of_another_browser_is_refused(browser: TestClient) -> None:
    stolen = at_provider(browser.get("/login/sso").headers["location"])
    own = at_provider(browser.get("/login/sso").headers["location"])
    state = parse_qs(urlsplit(own).query)["state"][0]

    code = parse_qs(urlsplit(stolen).query)["code"][0]
    back = browser.get("/login/callback", params={"code": code, "state": state})
    assert back.headers["location"] == "/login?problem=refused"


def test_who_refuses_at_the_provider_is_told(browser: TestClient) -> None:
    sent = parse_qs(urlsplit(browser.get("/login/sso").headers["location"]).query)
    back = browser.get("/login/callback", params={"error": "access_denied", "state": sent["state"][0]})

    assert back.headers["location"] == "/login?problem=refused"


def test_a_provider_that_is_away_is_named_so(tmp_path: Path) -> None:
    away = Oidc("http://127.0.0.1:9", CLIENT, SECRET)
    with TestClient(
        make_app(PlatformSettings(tmp_path, isolation="available", oidc=away)), base_url=HOME, follow_redirects=False
    ) as browser:
        assert browser.get("/login/sso").headers["location"] == "/login?problem=provider"


def test_a_provider_that_is_away_is_not_called_for_every_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise unavailable("away")

    found = oidc.Provider(Oidc("http://127.0.0.1:9", CLIENT, SECRET), HOME)
    monkeypatch.setattr(found, "_read", fail)
    for _ in range(3):
        with pytest.raises(ServingError, match="away"):
            found.send("10.0.0.1", "/")

    assert calls == 1


def test_sign_ins_of_many_strangers_keep_nobody_out(browser: TestClient) -> None:
    """The platform stores nothing for them, so any number may be at the provider."""
    strangers = [browser.get("/login/sso").headers["location"] for _ in range(oidc.STARTS_MAX)]
    provider = browser.app.state.platform.provider  # type: ignore[attr-defined]

    assert not any(address.startswith("/login") for address in strangers)
    assert browser.get("/login/sso").headers["location"] == "/login?problem=provider"
    assert all(provider.send(f"10.0.{n // 256}.{n % 256}", "/") for n in range(1500))


def test_an_address_starts_a_bounded_number_of_sign_ins_in_a_window() -> None:
    clock = [0.0]
    limit = oidc.AddressLimit(lambda: clock[0])

    assert [limit.take("10.0.0.1") for _ in range(oidc.STARTS_MAX + 1)] == [True] * oidc.STARTS_MAX + [False]
    assert limit.take("10.0.0.2")
    clock[0] = oidc.WINDOW_S
    assert limit.take("10.0.0.1")


def test_addresses_of_one_ipv6_network_share_a_limit() -> None:
    limit = oidc.AddressLimit(lambda: 0.0)

    assert all(limit.take(f"2001:db8::{n:x}") for n in range(oidc.STARTS_MAX))
    assert not limit.take("2001:db8::ffff")
    assert limit.take("2001:db8:0:1::1")


def test_addresses_past_the_bound_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "ADDRESSES_MAX", 1)
    limit = oidc.AddressLimit(lambda: 0.0)
    limit.take("10.0.0.1")

    assert all(limit.take("10.0.0.2") for _ in range(2 * oidc.STARTS_MAX))


@pytest.mark.parametrize(
    "next", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)", ""]
)
def test_nobody_is_led_elsewhere(next: str, browser: TestClient) -> None:
    assert sign_in(browser, next) == "/"
