"""Clients that hold connections of the platform's HTTP server: half-sent requests, unread responses, silence."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from charonia.platform import serve as connections
from charonia.platform.serve import BoundedProtocol

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """Takes what is written; its client reads only as far as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent_bytes = 0
        self.is_aborted = self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answer when the body is complete."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def connect(state: ServerState) -> tuple[BoundedProtocol, FakeTransport]:
    config = uvicorn.Config(application, http=BoundedProtocol, ws="none", log_config=None, lifespan="off")
    protocol, transport = BoundedProtocol(config, state, {}), FakeTransport()
    protocol.connection_made(transport)
    return protocol, transport


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def run() -> Callable[[Callable[[BoundedProtocol, FakeTransport], Any]], None]:
    def start(scenario: Callable[[BoundedProtocol, FakeTransport], Any]) -> None:
        async def main() -> None:
            await scenario(*connect(ServerState()))

        asyncio.run(main())

    return start


Run = Callable[[Callable[[BoundedProtocol, FakeTransport], Any]], None]


def test_a_header_that_comes_in_drips_ends_with_408(run: Run) -> None:
    async def scenario(protocol: BoundedProtocol, transport: FakeTransport) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\n")
        for now_s in range(0, int(connections.HEADER_TIMEOUT_S) + 1, 5):
            protocol.data_received(b"a: b\r\n")
            protocol.check_time(now_s)
        assert not transport.is_closed

        protocol.check_time(connections.HEADER_TIMEOUT_S + 1)

        assert transport.is_closed
        assert transport.written.startswith(b"HTTP/1.1 408 ")
        written = transport.written
        protocol.check_time(1e6)
        protocol.check_time(2e6)
        assert transport.written == written

    run(scenario)


def test_a_connection_without_a_request_is_closed(run: Run) -> None:
    async def scenario(protocol: BoundedProtocol, transport: FakeTransport) -> None:
        protocol.check_time(0)
        protocol.check_time(connections.IDLE_TIMEOUT_S)
        assert not transport.is_closed

        protocol.check_time(connections.IDLE_TIMEOUT_S + 1)

        assert (transport.is_closed, transport.written) == (True, b"")

    run(scenario)


def test_a_body_that_stops_or_drips_ends_the_connection(run: Run) -> None:
    async def scenario(protocol: BoundedProtocol, transport: FakeTransport) -> None:
        protocol.data_received(HEAD)
        now_s = 0.0
        for _ in range(5):  # fast enough
            protocol.data_received(bytes(connections.BODY_BYTES_MIN))
            await turns()
            now_s += connections.BODY_TIMEOUT_S - 1
            protocol.check_time(now_s)
        assert not transport.is_closed
        for _ in range(3):
            protocol.data_received(b"x")
            await turns()
            now_s += connections.BODY_TIMEOUT_S / 2
            protocol.check_time(now_s)

        assert transport.is_closed
        protocol.connection_lost(None)
        await turns()

    run(scenario)


def test_a_client_that_reads_nothing_is_dropped(run: Run) -> None:
    async def scenario(protocol: BoundedProtocol, transport: FakeTransport) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await turns()
        transport.unsent_bytes = 1000
        protocol.check_time(0)
        transport.unsent_bytes = 999  # it reads, slowly
        protocol.check_time(connections.WRITE_TIMEOUT_S)
        protocol.check_time(2 * connections.WRITE_TIMEOUT_S)
        assert not transport.is_aborted

        protocol.check_time(2 * connections.WRITE_TIMEOUT_S + 1)

        assert transport.is_aborted

    run(scenario)


def test_an_application_may_take_its_time(run: Run) -> None:
    async def scenario(protocol: BoundedProtocol, transport: FakeTransport) -> None:
        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        protocol.app = slow
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await turns()
        for now_s in (0, 1e3, 1e6):
            protocol.check_time(now_s)

        assert not transport.is_closing()

    run(scenario)


async def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)

    state = ServerState()
    *taken, refused = [connect(state)[1] for _ in range(3)]

    assert [transport.is_closed for transport in taken] == [False, False]
    assert refused.is_closed
    assert refused.written.startswith(b"HTTP/1.1 503 ")
