"""A target whose servers are records: what a test lets happen happens when `pass_s` lets time pass."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from charonia.core.errors import unavailable
from charonia.platform.targets.api import Observed, Replica, RevisionPhase, Workload


@dataclass
class FakeServer:
    serving: int = 0
    applying: int = 0
    phase: RevisionPhase = RevisionPhase.ABSENT
    reason: str = ""
    left_s: float = 0.0
    is_well: bool = True
    count: int = 1
    most: int = 1
    keys: Sequence[str] = ()


@dataclass
class FakeTarget:
    """See `DeploymentTarget`.

    Attributes:
        start_s: How long a revision takes to be ready.
        stop_s: How long a server takes to end.
        broken: Revisions that fail when they have started, with the reason.
        room: How many servers fit.
        applied: Workloads in the order in which they were begun.
    """

    name: str = "local"
    start_s: float = 1.0
    stop_s: float = 1.0
    broken: dict[int, str] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    is_away: bool = False
    room: int = 10
    servers: dict[str, FakeServer] = field(default_factory=dict)
    applied: list[Workload] = field(default_factory=list)
    looks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problems(self, workload: Workload) -> Sequence[str]:
        return self.misfits

    def apply(self, workload: Workload) -> None:
        self._reach()
        with self.lock:
            server = self.servers.setdefault(workload.deployment, FakeServer())
            number = workload.revision
            is_under_way = server.applying == number and server.phase is RevisionPhase.STARTING
            if is_under_way or (server.serving == number and not server.applying):
                return
            if server.phase is RevisionPhase.ENDING or (server.applying and server.phase is RevisionPhase.STARTING):
                raise unavailable("it is not done")
            server.applying, server.phase, server.left_s = number, RevisionPhase.STARTING, self.start_s
            server.keys = workload.keys
            server.most = workload.spec.replicas.max
            server.count = min(max(server.count, workload.spec.replicas.min), server.most)
            self.applied.append(workload)

    def scale(self, deployment: str, replicas: int) -> str:
        self._reach()
        if replicas > self.room:
            return f"there is room for {self.room}"
        if deployment in self.servers:
            self.servers[deployment].count = replicas
        return ""

    def abandon(self, deployment: str) -> None:
        self._reach()
        server = self.servers.get(deployment, FakeServer())
        if server.phase is RevisionPhase.STARTING:
            server.applying = 0
            server.phase = RevisionPhase.READY if server.serving else RevisionPhase.ABSENT

    def observe(self, deployment: str) -> Observed:
        self._reach()
        self.looks += 1
        server = self.servers.get(deployment, FakeServer())
        if server.phase is RevisionPhase.ABSENT:
            return Observed()
        reason = "" if server.is_well else "it does not answer"
        replicas = [Replica(f"fake {number}", server.is_well, reason=reason) for number in range(1, server.count + 1)]
        address = "http://127.0.0.1:1" if server.serving else ""
        return Observed(
            serving=server.serving,
            applying=server.applying,
            phase=server.phase,
            reason=server.reason,
            http=address,
            replicas=replicas if server.serving else (),
            wanted_replicas=server.count,
        )

    def stop(self, deployment: str) -> None:
        self._reach()
        server = self.servers[deployment]
        if server.phase is not RevisionPhase.ENDING:
            server.phase, server.left_s = RevisionPhase.ENDING, self.stop_s

    def remove(self, deployment: str) -> None:
        self._reach()
        self.servers.pop(deployment, None)

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        if deployment in self.servers:
            self.servers[deployment].keys = keys

    def deployments(self) -> Sequence[str]:
        self._reach()
        return list(self.servers)

    def log(self, deployment: str, lines: int) -> str:
        return "started\n"

    def pass_s(self, seconds: float) -> None:
        """Let time pass: what is starting gets ready or fails, what is ending ends."""
        for server in self.servers.values():
            if server.phase not in (RevisionPhase.STARTING, RevisionPhase.ENDING):
                continue
            server.left_s -= seconds
            if server.left_s <= 0:
                self._ends(server) if server.phase is RevisionPhase.ENDING else self._is_started(server)

    def crash(self, deployment: str) -> None:
        self._ends(self.servers[deployment])

    def _ends(self, server: FakeServer) -> None:
        server.serving = server.applying = 0
        server.phase = RevisionPhase.ABSENT

    def _is_started(self, server: FakeServer) -> None:
        reason = self.broken.get(server.applying)
        if reason is not None:
            server.phase, server.reason = RevisionPhase.FAILED, reason
        else:
            server.serving, server.applying, server.phase, server.reason = server.applying, 0, RevisionPhase.READY, ""

    def _reach(self) -> None:
        if self.is_away:
            raise unavailable("the target cannot be reached")
