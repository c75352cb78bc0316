"""Requests of web pages: which sites may send them, and for which hosts."""

import asyncio

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response

from charonia.server.endpoints import allowed_hosts
from charonia.server.facade import Services
from charonia.server.http.asgi import Message, begin
from charonia.server.http.frontend import HttpFrontend, HttpLimits, MetricsFrontend
from charonia.server.options import HttpOptions, ServerOptions

PREFLIGHT = (
    "OPTIONS /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nOrigin: {}\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: content-type, authorization\r\n\r\n"
)
LIVE = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\nOrigin: {}\r\n\r\n"


def answer(request: str, *origins: str, hosts: tuple[str, ...] | None = None) -> Response:
    async def ask() -> Response:
        services = Services(cors_origins=origins, allowed_hosts=hosts)
        frontend = HttpFrontend(FakeEngine(), HttpLimits(), services=services)
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


INFER = "/v2/models/m/infer"  # answered at once
CHANGES = [
    *(
        "/v2/repository/index",
        "/v2/repository/models/m/load",
        "/v2/repository/models/m/unload",
        "/v2/models/m/traffic",
        "/v2/trace/setting",
    ),
    *("/v2/logging", "/v2/systemsharedmemory/region/r/register", "/v2/systemsharedmemory/unregister"),
    *("/v2/models/m/infer", "/v2/models/m/generate", "/v1/chat/completions", "/v1/embeddings", "/samples/m"),
]


def change(path: str, *fields: str, host: str = "127.0.0.1:8000") -> str:
    lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: text/plain", "Content-Length: 2", *fields)
    return "\r\n".join(lines) + "\r\n\r\n{}"


def is_refused(response: Response) -> bool:
    return response.status == 403 and b"are not allowed" in response.body


@pytest.mark.parametrize("path", CHANGES)
def test_a_page_of_another_site_changes_nothing(path: str) -> None:
    assert is_refused(answer(change(path, "Origin: https://evil.example", "Sec-Fetch-Site: cross-site")))
    assert is_refused(answer(change(path, "Sec-Fetch-Site: cross-site")))
    assert is_refused(answer(change(path, "Origin: https://evil.example")))
    assert is_refused(answer(change(path, "Origin: null")))


def test_nor_does_a_page_of_another_port_of_the_same_machine() -> None:
    port = ("Origin: http://127.0.0.1:3000", "Sec-Fetch-Site: same-site")

    assert is_refused(answer(change(INFER, *port)))
    assert is_refused(answer(change(INFER, port[0])))
    assert not is_refused(answer(change(INFER, *port), "http://127.0.0.1:3000"))
    assert not is_refused(answer(change(INFER, *port), "*"))


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("Origin: http://127.0.0.1:8000", "Sec-Fetch-Site: same-origin"),
        ("Origin: http://127.0.0.1:8000",),
        ("Sec-Fetch-Site: none",),
        # Behind a proxy that names its upstream in `Host`.
        ("Origin: https://models.example.org", "Sec-Fetch-Site: same-origin"),
        ("Origin: http://models.example.org", "X-Forwarded-Host: models.example.org"),
    ],
)
def test_programs_and_the_servers_own_page_are_answered(fields: tuple[str, ...]) -> None:
    assert not is_refused(answer(change(INFER, *fields)))


def test_a_page_of_another_site_may_read_what_the_browser_lets_it_read() -> None:
    response = answer(LIVE.format("https://evil.example"))

    assert response.status == 200
    assert "access-control-allow-origin" not in response.headers


def test_the_refusal_names_the_page_and_the_option() -> None:
    body = answer(change(INFER, "Origin: https://evil.example")).body.decode()

    assert "requests of web pages of 'https://evil.example' are not allowed" in body
    assert "--cors-origins" in body


@pytest.mark.parametrize(
    ("host", "allowed", "is_answered"),
    [
        ("evil.example:8000", (), False),
        ("evil.example", ("models.example.org",), False),
        ("localhost.evil.example", (), False),
        ("127.0.0.1.evil.example", (), False),
        ("models.example.org:8000", ("models.example.org",), True),
        ("Models.Example.org.", ("models.example.org",), True),
        ("evil.example", ("*",), True),
        ("evil.example", None, True),
        ("localhost:8000", (), True),
        ("LOCALHOST", (), True),
        ("127.0.0.1:8000", (), True),
        ("[::1]:8000", (), True),
        ("10.1.2.3", (), True),
        ("gpu-box:8000", (), True),
        ("host.docker.internal:8000", (), True),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_of_another_site_is_not_this_server(
    host: str, allowed: tuple[str, ...] | None, is_answered: bool, method: str
) -> None:
    own_page = f"Origin: http://{host}"  # a site whose name has this server's address
    request = change(INFER, own_page, host=host) if method == "POST" else f"GET /v2 HTTP/1.1\r\nHost: {host}\r\n\r\n"

    assert is_refused(answer(request, hosts=allowed)) != is_answered


def test_a_host_is_checked_in_each_request_of_a_connection() -> None:
    async def ask() -> list[Response]:
        client = MemoryClient(HttpFrontend(FakeEngine(), HttpLimits(), services=Services(allowed_hosts=())))
        hosts = ("localhost", "evil.example", "localhost", "evil.example")
        return [client.send(change(INFER, host=host).encode())[-1] for host in hosts]

    assert [is_refused(response) for response in asyncio.run(ask())] == [False, True, False, True]


def test_openai_paths_refuse_in_their_own_form() -> None:
    response = answer(change("/v1/chat/completions", "Origin: https://evil.example"))

    assert response.status == 403
    assert b'"type"' in response.body


def test_each_request_of_a_page_is_judged_and_those_of_programs_besides_are_not() -> None:
    async def ask() -> list[Response]:
        client = MemoryClient(HttpFrontend(FakeEngine(), HttpLimits()))
        page = change(INFER, "Origin: https://evil.example")
        return [client.send(request.encode())[-1] for request in (page, page, change(INFER), change(INFER), page)]

    assert [is_refused(response) for response in asyncio.run(ask())] == [True, True, False, False, True]


async def test_requests_through_another_server_are_judged_too() -> None:
    messages: list[Message] = []

    headers = [(b"host", b"127.0.0.1:8000"), (b"origin", b"https://evil.example")]
    scope = {"method": "POST", "raw_path": INFER.encode(), "query_string": b"", "headers": headers}
    begin(HttpFrontend(FakeEngine(), HttpLimits()), scope, b"{}", messages.extend)

    assert messages[0]["status"] == 403


def test_the_metrics_page_is_for_hosts_of_this_machine_where_it_listens_there() -> None:
    async def collect() -> None:
        return None

    async def ask() -> Response:
        client = MemoryClient(MetricsFrontend(lambda: b"up 1\n", collect, allowed_hosts=()))
        return client.send(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")[-1]

    assert is_refused(asyncio.run(ask()))


@pytest.mark.parametrize(
    ("address", "given", "has_keys", "hosts"),
    [
        ("127.0.0.1", (), False, ()),
        ("127.0.0.1", (), True, None),
        ("127.0.0.1", ("a.example",), True, ("a.example",)),
        ("0.0.0.0", (), False, None),
        ("0.0.0.0", ("a.example",), False, ("a.example",)),
    ],
)
def test_hosts_are_checked_on_the_loopback_interface_without_keys_or_where_they_are_given(
    address: str, given: tuple[str, ...], has_keys: bool, hosts: tuple[str, ...] | None
) -> None:
    options = ServerOptions(http=HttpOptions(allowed_hosts=given))

    assert allowed_hosts(options, address, has_keys=has_keys) == hosts
