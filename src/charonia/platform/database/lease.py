"""Repeated work of the platform, and the lease that lets only one of several platforms over a database do it.

With PostgreSQL, the platform that holds the lease renews it. When it stops doing so, another one takes over. Times are
those of the database, so clocks of machines may differ. With SQLite, a process locks the data folder instead.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable

from sqlalchemy import Double, cast, func, or_, update

from charonia.core.errors import ServingError
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import LeaseRow

_log = logging.getLogger(__name__)

LEASE_S = 12.0
"""How long the lease lasts without being renewed."""

RENEW_S = 3.0

MARGIN_S = 2.0
"""How long before its end a platform no longer counts on its lease."""


class PlatformLease:
    """The lease of one platform.

    Attributes:
        on_taken: Called each time it is taken, before anything counts on it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = secrets.token_hex(16)
        self.is_shared = database.engine.dialect.name == "postgresql"
        self._until_s = 0.0 if self.is_shared else float("inf")
        self._loop = RepeatedStep("lease", self.renew, RENEW_S)
        self.on_taken: list[Callable[[], None]] = []

    def is_held(self) -> bool:
        return time.monotonic() < self._until_s

    def start(self) -> None:
        if self.is_shared:
            self.renew()
            self._loop.start()
        else:
            self._taken()

    def close(self) -> None:
        """Leave the lease to others."""
        self._loop.close()
        if self.is_shared and self.is_held():
            self._until_s = 0.0
            try:
                self._set(0.0)
            except ServingError as error:  # it expires
                _log.info("lease: %s", error)

    def renew(self) -> None:
        """Renew the lease, or take one that has expired."""
        begin_s, was_held = time.monotonic(), self.is_held()
        if self._set(LEASE_S):
            if not was_held:
                self._taken()
            self._until_s = begin_s + LEASE_S - MARGIN_S
        else:
            self._until_s = 0.0

    def _taken(self) -> None:
        for each in self.on_taken:
            each()

    def _set(self, seconds: float) -> bool:
        moment = cast(func.extract("epoch", func.clock_timestamp()), Double)
        is_free = or_(LeaseRow.holder == self._holder, LeaseRow.until < moment)
        values = {"holder": self._holder, "until": moment + seconds}
        with self._database.transaction(is_keyed=False) as session:
            found = session.execute(update(LeaseRow).where(is_free).values(values).returning(LeaseRow.id))
            return found.first() is not None


class RepeatedStep:
    """Repeats a step in a thread; what a step raises is logged.

    Args:
        step: Returns the seconds until the next step, or None for `pause_s`.
        has_turn: Whether this platform does it now.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], pause_s: float, has_turn: Callable[[], bool] = lambda: True
    ) -> None:
        self._name = name
        self._step = step
        self._pause_s = pause_s
        self._has_turn = has_turn
        self._wake = threading.Event()
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Do the next step immediately."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the present step."""
        self.is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s: float | None = None
        while not self.is_closing:
            self._wake.wait(self._pause_s if pause_s is None else pause_s)
            self._wake.clear()
            pause_s = None
            if self.is_closing or not self._has_turn():
                continue
            try:
                pause_s = self._step()
            except ServingError as error:
                _log.warning("%s: %s", self._name, error)
            except Exception:
                _log.exception("%s: a step has failed", self._name)
