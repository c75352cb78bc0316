"""The platform's reconciler over simulated servers: platform processes take turns at each call, and are killed there.

A platform process is a greenlet that runs `Reconciler.step`. Before and after each transaction and each call of the
target, it may lose its turn to the other process, stand still for a while, or be killed: its memory is lost, but not
what it has committed.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet
from sqlalchemy.orm import Session
from tests.support.fake_target import FakeServer, FakeTarget
from tests.support.platform_models import add_version

from charonia.core.errors import ServingError
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database
from charonia.platform.deployments.changes import DEPLOYMENTS_MAX
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.targets.api import RevisionPhase

ADA = Principal.of("Ada", [Grant(ProjectRole.ADMIN)])
PROJECT = "default"
BROKEN = 3
"""The revision of each deployment that never gets ready."""

STEP_S = 0.5
READY_S_MAX = 300.0
"""Longer than both platforms are away together: a revision that none of them sees ready in time has failed for good."""

QUIET_S = 900.0
"""Time in which everything must converge when nothing happens any more."""


class KilledError(BaseException):
    """The platform process was killed."""


class _Database(Database):
    def __init__(self, url: str, pass_turn: Callable[[], None]) -> None:
        super().__init__(url)
        self._pass_turn = pass_turn

    @contextlib.contextmanager
    def transaction(self, *, is_keyed: bool = True) -> Iterator[Session]:
        self._pass_turn()
        with super().transaction(is_keyed=is_keyed) as session:
            yield session
        self._pass_turn()


class _Target:
    """The target, as the platform processes see it."""

    def __init__(self, target: FakeTarget, pass_turn: Callable[[], None]) -> None:
        self._target, self._pass_turn = target, pass_turn

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: object) -> object:
            self._pass_turn()
            try:
                return found(*arguments)
            finally:
                self._pass_turn()

        return call


class ControlPlane:
    """Deployments, what is wanted of them, and two platform processes that come and go.

    Attributes:
        wanted: The latest revision of each deployment, None for those that were removed.
        problems: What has not converged, or was left over.
    """

    def __init__(self, seed: int, count: int, folder: Path, *, kills: float = 0.002) -> None:
        self.chance = random.Random(f"control plane {seed}")
        self.target = FakeTarget(broken={BROKEN: "its model is damaged"}, room=100)
        self.wanted: dict[str, int | None] = {}
        self.problems: list[str] = []
        self.killed = self.applied = 0
        self._kills = kills
        self._is_quiet = False
        self._hub = getcurrent()
        self._database = _Database(f"sqlite:///{folder / 'platform.sqlite'}", self._pass_turn)
        self._database.migrate()
        for content in (b"one", b"two", b"three"):
            add_version(self._database, folder, "echo", {"config.pbtxt": b'backend: "identity"', "1/model": content})
        self._workloads = Workloads(folder, open_artifacts("", folder))
        self._platforms: list[tuple[Deployments, greenlet] | None] = [None, None]
        self._back_s = [0.0, 0.0]
        self._now_s = 1_000_000.0
        self._user = self._started()
        for number in range(count):
            self._create(f"d{number}")

    def run(self, seconds: float) -> None:
        """Let users and faults act for a while, then check what all converges to."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self._turns(STEP_S)
        self._kills = 0.0
        self._is_quiet = True
        self.target.is_away = False
        end_s = self._now_s + QUIET_S
        while self._now_s < end_s and self._not_converged():
            self._turns(4 * STEP_S)
        self.problems += self._not_converged()
        self._user.close()
        self._database.close()

    def _act(self) -> None:
        name = self.chance.choice(list(self.wanted))
        match self.chance.randrange(12):
            case 0 if len(self.wanted) < DEPLOYMENTS_MAX:
                self._create(f"d{len(self.wanted)}")
            case 1 if self.wanted[name] is not None:
                self._user.changes.remove(ADA, PROJECT, name)
                self.wanted[name] = None
            case 2 if name in self._keys():
                self.target.crash(f"{PROJECT}/{name}")
            case 3:
                self.target.is_away = self.chance.random() < 0.2
            case 4:  # of a platform whose database was restored from an earlier copy
                self.target.servers[f"{PROJECT}/lost{len(self.target.applied)}"] = FakeServer(
                    1, phase=RevisionPhase.READY
                )
            case _ if self.wanted[name] is not None:
                revision = self.wanted[name] = (self.wanted[name] or 0) + 1
                self._user.changes.change(ADA, PROJECT, self._spec(name, revision))

    def _keys(self) -> set[str]:
        return {key.partition("/")[2] for key, server in self.target.servers.items() if server.serving}

    def _create(self, name: str) -> None:
        self._user.changes.create(ADA, PROJECT, self._spec(name, 1))
        self.wanted[name] = 1

    def _spec(self, name: str, revision: int) -> dict[str, object]:
        models = [{"name": "echo", "versions": [revision % 3 + 1]}]
        return {"name": name, "models": models, "replicas": 10, "ready_within_s": READY_S_MAX}

    # The platform processes.

    def _started(self) -> Deployments:
        target: Any = _Target(self.target, self._pass_turn)
        made = Deployments(self._database, {"local": target}, self._workloads)
        made.reconciler._pool.shutdown()
        vars(made.reconciler)["_pool"] = SimpleNamespace(map=map, shutdown=lambda **_: None)
        return made

    def _pass_turn(self) -> None:
        """In a platform process: let the other one work, or die."""
        if getcurrent() is self._hub:
            return
        if self.chance.random() < self._kills:
            raise KilledError
        if self.chance.random() < 0.3:
            self._hub.switch()

    def _turns(self, seconds: float) -> None:
        """Let time pass, then let the processes work: until something else happens, in the end until all is done."""
        self._now_s += seconds
        self.target.pass_s(seconds)
        for index, platform in enumerate(self._platforms):
            if platform is None and self._now_s >= self._back_s[index]:
                deployments = self._started()
                self._platforms[index] = deployments, greenlet(self._step)
        busy = [index for index, back_s in enumerate(self._back_s) if self._now_s >= back_s]
        acts = 0 if self._is_quiet else max(1, len(self.wanted) // 40)
        while busy and (self._is_quiet or self.chance.random() > 0.01):
            if acts and self.chance.random() < 0.05:
                acts -= 1
                self._act()
            index = self.chance.choice(busy)
            found = self._platforms[index]
            assert found is not None
            deployments, work = found
            try:
                work.switch(deployments)
            except KilledError:
                for ended in {index} if self.chance.random() < 0.7 else set(range(len(self._platforms))):
                    self._kill(ended)
                busy = [each for each in busy if self._platforms[each] is not None]
                continue
            if work.dead:
                self._platforms[index] = deployments, greenlet(self._step)
                busy.remove(index)
            elif self.chance.random() < 25 * self._kills:  # its machine stands still for a while
                self._back_s[index] = self._now_s + self.chance.expovariate(0.1)
                busy.remove(index)

    def _kill(self, index: int) -> None:
        """Take the memory of a platform process, wherever it waits for its turn."""
        if (found := self._platforms[index]) is not None:
            self.killed += 1
            self._platforms[index] = None
            self._back_s[index] = self._now_s + self.chance.expovariate(0.2)
            with contextlib.suppress(KilledError):
                if found[1]:
                    found[1].throw(KilledError)

    def _step(self, deployments: Deployments) -> None:
        with contextlib.suppress(ServingError):
            deployments.reconciler.step(self._now_s)

    def _not_converged(self) -> Sequence[str]:
        views = {each.name: each for each in self._user.reads.list(ADA, PROJECT, limit=10**6)[0]}
        found = []
        for name, revision in self.wanted.items():
            view, server = views.pop(name, None), self.target.servers.get(f"{PROJECT}/{name}")
            if revision is None:
                if view is not None or server is not None:
                    found.append(f"{name} was removed; there is still {view and view.state}, {server}")
            elif view is None or server is None:
                found.append(f"{name} is missing: {view and (view.state, view.reason)}, {server}")
            elif not _is_right(view, server, revision):
                found.append(f"{name} should serve {revision}: {view.state} {view.serving} {view.reason}, {server}")
        known = {f"{PROJECT}/{name}" for name in self.wanted}
        return [*found, *(f"{key} is an orphan" for key in self.target.servers if key not in known), *map(str, views)]


def _is_right(view: DeploymentView, server: FakeServer, revision: int) -> bool:
    """Whether a deployment has converged: a broken revision leaves the last one that has served."""
    if revision == BROKEN and view.state == "failed":
        return not view.serving and not server.serving
    is_served = 0 < view.serving < BROKEN if revision == BROKEN else view.serving == revision
    is_quiet = server.phase in (RevisionPhase.READY, RevisionPhase.FAILED) and server.count == 10
    return view.state == "ready" and is_served and server.serving == view.serving and is_quiet


def simulate(seed: int, deployments: int, seconds: float) -> ControlPlane:
    """Run a control plane; return it with its problems."""
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        plane = ControlPlane(seed, deployments, Path(folder))
        plane.run(seconds)
    return plane
