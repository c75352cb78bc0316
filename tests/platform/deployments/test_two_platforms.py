"""Two platforms over one PostgreSQL: whichever is killed, at whichever step, every rollout comes to its end."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from tests.platform.deployments.conftest import ADA
from tests.support.fake_target import FakeTarget
from tests.support.platform_models import add_version

from charonia.core.errors import ServingError
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database
from charonia.platform.database.lease import PlatformLease
from charonia.platform.database.tables import LeaseRow, RevisionRow
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads

NAMES = ("reader", "writer", "finder")
VERSIONS = 3
ROUNDS = 60
KILL_SHARE = 0.15
STEPS_MAX = 12
"""A platform is killed at one of its next steps: calls of its target, and ends of transactions."""


class Killed(BaseException):
    """The process ends here. Nothing catches it."""


class MortalDatabase(Database):
    """The database of one process, which can end before or after each of its transactions."""

    live: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def transaction(self, *, is_keyed: bool = True) -> Iterator[Session]:
        with super().transaction(is_keyed=is_keyed) as session:
            yield session
            self.live()  # it is rolled back
        self.live()


class MortalTarget:
    """The target as one process sees it, which can end before or after each call that changes something."""

    def __init__(self, target: FakeTarget, live: Callable[[], None]) -> None:
        self._target = target
        self._live = live

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in ("apply", "abandon", "stop", "remove", "scale"):
            return found

        def call(*arguments: Any) -> Any:
            self._live()
            answer = found(*arguments)
            self._live()
            return answer

        return call


class Process:
    """A platform that can be killed."""

    def __init__(self, url: str, data: Path, target: FakeTarget) -> None:
        self.steps_left = -1
        self.database = MortalDatabase(url)
        self.database.live = self._live
        self.lease = PlatformLease(self.database)
        workloads = Workloads(data, open_artifacts("", data))
        targets: Any = {"local": MortalTarget(target, self._live)}
        self.deployments = Deployments(self.database, targets, workloads, self.lease)

    def _live(self) -> None:
        if self.steps_left == 0:
            raise Killed
        self.steps_left -= 1

    def leave(self) -> None:
        self.deployments.close()
        self.database.close()


class TwoPlatforms:
    """Two platforms, a target, and clients that change deployments through either."""

    def __init__(self, seed: int, url: str, data: Path) -> None:
        self.random = random.Random(seed)
        self.database = Database(url)
        self.url, self.data, self.target = url, data, FakeTarget()
        self.processes = [self._new(), self._new()]
        self.now_s, self.kills, self.refusals = 1_000_000.0, 0, 0

    def _new(self) -> Process:
        return Process(self.url, self.data, self.target)

    def pass_s(self, seconds: float) -> None:
        """Let both work for a while."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            self.target.pass_s(1.0)
            for at in range(2):
                self._guarded(at, self._work)
            assert sum(each.lease.is_held() for each in self.processes) <= 1

    def _work(self, process: Process) -> None:
        process.lease.renew()
        if process.lease.is_held():
            process.deployments.reconciler.step(self.now_s)

    def change(self) -> None:
        """Let a client change something, through a platform that may be killed meanwhile."""
        name, draw = self.random.choice(NAMES), self.random.random()
        model = {"name": "echo", "versions": [self.random.randint(1, VERSIONS)]}
        spec = {"name": name, "models": [model], "ready_within_s": self.random.randint(5, 9)}

        def act(process: Process) -> None:
            changes = process.deployments.changes
            if draw < 0.7:
                changes.change(ADA, "default", spec)
            elif draw < 0.8:
                changes.stop(ADA, "default", name)
            elif draw < 0.9:
                changes.start(ADA, "default", name)
            else:
                changes.rollback(ADA, "default", name)

        if draw < 0.1:  # the next revision is broken
            self.target.broken[self._latest(name) + 1] = "no such file"
        self._guarded(self.random.randrange(2), act)

    def _latest(self, name: str) -> int:
        return next((view.revision for view in self.views() if view.name == name), 0)

    def views(self) -> Sequence[DeploymentView]:
        return self.processes[0].deployments.reads.list(ADA, "default")[0]

    def _guarded(self, at: int, act: Callable[[Process], None]) -> None:
        process = self.processes[at]
        try:
            act(process)
        except ServingError:
            self.refusals += 1
        except Killed:
            self.kills += 1
            if process.lease.is_held():  # LEASE_S pass without a renewal
                with self.database.transaction() as session:
                    session.execute(update(LeaseRow).values(until=0.0))
            process.leave()
            self.processes[at] = self._new()


@pytest.fixture
def url(postgresql_url: str, tmp_path: Path) -> Iterator[str]:
    database = Database(postgresql_url)
    database.migrate()
    for content in (b"one", b"two", b"three"):
        add_version(database, tmp_path, "echo", {"config.pbtxt": b'backend: "identity"', "1/model": content})
    yield postgresql_url
    database.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_rollout_converges_whichever_platform_is_killed(seed: int, url: str, tmp_path: Path) -> None:
    both = TwoPlatforms(seed, url, tmp_path)

    for _ in range(ROUNDS):
        if both.random.random() < KILL_SHARE:
            both.random.choice(both.processes).steps_left = both.random.randint(0, STEPS_MAX)
        both.change()
        both.pass_s(both.random.choice((0.5, 1.0, 3.0)))
    for process in both.processes:
        process.steps_left = -1
    both.pass_s(60.0)

    assert both.kills > ROUNDS * KILL_SHARE / 3
    views = both.views()
    assert {view.name for view in views} == set(NAMES)
    for view in views:
        server = both.target.servers.get(f"default/{view.name}")
        running = server.serving if server else 0
        if view.wanted:
            assert (view.state, running) == ("ready", view.serving), view
            assert view.serving == view.wanted
            assert view.serving == view.revision or view.latest_state in ("failed", "replaced"), view
        else:
            assert view.state in ("stopped", "failed"), view
            assert running == 0
        with both.database.reading() as session:
            rows = select(RevisionRow.state).where(RevisionRow.deployment.has(name=view.name))
            assert list(session.scalars(rows)).count("serving") <= 1
            assert "pending" not in session.scalars(rows).all() or not view.wanted
    both.database.close()
    for process in both.processes:
        process.leave()
