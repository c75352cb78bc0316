"""The client of the platform's API: changes whose answers are lost."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from charonia.core.errors import ServingError
from charonia.platform import api_client
from charonia.platform.api_client import CHANGE_TRIES_MAX, PlatformClient, PlatformUnreachableError


class Scripted(HTTPServer):
    """A platform that answers calls as it is told, in their order."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.body = b'{"name": "a"}'
        self.keys: list[str | None] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def client(self) -> PlatformClient:
        return PlatformClient(f"http://127.0.0.1:{self.server_port}", "key")


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:  # the name that the library calls
        self.server.keys.append(self.headers["Idempotency-Key"])
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, headers = self.server.answers.pop(0)
        if not status:
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        body = b'{"error": "no"}' if status >= 300 else self.server.body
        if "Content-Type" not in headers:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(api_client, "PAUSE_S", 0.0)
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_change_whose_answer_is_lost_is_sent_again_with_its_key(scripted: Scripted) -> None:
    scripted.answers = [(0, {}), (503, {"Retry-After": "1"}), (201, {})]

    assert scripted.client.call("POST", "/api/v1/projects", {"name": "a"}) == {"name": "a"}
    assert len(scripted.keys) == 3
    assert len(set(scripted.keys)) == 1
    assert scripted.keys[0]


def test_each_change_has_its_own_key(scripted: Scripted) -> None:
    scripted.answers = [(201, {}), (201, {})]
    for _ in range(2):
        scripted.client.call("POST", "/api/v1/projects", {"name": "a"})

    assert len(set(scripted.keys)) == 2


def test_after_some_lost_answers_the_platform_is_away(scripted: Scripted) -> None:
    scripted.answers = [(0, {})] * CHANGE_TRIES_MAX

    with pytest.raises(PlatformUnreachableError):
        scripted.client.call("POST", "/api/v1/projects", {"name": "a"})
    assert scripted.answers == []


def test_a_refusal_is_final(scripted: Scripted) -> None:
    scripted.answers = [(503, {})]

    with pytest.raises(ServingError, match="no"):
        scripted.client.call("POST", "/api/v1/projects", {"name": "a"})


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("PUT", b"piece")])
def test_what_is_no_change_has_no_key_and_is_sent_once(method: str, body: bytes | None, scripted: Scripted) -> None:
    scripted.answers = [(0, {})]

    with pytest.raises(PlatformUnreachableError):
        scripted.client.call(method, "/api/v1/projects", body)
    assert scripted.keys == [None]


@pytest.mark.parametrize(("kind", "body"), [("text/html", b"<html>"), ("application/json", b'{"name":')])
def test_an_answer_of_another_server_is_an_error_with_its_address(kind: str, body: bytes, scripted: Scripted) -> None:
    scripted.answers, scripted.body = [(200, {"Content-Type": kind})], body

    with pytest.raises(ServingError, match="answers 200 OK: is it charonia platform"):
        scripted.client.call("GET", "/api/v1/projects")


def test_files_of_tasks_in_html_are_texts(scripted: Scripted) -> None:
    scripted.answers, scripted.body = [(200, {"Content-Type": "text/html"})], b"<html>"

    assert scripted.client.call("GET", "/api/v1/tasks/1/files/report.html") == "<html>"
