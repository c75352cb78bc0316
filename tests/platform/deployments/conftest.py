"""Deployments over a target of records, with a model of three versions."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session
from tests.support.fake_target import FakeTarget
from tests.support.platform_models import add_version

from charonia.core.errors import ServingError, unavailable
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import GrantRow, UserRow
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people.access import Grant, Principal, ProjectRole

ADA = Principal.of("Ada", [Grant(ProjectRole.ADMIN)], id="user local ada")


class _LockedAtTimes(Database):
    """A database in which another process writes for a long time."""

    def __init__(self, url: str, is_locked: Callable[[], bool]) -> None:
        super().__init__(url)
        self._is_locked = is_locked

    @contextlib.contextmanager
    def transaction(self, *, is_keyed: bool = True) -> Iterator[Session]:
        if self._is_locked():
            raise unavailable("the database cannot be used: database is locked")
        with super().transaction(is_keyed=is_keyed) as session:
            yield session


class Stage:
    """Deployments, with time that passes when a test says so."""

    def __init__(self, data: Path, url: str = "") -> None:
        self.data = data
        self.is_locked = False
        self.database = _LockedAtTimes(url or f"sqlite:///{data / 'platform.sqlite'}", lambda: self.is_locked)
        self.database.migrate()
        self.target = FakeTarget()
        self.workloads = Workloads(data, open_artifacts("", data))
        self.deployments = Deployments(self.database, {"local": self.target}, self.workloads)
        self.now_s = 1_000_000.0

    def restart(self) -> None:
        """Let the platform be killed, and start again."""
        self.deployments.close()
        self.deployments = Deployments(self.database, {"local": self.target}, self.workloads)

    def pass_s(self, seconds: float, step_s: float = 0.5, *, is_locked: bool = False) -> None:
        """Let time pass, with the reconciler at work; it cannot write while the database is locked."""
        self.is_locked = is_locked
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self.target.pass_s(step_s)
            with contextlib.suppress(ServingError):
                self.deployments.reconciler.step(self.now_s)
        self.is_locked = False

    def spec(self, name: str = "reader", versions: object = "latest", **more: object) -> dict[str, object]:
        model = {"name": "echo", "versions": versions}
        return {"name": name, "models": [model], **more}


@pytest.fixture
def stage(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Iterator[Stage]:
    is_postgresql = database_kind == "postgresql"
    stage = Stage(tmp_path, request.getfixturevalue("postgresql_url") if is_postgresql else "")
    for content in (b"one", b"two", b"three"):
        add_version(stage.database, tmp_path, "echo", {"config.pbtxt": b'backend: "identity"', "1/model": content})
    with stage.database.transaction() as session:
        grants = [GrantRow(role="admin", created=0.0)]
        session.add(UserRow(issuer="local", subject="ada", name="Ada", grants=grants, created=0.0))
    yield stage
    stage.deployments.close()
    stage.database.close()
