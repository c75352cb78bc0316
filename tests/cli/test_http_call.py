"""Calls over HTTP: redirects and proxies, which a call takes only if it is asked to."""

from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from charonia.http_call import HOPS_MAX, http_call, is_http_url, no_answer_reason, open_call


class Recorder(BaseHTTPRequestHandler):
    """Sends on from /from to /to, and from /loop to itself; refuses tunnels."""

    calls: list[tuple[str, str, dict[str, str]]]

    def do_GET(self) -> None:
        self.calls.append((self.command, self.path, dict(self.headers)))
        places = {"/from": "/to?a=b", "/loop": "/loop"}
        self.send_response(302 if self.path in places else 502 if self.command == "CONNECT" else 200)
        self.send_header("Location", places.get(self.path, "/elsewhere"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_CONNECT = do_GET  # noqa: N815 # the name that the base class looks for

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str, dict[str, str]]]]]:
    """A server's address, and the calls that it has had."""
    calls: list[tuple[str, str, dict[str, str]]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Recorder,), {"calls": calls})) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{listening.server_port}", calls
        listening.shutdown()
        thread.join()


def test_a_redirect_is_followed_on_request_only_and_without_the_headers(
    server: tuple[str, list[tuple[str, str, dict[str, str]]]],
) -> None:
    address, calls = server
    checked = list[str]()

    plain = http_call("GET", f"http://{address}/from", {"Authorization": "secret"}, timeout_s=200)
    with open_call(
        "GET", f"http://{address}/from", {"Authorization": "secret"}, timeout_s=200, check_redirect=checked.append
    ) as answer:
        followed = answer.status
    with open_call("GET", f"http://{address}/loop", timeout_s=200, check_redirect=lambda _: None) as answer:
        looped = answer.status

    assert (plain.status, followed, looped) == (302, 200, 302)
    assert checked == [f"http://{address}/to?a=b"]
    assert [(path, "Authorization" in headers) for _, path, headers in calls[:3]] == [
        ("/from", True),
        ("/from", True),
        ("/to?a=b", False),
    ]
    assert len(calls) == 3 + HOPS_MAX + 1


def test_a_target_that_must_not_be_called_is_not(server: tuple[str, list[tuple[str, str, dict[str, str]]]]) -> None:
    address, calls = server

    def refuse(url: str) -> None:
        raise PermissionError(url)

    with (
        pytest.raises(PermissionError),
        open_call("GET", f"http://{address}/from", timeout_s=200, check_redirect=refuse),
    ):
        pass

    assert [path for _, path, _ in calls] == ["/from"]


@pytest.mark.parametrize(
    ("url", "request_line"),
    [
        ("http://models.example/a?b", ("GET", "http://models.example/a?b")),
        ("https://models.example/a", ("CONNECT", "")),
    ],
)
def test_a_proxy_of_the_environment_makes_a_call_on_request_only(
    monkeypatch: pytest.MonkeyPatch,
    server: tuple[str, list[tuple[str, str, dict[str, str]]]],
    url: str,
    request_line: tuple[str, str],
) -> None:
    address, calls = server
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://user:p%40ss@{address}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    http_call("GET", f"http://{address}/not-through", timeout_s=200, through_proxy=True)
    calls.clear()

    with suppress(OSError):  # the tunnel is refused
        http_call("GET", url, timeout_s=200, through_proxy=True)

    ((method, target, headers),) = calls
    assert (method, target) == (request_line[0], request_line[1] or "models.example:443")
    assert headers["Proxy-Authorization"] == "Basic dXNlcjpwQHNz"


@pytest.mark.parametrize(
    "url", ["host:80", "ftp://host", "http://", "http://host:65536", "http://host:x", "http://[::1"]
)
def test_a_url_that_cannot_be_called_is_refused(url: str) -> None:
    assert is_http_url("https://[::1]:65535/path")
    assert not is_http_url(url)
    with pytest.raises(ValueError, match="expected http://HOST:PORT or https://HOST:PORT, got "):
        http_call("GET", url, timeout_s=1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (TimeoutError("timed out"), "timed out"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_the_reason_of_a_missing_answer_is_a_text_without_a_number(error: Exception, reason: str) -> None:
    assert no_answer_reason(error) == reason
