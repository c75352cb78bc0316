"""A platform on SQLite in a folder of its own, without a socket; and databases, where they matter."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Engine, inspect, select, text, update
from tests.support.postgresql import find_programs, postgresql
from tests.support.process import eventually

from charonia.platform.app import make_app
from charonia.platform.database import connection
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import LeaseRow, TaskRow
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform

on_both = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql"], indirect=True)
"""For tests of what depends on the database: text search, JSON, locks."""


@pytest.fixture
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture(scope="session", autouse=True)
def compiled_statements() -> Iterator[None]:
    """Compile each statement once in all: SQLAlchemy does it per engine, which is a third of a short test."""
    engines: dict[str, Engine] = {}
    make = connection._engine

    def with_kept_statements(url: str, driver: str) -> Engine:
        engine = make(url, driver)
        first = engines.get(driver, engine)
        if first.dialect.server_version_info is None:  # its dialect learns about the database when it connects
            first = engines[driver] = engine
        engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_engine", with_kept_statements)
        yield


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A data folder with the tables and the owner, for copies; and the secret of the owner's link."""
    data = tmp_path_factory.mktemp("prepared")
    with closing(Database(f"sqlite:///{data / 'platform.sqlite'}")) as made:
        made.migrate()
        with made.transaction() as session:
            return data, prepare_owner(session, data)


@pytest.fixture
def app(
    request: pytest.FixtureRequest, database_kind: str, prepared: tuple[Path, str], tmp_path: Path
) -> Iterator[FastAPI]:
    is_file = database_kind == "sqlite"
    url = "" if is_file else request.getfixturevalue("postgresql_url")
    if is_file:
        shutil.copytree(prepared[0], tmp_path, dirs_exist_ok=True)
    app = make_app(PlatformSettings(tmp_path, isolation="available", database=url))
    yield app
    app.state.platform.tasks.close()
    app.state.platform.database.close()


@pytest.fixture
def platform(app: FastAPI) -> Platform:
    found = app.state.platform
    assert isinstance(found, Platform)
    return found


@pytest.fixture
def link(platform: Platform, prepared: tuple[Path, str]) -> str:
    if not platform.settings.database:
        return prepared[1]
    with platform.database.transaction() as session:
        return prepare_owner(session, platform.settings.data)


@pytest.fixture
def anybody(app: FastAPI) -> Iterator[TestClient]:
    """A client without a key."""
    with TestClient(app, base_url="http://127.0.0.1:8080", follow_redirects=False) as client:
        yield client


@pytest.fixture
def admin(anybody: TestClient, link: str, platform: Platform) -> TestClient:
    key = (platform.settings.data / "owner.key").read_text().strip()
    anybody.headers["Authorization"] = f"Bearer {key}"
    return anybody


def when_ended(client: TestClient, number: int, wait_s: float = 150.0) -> dict[str, Any]:
    """Wait for the end of a task, and return it. The database is polled: a call would take longer than the pause."""
    database: Database = client.app.state.platform.database  # type: ignore[attr-defined]

    def has_ended() -> bool:
        with database.engine.connect() as link:
            return bool(link.scalar(select(TaskRow.ended).where(TaskRow.id == number)))

    assert eventually(has_ended, wait_s)
    return dict(client.get(f"/api/v1/tasks/{number}").json())


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgresql(programs) as url:
        yield url


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """A database without rows. Its tables stay from test to test: making them takes longer than most tests."""
    yield postgresql_server
    database = Database(postgresql_server)
    with database.engine.begin() as link:
        kept = (LeaseRow.__tablename__, "alembic_version")
        names = ", ".join(name for name in inspect(link).get_table_names() if name not in kept)
        if names:
            link.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
            link.execute(update(LeaseRow).values(holder="", until=0.0))
    database.close()


@pytest.fixture
def database(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Iterator[Database]:
    """An empty database with all tables."""
    is_file = database_kind == "sqlite"
    url = f"sqlite:///{tmp_path / 'platform.sqlite'}" if is_file else request.getfixturevalue("postgresql_url")
    made = Database(url)
    made.migrate()
    yield made
    made.close()
