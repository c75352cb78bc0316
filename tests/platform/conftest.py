"""Databases of the platform's tests: SQLite, and a real PostgreSQL where the database matters."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.postgresql import find_programs, postgresql

from charonia.platform.database.connection import Database
from charonia.platform.database.tables import PlatformTable


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgresql(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database with all tables, of each kind."""
    if request.param == "sqlite":
        made = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
    else:
        made = Database(request.getfixturevalue("postgresql_url"))
    made.migrate()
    yield made
    if request.param == "postgresql":
        with made.engine.begin() as connection:
            PlatformTable.metadata.drop_all(connection)
            connection.execute(text("DROP TABLE alembic_version"))
    made.close()
