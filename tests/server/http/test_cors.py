"""Requests of pages of other sites."""

import asyncio

from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response

from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

PREFLIGHT = (
    "OPTIONS /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nOrigin: {}\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: content-type, authorization\r\n\r\n"
)
LIVE = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\nOrigin: {}\r\n\r\n"


def answer(request: str, *origins: str) -> Response:
    async def ask() -> Response:
        frontend = HttpFrontend(FakeEngine(), HttpLimits(), services=Services(cors_origins=origins))
        client = MemoryClient(frontend)
        (response,) = client.send(request.encode())
        return response

    return asyncio.run(ask())


def test_a_page_of_an_allowed_site_may_read_the_response() -> None:
    response = answer(LIVE.format("https://a.org"), "https://a.org", "https://b.org")

    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == "https://a.org"
    assert response.headers["vary"] == "Origin"


def test_any_site_may_be_allowed() -> None:
    assert answer(LIVE.format("https://c.org"), "*").headers["access-control-allow-origin"] == "*"


def test_other_sites_get_no_permission() -> None:
    assert "access-control-allow-origin" not in answer(LIVE.format("https://c.org"), "https://a.org").headers
    assert "access-control-allow-origin" not in answer(LIVE.format("https://c.org")).headers


def test_browsers_ask_before_a_request_and_an_error_can_be_read_too() -> None:
    response = answer(PREFLIGHT.format("https://a.org"), "https://a.org")

    assert response.status == 200
    assert response.headers["access-control-allow-methods"] == "POST"
    assert response.headers["access-control-allow-headers"] == "content-type, authorization"
    missing = answer(LIVE.replace("/v2/health/live", "/nothing").format("https://a.org"), "https://a.org")
    assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, "https://a.org")


def test_a_site_that_is_not_allowed_gets_no_answer_to_its_question() -> None:
    assert answer(PREFLIGHT.format("https://c.org"), "https://a.org").status == 405
