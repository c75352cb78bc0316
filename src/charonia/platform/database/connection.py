"""The connection to the database, transactions, and the row of a call with an idempotency key in one of them."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, delete, event, func, inspect, select
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session, sessionmaker

from charonia.core.errors import Code, ServingError, conflict, invalid, unavailable
from charonia.platform.database.tables import CallRow, PlatformTable

KEPT_S = 24 * 3600.0
"""How long a key is remembered."""

CALLS_MAX = 10_000
"""Keys that are remembered; the oldest are removed first."""


class KeyedCall:
    """A call with a key.

    Attributes:
        caller: The caller, "" while unknown.
        digest: Digest of caller and key, "" while the caller is unknown.
    """

    def __init__(self, key: str, target: str) -> None:
        self.key = key
        self.caller = ""
        self.digest = ""
        self.is_recorded = False
        self._content = hashlib.sha256(target.encode() + b"\0")

    @property
    def request(self) -> str:
        return self._content.hexdigest()

    def read(self, body: bytes) -> None:
        self._content.update(body)

    def name(self, caller: str) -> None:
        """Set who makes it."""
        self.caller = caller
        self.digest = hashlib.sha256(f"{caller}\0{self.key}".encode()).hexdigest()

    def record(self, session: Session, now_s: float) -> None:
        """Add its row to a transaction, and remove expired and surplus rows.

        Raises:
            IntegrityError: Another transaction has the row already.
        """
        session.add(CallRow(digest=self.digest, request=self.request, answer="", created=now_s))
        session.flush()
        session.execute(delete(CallRow).where(CallRow.created <= now_s - KEPT_S))
        count = session.scalar(select(func.count()).select_from(CallRow)) or 0
        if count > CALLS_MAX:
            oldest = select(CallRow.id).order_by(CallRow.id).limit(count - CALLS_MAX)
            session.execute(delete(CallRow).where(CallRow.id.in_(oldest)))


current_call: ContextVar[KeyedCall | None] = ContextVar("current_call", default=None)
"""The call that is being handled, None for one without a key."""


LOCK_WAIT_S = 10.0
"""How long a transaction waits for another one that writes."""

CONNECTIONS_MAX = 20

POOL_WAIT_S = 5.0
"""How long a transaction waits for a connection."""

CONNECT_S = 5
"""Time limit for PostgreSQL to accept a connection."""

ANSWER_S_MAX = 15.0
"""Time limit of a statement in PostgreSQL, even if nothing at all arrives any more."""

MIGRATION_S_MAX = 3600.0
"""Time limit of a statement in a migration."""

AWAY_S = 2.0
"""After a connection has failed, calls are refused immediately for this time."""

LOOKS_MAX = 3
"""How often the platform checks whether a transaction whose COMMIT was not answered took place."""

LOOK_PAUSE_S = 0.5

_WRITES = "charonia_writes"
_FULL = "disk is full"
"""SQLite's messages."""
_FULL_STATE = "53100"
"""SQLSTATE disk_full of PostgreSQL."""


class DatabaseFullError(ServingError):
    """The disk of the database has no room left."""


class Database:
    """The tables of a platform.

    Args:
        url: SQLAlchemy's address: `sqlite:///PATH`, `postgresql://USER@HOST/NAME`.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            if parsed.get_backend_name() not in ("sqlite", "postgresql"):
                raise invalid(f"--database: expected postgresql://USER@HOST/NAME, got '{parsed}'")
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.engine = _engine(parsed.render_as_string(hide_password=False), parsed.drivername)
        except (ArgumentError, ImportError) as error:
            raise invalid(f"--database: '{url}' cannot be used: {error}") from None
        self._away_until = 0.0
        self._reading = sessionmaker(self.engine, expire_on_commit=False)
        self.writing = sessionmaker(self.engine.execution_options(**{_WRITES: True}), expire_on_commit=False)

    def migrate(self) -> None:
        """Make the tables, or migrate those of an earlier release."""
        with self._explained(), self.engine.execution_options(**{_WRITES: True}).begin() as connection:
            if connection.dialect.name == "postgresql":
                driver: Any = connection.connection.dbapi_connection
                driver.limit_s = MIGRATION_S_MAX
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(MIGRATION_S_MAX * 1e3)}")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(MIGRATION_S_MAX * 1e3)}")
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            if inspect(connection).has_table(CallRow.__tablename__):
                command.upgrade(config, "head")
            else:
                PlatformTable.metadata.create_all(connection)
                command.stamp(config, "head")
        self.engine.dispose()  # the connection that had more time

    @contextmanager
    def transaction(self, *, is_keyed: bool = True) -> Iterator[Session]:
        """Yield a session; its changes are committed at the end, or rolled back as a whole.

        The first transaction of a call with an idempotency key records the key. If the answer to its COMMIT is lost,
        the record shows whether it took place.

        Args:
            is_keyed: Whether the transaction records the key of the current call.
        """
        call = current_call.get() if is_keyed else None
        if call is not None and (call.is_recorded or not call.digest):
            call = None
        with self._explained(), self.writing() as session:
            if call is not None:
                _record(session, call)
            yield session
            try:
                session.commit()
            except OperationalError as error:
                if call is None or not error.connection_invalidated or not self._is_committed(call):
                    raise
            if call is not None:
                call.is_recorded = True

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a session that sees one state of the tables and changes nothing."""
        with self._explained(), self._reading() as session:
            yield session

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the driver into errors for callers; while the database is unreachable, raise immediately."""
        if time.monotonic() < self._away_until:
            raise unavailable("the database does not answer", hint="try again")
        try:
            yield
        except IntegrityError as error:
            raise conflict(f"it exists already: {error.orig}") from error
        except DataError as error:
            raise invalid(f"the database cannot store a value: {error.orig}") from error
        except PoolTimeoutError as error:
            raise unavailable(
                f"all {CONNECTIONS_MAX} connections to the database are in use", hint="try again"
            ) from error
        except OperationalError as error:
            message = f"the database cannot be used: {error.orig}"
            state = getattr(error.orig, "sqlstate", "")
            if _FULL in str(error.orig) or state == _FULL_STATE:
                raise DatabaseFullError(Code.UNAVAILABLE, message, hint="make room on its disk") from error
            if self.engine.dialect.name == "postgresql" and not state:  # the connection's fault, not the statement's
                self._away_until = time.monotonic() + AWAY_S
            raise unavailable(message, hint="try again") from error

    def _is_committed(self, call: KeyedCall) -> bool:
        """Return whether the transaction with the row of a call took place."""
        for _ in range(LOOKS_MAX):
            try:
                with self.writing() as session:
                    _record(session, call)  # waits for a transaction that still has the row
                return False
            except ServingError:
                return True
            except OperationalError:
                time.sleep(LOOK_PAUSE_S)
        raise unavailable(
            "the connection to the database broke: whether the change was made is not known",
            hint="send the call again with the same Idempotency-Key",
        )

    def close(self) -> None:
        self.engine.dispose()


def _record(session: Session, call: KeyedCall) -> None:
    try:
        call.record(session, now())
    except IntegrityError as error:
        raise conflict("a call with this Idempotency-Key is being handled", hint="send it again later") from error


def now() -> float:
    """Return the time in the form of the tables: seconds since the epoch."""
    return time.time()


def _engine(url: str, driver: str) -> Engine:
    if not driver.startswith("sqlite"):
        return _postgresql(url)
    engine = create_engine(url, connect_args={"timeout": LOCK_WAIT_S}, pool_size=CONNECTIONS_MAX, max_overflow=0)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = (
            None  # `begin` does it: the driver would start writing in the middle, without waiting
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_writing = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")

    return engine


def _postgresql(url: str) -> Engine:
    """Return an engine whose every wait for the server is bounded, by the server and, if it is silent, here."""
    import psycopg

    class BoundedConnection(psycopg.Connection[Any]):
        limit_s = ANSWER_S_MAX

        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, self.limit_s if timeout is None else timeout)
            except psycopg.OperationalError as error:
                if error.sqlstate is None:  # not an answer of the server: the connection is broken
                    self.close()
                raise

    limits = {"connect_timeout": CONNECT_S, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
    engine = create_engine(
        url,
        connect_args={**limits, "tcp_user_timeout": round(ANSWER_S_MAX * 1e3)},
        pool_size=CONNECTIONS_MAX,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        pool_pre_ping=True,
    )

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        connection = BoundedConnection.connect(*arguments, **keywords)
        statement_ms, lock_ms = round(ANSWER_S_MAX * 1e3), round(LOCK_WAIT_S * 1e3)
        connection.execute(f"SET statement_timeout = {statement_ms}")
        connection.execute(f"SET lock_timeout = {lock_ms}")
        connection.commit()
        return connection

    return engine
