"""Runs the platform: the folder, the socket, the server, and limits on the resources that clients can hold."""

import gc
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from sqlalchemy import delete, select
from sqlalchemy.orm import Session
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from charonia.core.errors import invalid
from charonia.platform.app import make_app
from charonia.platform.data_folder import KEY_FILE, announce, claim, write_private
from charonia.platform.database.tables import KeyRow
from charonia.platform.people import keys, login, projects, users
from charonia.platform.people.access import Grant, Principal, ProjectRole, digest_of
from charonia.platform.settings import PlatformSettings

FINISH_S = 5
"""Time that calls in progress have when the platform exits."""


def serve(settings: PlatformSettings) -> None:
    """Run a platform until SIGTERM or SIGINT, and print a link that signs its owner in."""
    is_shared = settings.database.startswith("postgresql")
    with claim(settings.data, is_shared=is_shared), _listening(settings) as listener:
        settings = replace(settings, port=listener.getsockname()[1])
        app = make_app(settings)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=bool(settings.public_url),
            server_header=False,
            timeout_keep_alive=int(IDLE_TIMEOUT_S),
            timeout_graceful_shutdown=FINISH_S,
        )
        server = BoundedServer(config)

        def end(number: int, frame: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # before and after it handles them itself
            signal.signal(number, end)
        with app.state.platform.database.transaction() as session:
            secret = prepare_owner(session, settings.data)
        if is_shared:
            app.state.platform.lease.on_taken.append(lambda: announce(settings.data, settings.local_url))
        else:
            announce(settings.data, settings.local_url)
        print(f"Charonia platform at {settings.url}, data in {settings.data}")
        print(f"To sign in, open this once: {login.link(settings, secret)}", flush=True)
        gc.collect()
        gc.freeze()  # a collection of the objects that all calls share takes longer than most pages
        server.run(sockets=[listener])


KEY_NAME = "owner"


def prepare_owner(session: Session, data: Path) -> str:
    """Create the initial records where they are missing, and return the secret of a link for the owner.

    The key in the data folder is kept as long as the platform knows it.
    """
    projects.ensure_default(session)
    path = data / KEY_FILE
    secret = path.read_text().strip() if path.exists() else ""
    if not secret or session.scalar(select(KeyRow.id).where(KeyRow.digest == digest_of(secret))) is None:
        session.execute(delete(KeyRow).where(KeyRow.name == KEY_NAME))
        platform = Principal("platform", everywhere=ProjectRole.ADMIN)
        write_private(path, keys.create(session, platform, KEY_NAME, [Grant(ProjectRole.ADMIN)])[1] + "\n")
    return users.new_link(session, users.owner(session))


def _listening(settings: PlatformSettings) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise invalid(f"--host: '{settings.host}' cannot be used: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise invalid(
            f"port {settings.port} of {settings.host} cannot be used: {error.strerror}", hint="choose one with --port"
        ) from None
    return listener


CONNECTIONS_MAX = 500
"""Open connections; another one gets 503 and is closed."""

HEADER_TIMEOUT_S = 30.0
"""Time from a request's first byte to the end of its header."""

BODY_TIMEOUT_S = 60.0
"""Time in which `BODY_BYTES_MIN` of a body must arrive."""

BODY_BYTES_MIN = 4096

WRITE_TIMEOUT_S = 60.0
"""Time in which a client reads nothing of a waiting response."""

IDLE_TIMEOUT_S = 10.0
"""Time without a request on a connection."""

SWEEP_TICKS = 10
"""Ticks of the server, of 0.1 s, between two checks of all connections."""

_LIMITS_S = {"header": HEADER_TIMEOUT_S, "body": BODY_TIMEOUT_S, "write": WRITE_TIMEOUT_S, "idle": IDLE_TIMEOUT_S}


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client lets the server wait for too long."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._received_bytes = 0
        self._answered_bytes = 0
        self._state: tuple[str, object] = ("", None)
        self._since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """Refuse a connection beyond the limit."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._end("503 Service Unavailable")

    def data_received(self, data: bytes) -> None:
        """Count received bytes."""
        self._received_bytes += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._answered_bytes = self._received_bytes
        super().on_response_complete()

    def check_time(self, now_s: float) -> None:
        """Close the connection if its client is too slow.

        Args:
            now_s: A monotonic clock, in seconds.
        """
        state = self._waiting()
        if state != self._state:
            self._state, self._since_s = state, now_s
        elif state[0] and now_s - self._since_s > _LIMITS_S[state[0]]:
            if state[0] == "write":
                self.transport.abort()
            else:
                self._end("408 Request Timeout" if state[0] == "header" else "")

    def _waiting(self) -> tuple[str, object]:
        """Return the awaited event, "" for none, with a value that changes when the client makes progress."""
        unsent_bytes = self.transport.get_write_buffer_size()
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if self.flow.write_paused or (unsent_bytes and not is_busy):
            return "write", unsent_bytes
        if self.transport.is_closing() or (is_busy and (self.flow.read_paused or not self.cycle.more_body)):
            return "", None
        if is_busy:
            return "body", self._received_bytes // BODY_BYTES_MIN
        return ("header" if self._received_bytes > self._answered_bytes else "idle"), self._answered_bytes

    def _end(self, status: str) -> None:
        if status:
            self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        self.transport.close()


class BoundedServer(uvicorn.Server):
    """A server that checks its connections."""

    async def on_tick(self, counter: int) -> bool:
        """Check them every `SWEEP_TICKS`."""
        if counter % SWEEP_TICKS == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.check_time(time.monotonic())
        return await super().on_tick(counter)
