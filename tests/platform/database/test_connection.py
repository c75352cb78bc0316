"""Migrations and transactions, on SQLite and PostgreSQL."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from tests.platform.conftest import on_both

from charonia.core.errors import Code, ServingError
from charonia.platform.database import connection as module
from charonia.platform.database.connection import Database, DatabaseFullError, now
from charonia.platform.database.tables import KeyRow, LeaseRow, PlatformTable, ProjectRow


def add_project(database: Database, name: str) -> None:
    with database.transaction() as session:
        session.add(ProjectRow(name=name, created=now()))


@on_both
def test_migrations_make_the_tables_that_the_code_has(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})

        assert compare_metadata(context, PlatformTable.metadata) == []


@on_both
def test_a_database_of_the_first_release_is_migrated(database: Database) -> None:
    add_project(database, "a")
    with database.engine.begin() as connection:
        for table in ("alert_events", "alerts", "history", "lease"):
            connection.execute(text(f"DROP TABLE {table}"))
        for column in ("models.follows", "server_keys.requests_per_minute", "server_keys.tokens_per_minute"):
            connection.execute(text("ALTER TABLE {} DROP COLUMN {}".format(*column.split("."))))
        connection.execute(text("UPDATE alembic_version SET version_num = '0005'"))

    database.migrate()

    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, PlatformTable.metadata) == []
    with database.reading() as session:
        assert session.query(ProjectRow.name).filter_by(name="a").all() == [("a",)]
        assert session.query(LeaseRow.holder).all() == [("",)]


@on_both
def test_migrating_again_changes_nothing(database: Database) -> None:
    add_project(database, "a")

    database.migrate()

    with database.reading() as session:
        assert session.query(ProjectRow.name).filter_by(name="a").all() == [("a",)]


@on_both
def test_what_fails_in_the_middle_leaves_nothing(database: Database) -> None:
    def fail() -> None:
        with database.transaction() as session:
            session.add(ProjectRow(name="b", created=now()))
            session.flush()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()

    with database.reading() as session:
        assert session.query(ProjectRow).filter_by(name="b").count() == 0


@on_both
def test_a_name_that_is_taken_is_a_conflict(database: Database) -> None:
    add_project(database, "a")

    with pytest.raises(ServingError) as raised:
        add_project(database, "a")

    assert raised.value.code is Code.ALREADY_EXISTS


@on_both
def test_many_writers_wait_for_each_other(database: Database) -> None:
    with database.transaction() as session:
        session.add(KeyRow(name="k", digest="d", created=now(), used=0.0))

    def count(_: int) -> None:
        with database.transaction() as session:
            row = session.query(KeyRow).with_for_update().one()
            time.sleep(0.002)  # what another one could come in between
            row.used += 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(40)))

    with database.reading() as session:
        assert session.query(KeyRow).one().used == 40


@on_both
def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    add_project(database, "a")
    with database.transaction() as session:
        session.add(ProjectRow(name="b", created=now()))
        session.flush()

        with database.reading() as other:
            names = {name for (name,) in other.query(ProjectRow.name)}

    assert "a" in names
    assert "b" not in names


def test_a_database_that_stays_locked_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    database = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
    database.migrate()
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with database.transaction() as session:
            session.add(ProjectRow(name="b", created=now()))
            session.flush()
            locked.set()
            done.wait(200)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(200)
    with pytest.raises(ServingError) as raised:
        add_project(database, "a")
    done.set()
    holder.join()

    assert raised.value.code is Code.UNAVAILABLE
    add_project(database, "a")
    database.close()


def test_a_full_disk_is_said_so_and_nothing_half_is_written(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
    database.migrate()
    with database.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")

    with (
        pytest.raises(DatabaseFullError, match="database or disk is full") as raised,
        database.transaction() as session,
    ):
        session.add_all(ProjectRow(name=f"{number:0100}", created=now()) for number in range(1000))

    assert (raised.value.code, raised.value.hint) == (Code.UNAVAILABLE, "make room on its disk")
    with database.reading() as session:
        assert session.query(ProjectRow).count() == 0
    add_project(database, "a")
    database.close()


@on_both
def test_a_full_disk_of_postgresql_is_known_by_its_state(database: Database) -> None:
    class DiskFullError(Exception):
        sqlstate = "53100"

    def fail() -> None:
        with database.transaction():
            raise OperationalError("INSERT", {}, DiskFullError("could not extend file"))

    with pytest.raises(DatabaseFullError, match="could not extend file"):
        fail()


def test_a_database_that_is_away_is_unavailable() -> None:
    database = Database("postgresql://postgres@127.0.0.1:9/postgres")

    with pytest.raises(ServingError) as raised:
        database.migrate()

    assert raised.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("url", ["no address", "oracle9://host/name", "mysql://host/name"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ServingError, match="--database: "):
        Database(url)
