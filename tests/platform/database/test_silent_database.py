"""PostgreSQL behind a network that is slow, silent, or cut in the middle of an answer."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from tests.support.faulty_network import SILENT, SLOW, FaultyNetwork, Link, broken

from charonia.core.errors import Code, ServingError
from charonia.platform.database import connection as module
from charonia.platform.database.connection import Database


@pytest.fixture
def network(postgresql_url: str) -> Iterator[FaultyNetwork]:
    with FaultyNetwork(make_url(postgresql_url).port or 5432) as made:
        yield made


@pytest.fixture
def behind(network: FaultyNetwork, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A migrated database that is reached through the network, with short limits."""
    monkeypatch.setattr(module, "ANSWER_S_MAX", 1.0)
    monkeypatch.setattr(module, "CONNECT_S", 2)
    monkeypatch.setattr(module, "AWAY_S", 3600.0)
    monkeypatch.setattr(module, "MIGRATION_S_MAX", 60.0)
    made = Database(make_url(postgresql_url).set(port=network.port).render_as_string(hide_password=False))
    made.migrate()
    yield made
    made.close()


def be_silent(network: FaultyNetwork) -> None:
    network.to_client = network.to_server = SILENT


def ask(database: Database) -> int:
    with database.reading() as session:
        return int(session.scalar(text("SELECT 1")) or 0)


def unavailable(database: Database) -> str:
    with pytest.raises(ServingError) as raised:
        ask(database)
    assert raised.value.code is Code.UNAVAILABLE
    return raised.value.message


@pytest.mark.parametrize("link", SLOW.values(), ids=SLOW)
def test_a_slow_network_costs_time_only(behind: Database, network: FaultyNetwork, link: Link) -> None:
    network.to_client = network.to_server = link

    assert ask(behind) == 1


@pytest.mark.parametrize("fault", ["cut", "silent"])
def test_a_connection_that_breaks_in_an_answer_costs_its_transaction(
    behind: Database, network: FaultyNetwork, fault: str
) -> None:
    def change() -> None:
        with behind.transaction() as session:
            session.execute(text("DELETE FROM alembic_version"))
            network.to_client = broken(5000)[fault]
            session.execute(text("SELECT repeat('x', 100000)"))

    with pytest.raises(ServingError) as raised:
        change()
    network.to_client = Link()
    behind._away_until = 0.0
    with behind.reading() as session:
        left = session.scalar(text("SELECT count(*) FROM alembic_version"))

    assert raised.value.code is Code.UNAVAILABLE
    assert left == 1


def test_a_call_behind_a_silent_connection_ends_and_those_after_it_are_refused_immediately(
    behind: Database, network: FaultyNetwork
) -> None:
    assert ask(behind) == 1
    be_silent(network)

    unavailable(behind)
    attempts = len(network.clients)
    messages = [unavailable(behind) for _ in range(100)]

    assert set(messages) == {"the database does not answer"}
    assert len(network.clients) == attempts


def test_a_database_that_answers_again_is_used_again(
    behind: Database, network: FaultyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(behind) == 1
    be_silent(network)
    monkeypatch.setattr(module, "AWAY_S", 0.0)
    unavailable(behind)

    network.to_client = network.to_server = Link()

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
