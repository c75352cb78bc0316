"""A platform on SQLite in a folder of its own, without a socket; and databases, where they matter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import inspect, text, update
from tests.support.postgresql import find_programs, postgresql

from charonia.platform.app import make_app
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import LeaseRow
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    app = make_app(PlatformSettings(tmp_path, isolation="available"))
    yield app
    app.state.platform.database.close()


@pytest.fixture
def platform(app: FastAPI) -> Platform:
    found = app.state.platform
    assert isinstance(found, Platform)
    return found


@pytest.fixture
def link(platform: Platform) -> str:
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
    with database.engine.begin() as connection:
        kept = (LeaseRow.__tablename__, "alembic_version")
        names = ", ".join(name for name in inspect(connection).get_table_names() if name not in kept)
        if names:
            connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
            connection.execute(update(LeaseRow).values(holder="", until=0.0))
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database with all tables, of each kind."""
    is_file = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'platform.sqlite'}" if is_file else request.getfixturevalue("postgresql_url")
    made = Database(url)
    made.migrate()
    yield made
    made.close()
