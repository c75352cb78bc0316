"""PostgreSQL behind a connection on which nothing arrives any more."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from charonia.core.errors import Code, ServingError
from charonia.platform.database import connection as module
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import PlatformTable


class Proxy:
    """Passes connections on to a server, until it is told to swallow all that arrives."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._is_silent = threading.Event()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def be_silent(self) -> None:
        """Swallow everything, also on connections that are open."""
        self._is_silent.set()

    def recover(self) -> None:
        """Pass on what comes over new connections."""
        self._is_silent = threading.Event()

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._is_over.is_set():
                if select.select([self._listener], [], [], 0.05)[0]:
                    client, _ = self._listener.accept()
                    self.accepted += 1
                    thread = threading.Thread(target=self._pass, args=(client, self._is_silent), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, client: socket.socket, is_silent: threading.Event) -> None:
        with client, socket.create_connection(self._to) as server, suppress(OSError):
            others = {client: server, server: client}
            while not self._is_over.is_set():
                for ready in select.select([client, server], [], [], 0.05)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if not is_silent.is_set():
                        others[ready].sendall(data)


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[Proxy]:
    url = make_url(postgresql_url)
    made = Proxy(url.host or "", url.port or 5432)
    yield made
    made.close()


@pytest.fixture
def behind(proxy: Proxy, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A migrated database that is reached through the proxy, with short limits."""
    monkeypatch.setattr(module, "ANSWER_S_MAX", 1.0)
    monkeypatch.setattr(module, "CONNECT_S", 2)
    monkeypatch.setattr(module, "AWAY_S", 3600.0)
    monkeypatch.setattr(module, "MIGRATION_S_MAX", 60.0)
    made = Database(make_url(postgresql_url).set(port=proxy.port).render_as_string(hide_password=False))
    made.migrate()
    yield made
    made.close()
    direct = Database(postgresql_url)
    with direct.engine.begin() as connection:
        PlatformTable.metadata.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
    direct.close()


def ask(database: Database) -> int:
    with database.reading() as session:
        return int(session.scalar(text("SELECT 1")) or 0)


def unavailable(database: Database) -> str:
    with pytest.raises(ServingError) as raised:
        ask(database)
    assert raised.value.code is Code.UNAVAILABLE
    return raised.value.message


def test_a_call_behind_a_silent_connection_ends_and_those_after_it_are_refused_immediately(
    behind: Database, proxy: Proxy
) -> None:
    assert ask(behind) == 1
    proxy.be_silent()

    unavailable(behind)
    attempts = proxy.accepted
    messages = [unavailable(behind) for _ in range(100)]

    assert set(messages) == {"the database does not answer"}
    assert proxy.accepted == attempts


def test_a_transaction_that_is_open_when_the_connection_becomes_silent_ends(behind: Database, proxy: Proxy) -> None:
    def change() -> None:
        with behind.transaction() as session:
            session.execute(text("SELECT 1"))
            proxy.be_silent()
            session.execute(text("SELECT 2"))

    with pytest.raises(ServingError) as raised:
        change()

    assert raised.value.code is Code.UNAVAILABLE


def test_a_database_that_answers_again_is_used_again(
    behind: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(behind) == 1
    proxy.be_silent()
    monkeypatch.setattr(module, "AWAY_S", 0.0)
    unavailable(behind)

    proxy.recover()

    assert ask(behind) == 1


def test_a_statement_that_takes_too_long_is_cancelled_and_the_connection_stays(behind: Database) -> None:
    def sleep() -> None:
        with behind.reading() as session:
            session.execute(text("SET LOCAL statement_timeout = 100"))
            session.execute(text("SELECT pg_sleep(60)"))

    with pytest.raises(ServingError, match="statement timeout"):
        sleep()

    assert ask(behind) == 1


def test_calls_beyond_the_connections_are_refused(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(module, "POOL_WAIT_S", 0.05)
    database = Database(postgresql_url)
    with database.reading() as session:
        session.execute(text("SELECT 1"))

        message = unavailable(database)

    database.close()
    assert message == "all 1 connections to the database are in use"
