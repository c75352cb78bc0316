"""The connection to the database, and transactions."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from charonia.core.errors import Code, ServingError, invalid, unavailable

LOCK_WAIT_S = 10.0
"""How long a transaction waits for another one that writes."""

CONNECTIONS_MAX = 20

_WRITES = "charonia_writes"
_FULL = "disk is full"
"""In the words of SQLite."""
_FULL_STATE = "53100"
"""SQLSTATE disk_full of PostgreSQL."""


class DatabaseFullError(ServingError):
    """There is no room left where the database lies."""


class Database:
    """The tables of a platform.

    Args:
        url: SQLAlchemy's address: `sqlite:///PATH`, `postgresql://USER@HOST/NAME`.

    Raises:
        ServingError: INVALID_ARG for an address that is none.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.engine = _engine(parsed.render_as_string(hide_password=False), parsed.drivername)
        except (ArgumentError, ImportError) as error:
            raise invalid(f"--database: '{url}' cannot be used: {error}") from None
        self._reading = sessionmaker(self.engine, expire_on_commit=False)
        self._writing = sessionmaker(self.engine.execution_options(**{_WRITES: True}), expire_on_commit=False)

    def migrate(self) -> None:
        """Bring the tables to the newest form.

        Raises:
            ServingError: UNAVAILABLE when the database cannot be reached.
        """
        with _explained(), self.engine.execution_options(**{_WRITES: True}).begin() as connection:
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session; what was changed in it is committed at the end, or nothing at all.

        Raises:
            ServingError: ALREADY_EXISTS where a name or a number is taken; UNAVAILABLE while the database is locked
                or away.
        """
        with _explained(), self._writing.begin() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a session that sees one state of the tables and changes nothing.

        Raises:
            ServingError: UNAVAILABLE while the database is away.
        """
        with _explained(), self._reading() as session:
            yield session

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def now() -> float:
    """Return the time as the tables have it: seconds since the epoch."""
    return time.time()


def _engine(url: str, driver: str) -> Engine:
    if not driver.startswith("sqlite"):
        return create_engine(url, pool_size=CONNECTIONS_MAX, max_overflow=0, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": LOCK_WAIT_S}, pool_size=CONNECTIONS_MAX, max_overflow=0)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = (
            None  # `begin` does it: the driver would begin to write in the middle, without waiting
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_writing = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")

    return engine


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        raise ServingError(Code.ALREADY_EXISTS, f"it exists already: {error.orig}") from error
    except DataError as error:
        raise invalid(f"the database cannot store a value: {error.orig}") from error
    except OperationalError as error:
        message = f"the database cannot be used: {error.orig}"
        if _FULL in str(error.orig) or getattr(error.orig, "sqlstate", "") == _FULL_STATE:
            raise DatabaseFullError(Code.UNAVAILABLE, message, hint="make room where it lies") from error
        raise unavailable(message, hint="try again") from error
