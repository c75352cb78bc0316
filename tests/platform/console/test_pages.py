"""Pages without a browser: who may see them, what forms answer, how lists are paged and what they cost."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update
from tests.support.platform_models import add_version
from tests.support.statements import in_a_request, noted

from charonia.platform.database.tables import VersionRow
from charonia.platform.people import keys
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.state import Platform

HTML = {"Accept": "text/html"}
HTMX = {"HX-Request": "true"}


@pytest.fixture
def visitor(anybody: TestClient, link: str) -> TestClient:
    """A browser that has signed in; its changes carry the token."""
    anybody.get(f"/login/link?token={link}")
    anybody.headers |= HTML
    token = re.search(r'name="csrf-token" content="([^"]+)"', anybody.get("/p/default/people").text)
    assert token is not None
    anybody.headers["X-CSRF-Token"] = token[1]
    return anybody


def test_a_stranger_is_led_to_the_page_to_sign_in_and_back(anybody: TestClient) -> None:
    answer = anybody.get("/p/default/models", headers=HTML)

    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=%2Fp%2Fdefault%2Fmodels"


def test_a_part_of_a_page_that_asks_without_a_session_gets_401(anybody: TestClient) -> None:
    assert anybody.get("/p/default/models", headers=HTML | HTMX).status_code == 401


def test_a_change_without_the_token_is_refused(visitor: TestClient) -> None:
    del visitor.headers["X-CSRF-Token"]

    assert visitor.post("/p/default/people/keys", data={"name": "ci", "role": "admin"}).status_code == 403


def test_who_may_only_look_gets_no_buttons_and_no_changes(anybody: TestClient, platform: Platform, link: str) -> None:
    root = Principal("root", everywhere=ProjectRole.ADMIN)
    with platform.database.transaction() as session:
        _, secret = keys.create(session, root, "viewer", [Grant(ProjectRole.VIEWER, "default")])
    anybody.headers |= HTML | {"Authorization": f"Bearer {secret}"}

    assert "Add a model" not in anybody.get("/p/default/models").text
    assert "/p/default/models/add" not in anybody.get("/p/default/jobs").text
    assert "Only administrators see keys." in anybody.get("/p/default/people").text
    for form in ("models/add", "environments/new", "deployments/new", "deployments/reader/change"):
        assert anybody.get(f"/p/default/{form}").status_code == 403
    assert anybody.post("/p/default/environments", data={"name": "onnx"}, headers=HTMX).status_code == 403
    assert anybody.get("/p/other/models").status_code == 403


def test_what_is_missing_has_a_page_that_says_so(visitor: TestClient) -> None:
    answer = visitor.get("/p/default/models/nothing")

    assert answer.status_code == 404
    assert "model &#39;nothing&#39; does not exist" in answer.text
    assert 'aria-label="Platform"' in answer.text  # the navigation stays


@pytest.mark.parametrize("address", ["/nothing", "/p/default/nothing", "/p/nothing/models", "/p/default/jobs/x/y"])
def test_an_unknown_address_keeps_the_navigation_or_leads_to_the_page_to_sign_in(
    visitor: TestClient, address: str
) -> None:
    answer = visitor.get(address)

    assert answer.status_code == 404
    assert 'aria-label="Platform"' in answer.text
    assert 'href="/p/default/deployments"' in answer.text
    assert f"There is no page at {address}" in answer.text or address == "/p/nothing/models"
    visitor.cookies.clear()
    assert visitor.get(address).headers["location"].startswith("/login?next=%2F")


def test_lists_are_sorted_by_the_address_which_keeps_the_filters(visitor: TestClient, platform: Platform) -> None:
    for name in ("ab", "abc", "abc", "b"):
        add_version(platform.database, platform.settings.data, name, {"1/model.onnx": b"x"})

    text = visitor.get("/p/default/models?search=ab&sort=-versions").text

    assert re.findall(r'class="name" href="/p/default/models/(\w+)"', text) == ["abc", "ab"]
    assert "?search=ab&amp;sort=name" in text
    assert 'aria-sort="descending"' in text


def test_the_readme_of_a_version_is_its_card_and_versions_are_compared(visitor: TestClient, platform: Platform) -> None:
    for number in range(3):
        files = {"1/model.onnx": b"x" * (number + 1), "README.md": b"---\nlicense: mit\n---\n# Digits\n<b>"}
        add_version(platform.database, platform.settings.data, "digits", files)

    text = visitor.get("/p/default/models/digits?against=1").text

    assert "<pre># Digits\n&lt;b&gt;</pre>" in text
    assert "Changes since version 1" in text
    assert '<option value="/p/default/models/digits/versions/3?against=2">' in text


def test_pages_models_and_calls_of_the_api_are_found(visitor: TestClient, platform: Platform) -> None:
    add_version(platform.database, platform.settings.data, "letters", {"1/model.onnx": b"x"})

    assert 'href="/p/default/models/letters"' in visitor.get("/p/default/find?search=lett").text
    assert 'href="/p/default/jobs"' in visitor.get("/p/default/find?search=job").text
    text = visitor.get("/p/default/api").text
    assert "/<wbr>deployments/<wbr>{" in text
    assert "curl -H &#39;Authorization: Bearer KEY&#39;" in text


def test_a_part_of_a_page_is_sent_alone(visitor: TestClient) -> None:
    part = visitor.get("/p/default/environments", headers=HTMX | {"HX-Target": "list"}).text

    assert part.lstrip().startswith('<div id="list"')
    assert "<html" not in part


@pytest.mark.parametrize(
    ("path", "wrong", "place"),
    [
        ("environments", {"name": "a b"}, 'id="name-problem"'),
        ("environments", {"python": "2.7"}, 'id="python-problem"'),
        ("environments", {"requirements": "pillow\n-r other.txt"}, 'id="requirements-problem"'),
        ("environments", {"requirements": "# pillow\n# /// script"}, 'id="requirements-problem"'),
        ("models/add", {"from": "git", "source": "https://g.example/pillow.git", "name": "a b"}, 'id="name-problem"'),
        ("models/add", {"from": "git", "source": "https://pillow"}, 'id="source-problem"'),
        ("models/branches", {"place": "https://g.example/pillow.git", "every_s": "often"}, 'role="alert"'),
        ("models/branches", {"place": "https://g.example/pillow.git", "every_s": "3"}, 'role="alert"'),
    ],
)
def test_a_form_comes_back_with_what_is_wrong_at_its_field(
    visitor: TestClient, path: str, wrong: dict[str, str], place: str
) -> None:
    form = {"name": "a", "python": "", "requirements": "pillow\n", "imports": ""} | wrong
    answer = visitor.post(f"/p/default/{path}", data=form, headers=HTMX)

    assert answer.status_code == 422
    assert place in answer.text
    assert "pillow" in answer.text


def test_text_of_people_is_text(visitor: TestClient, platform: Platform, tmp_path: Path) -> None:
    add_version(platform.database, platform.settings.data, "evil", {"1/model.onnx": b"x"})
    description = {"description": "<script>alert(1)</script>", "owner": "", "tags": "<b>", "links": "", "notes": ""}
    visitor.post("/p/default/models/evil/versions/1/about", data=description, headers=HTMX)

    text = visitor.get("/p/default/models").text + visitor.get("/p/default/models/evil").text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_a_version_with_warnings_says_so_beside_its_number(visitor: TestClient, platform: Platform) -> None:
    add_version(platform.database, platform.settings.data, "words", {"1/model.onnx": b"x"})
    assert '<span class="badge good">ready</span>' in visitor.get("/p/default/models/words").text

    with platform.database.transaction() as session:
        session.execute(update(VersionRow).values(report={"warnings": ["it does not load on this machine"]}))

    assert '<span class="badge wait">ready, with warnings</span>' in visitor.get("/p/default/models/words").text


def test_only_calls_of_the_form_to_try_a_model_are_passed_on(visitor: TestClient) -> None:
    for path in ("v2/repository/models/x/load", "metrics", "v2/models/../../x/infer/y", "v2/models/x/config"):
        assert visitor.post(f"/p/default/deployments/reader/server/{path}").status_code == 404


def test_a_long_list_is_paged_and_costs_no_more_than_a_short_one(visitor: TestClient, platform: Platform) -> None:
    for number in range(120):
        add_version(platform.database, platform.settings.data, f"model-{number:04d}", {"1/model.onnx": b"x"})
    with noted(platform.database.engine, in_a_request) as first_statements:
        first = visitor.get("/p/default/models").text
    with noted(platform.database.engine, in_a_request) as second_statements:
        second = visitor.get("/p/default/models?offset=100").text

    assert first.count('class="name"') == 50
    assert second.count('class="name"') == 20
    assert "offset=50" in first
    assert 0 < len(first_statements) == len(second_statements)
