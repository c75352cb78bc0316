"""Tries versions of models before they are deployed: each in a server that runs on demand, while it is used."""

import hashlib
import logging
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from charonia.core.errors import ServingError, unavailable
from charonia.platform.database.connection import Database
from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.deployments.workloads import Workloads, with_steps
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import Workload, make_model_folder
from charonia.platform.targets.local_server import last_log_line, why_ended
from charonia.platform.targets.server_calls import server_is_ready
from charonia.platform.tasks.runner import run_process
from charonia.python_command import python_module

_log = logging.getLogger(__name__)

START_S_MAX = 300.0
"""Time limit for a version to become ready."""

IDLE_S_MAX = 600.0
"""A server that has not been used for this long is stopped."""

LOG_LINES_MAX = 500
"""Lines of its output that are kept."""

_LINE_CHARS_MAX = 16 * 1024
_KEY_BYTES = 32
_HOST = "127.0.0.1"
_ADDRESS = re.compile(r"Started HTTPService at (\S+:\d+)")


class TrialPhase(StrEnum):
    """State of a trial."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TrialView:
    """A snapshot of a trial."""

    phase: TrialPhase = TrialPhase.NONE
    doing: str = ""
    reason: str = ""
    seconds: float = 0.0


class TrialServer:
    """A server of one version. Any thread may read its state.

    Args:
        folder: For its files, which are removed when it exits.
        workload: Fetches the version's files, and returns the workload; called in a separate thread.
        idle_s_max: It is stopped when it was not used for this long.
    """

    def __init__(
        self,
        folder: Path,
        workload: Callable[[], Workload],
        isolation: Isolation,
        *,
        start_s_max: float = START_S_MAX,
        idle_s_max: float = IDLE_S_MAX,
    ) -> None:
        self.address = ""
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self._folder = folder
        self._workload = workload
        self._isolation = isolation
        self._start_s_max, self._idle_s_max = start_s_max, idle_s_max
        self._phase, self._reason, self._doing = TrialPhase.STARTING, "", "fetching the files of the version"
        self._hidden = ""
        self._lines: deque[str] = deque(maxlen=LOG_LINES_MAX)
        self._began = self._used = time.monotonic()
        self._ending = threading.Event()
        # The kernel kills the server together with the thread that started it, so this thread must last.
        self._thread = threading.Thread(target=self._run, name="trial", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()

    def join(self) -> None:
        self._thread.join()

    def use(self) -> None:
        self._used = time.monotonic()

    @property
    def is_open(self) -> bool:
        return self._phase in (TrialPhase.STARTING, TrialPhase.READY) and not self._ending.is_set()

    @property
    def log(self) -> str:
        return "".join(tuple(self._lines))

    def view(self) -> TrialView:
        """Return its state."""
        phase = TrialPhase.NONE if self._ending.is_set() else self._phase
        return TrialView(phase, self._doing, self._reason, time.monotonic() - self._began)

    def _run(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
                workload = self._workload()
                with self._isolation.room(workload.project_id) as room:
                    self._serve(self._command(Path(folder), workload, room), room)
        except (ServingError, OSError) as error:
            self._fail(str(error))
        except Exception as error:
            _log.exception("a trial has failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _command(self, folder: Path, workload: Workload, room: PrivateFolders) -> Sequence[str]:
        self._hidden = f"{folder / 'repository'}/"
        for model in workload.models:
            make_model_folder(folder / "repository", model)
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text(f"platform admin sha256:{hashlib.sha256(self.key.encode()).hexdigest()}\n", encoding="utf-8")
        self._isolation.give(keys, workload.project_id)
        command = python_module(
            "charonia", "serve", f"--model-repository={folder / 'repository'}", f"--host={_HOST}", "--port=0",
            "--allow-grpc=false", "--allow-metrics=false", f"--api-keys={keys}",
            python=workload.python or sys.executable,
        )  # fmt: skip
        access = SandboxAccess(read=[folder / "repository", keys], python=workload.python, project=workload.project_id)
        return self._isolation.command(command, room, access)

    def _serve(self, command: Sequence[str], room: PrivateFolders) -> None:
        """Run the server until it exits, is idle for too long, or is stopped."""
        self._doing = "the server starts"
        variables = {**self._isolation.environment(room), "CUDA_VISIBLE_DEVICES": ""}
        if run_process(command, self._said, self._is_over, variables, room.home) is not None:
            self._fail(why_ended(self.log))

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._phase is TrialPhase.READY:
            if now - self._used > self._idle_s_max:
                self._ending.set()
        elif self.address and server_is_ready(self.address):
            self._used = now
            self._phase = TrialPhase.READY
        elif now - self._began > self._start_s_max:
            self._fail(f"it was not ready after {self._start_s_max:.0f} s: {self._doing}")
            return True
        return self._ending.is_set()

    def _said(self, line: str) -> None:
        line = line[:_LINE_CHARS_MAX].replace(self._hidden, "")
        self._lines.append(f"{line}\n")
        if found := _ADDRESS.search(line):
            self.address = f"http://{found[1]}"
        if self._phase is TrialPhase.STARTING:
            self._doing = last_log_line(line) or self._doing

    def _fail(self, reason: str) -> None:
        self._phase, self._reason = TrialPhase.FAILED, reason


TRIALS_MAX = 4
"""Servers that run at the same time."""

KEPT_MAX = 50
"""Ended trials that are remembered."""

_Key = tuple[str, str, int]


class Trials:
    """The versions being tried. Any thread may call."""

    def __init__(self, database: Database, workloads: Workloads, folder: Path, isolation: Isolation) -> None:
        self._database = database
        self._workloads = workloads
        self._folder = folder
        self._isolation = isolation
        self._lock = threading.Lock()
        self._servers: dict[_Key, TrialServer] = {}
        shutil.rmtree(folder, ignore_errors=True)  # of a platform that was killed; its servers ended with it

    def start(self, who: Principal, project: str, model: str, number: int, environment: str = "") -> None:
        """Start the server of a version, unless it is running."""
        spec = DeploymentSpec(
            name="trial", models=(DeployedModel(name=model, versions=(number,)),), environment=environment
        )
        with self._database.reading() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            whole = with_steps(session, found.id, spec).spec
            made = self._workloads.workload(session, found.id, "trials", 0, whole)
        if made.runs_code:
            who.demand_code(project)

        def workload() -> Workload:
            self._workloads.place(made)
            return made

        key = (project, model, number)
        with self._lock:
            present = self._servers.pop(key, None)
            if present is not None and present.is_open:
                self._servers[key] = present
                return
            open_ones = [f"version {at[2]} of '{at[1]}'" for at, server in self._servers.items() if server.is_open]
            if len(open_ones) >= TRIALS_MAX:
                raise unavailable(
                    f"{TRIALS_MAX} versions are tried already: {', '.join(open_ones)}",
                    hint="stop one on its page, or wait until one is idle",
                )
            for old in [at for at, server in self._servers.items() if not server.is_open][:-KEPT_MAX]:
                del self._servers[old]
            self._servers[key] = server = TrialServer(self._folder, workload, self._isolation)
            server.start()
        with self._database.transaction() as session:
            audit.record(session, who, "version.try", f"{project}/{model}/{number}", project_id=found.id)

    def state(self, who: Principal, project: str, model: str, number: int) -> tuple[TrialView, str]:
        """Return the state of the trial of a version, and the end of its log."""
        who.demand(ProjectRole.DEPLOYER, project)
        server = self._servers.get((project, model, number))
        return (server.view(), server.log) if server is not None else (TrialView(), "")

    def use(self, who: Principal, project: str, model: str, number: int) -> tuple[str, str]:
        """Return the address of the server of a version and a key for it, and extend its life."""
        who.demand(ProjectRole.DEPLOYER, project)
        server = self._servers.get((project, model, number))
        if server is None or server.view().phase is not TrialPhase.READY:
            raise unavailable(f"version {number} of '{model}' has no running server", hint="start it again")
        server.use()
        return server.address, server.key

    def stop(self, who: Principal, project: str, model: str, number: int) -> None:
        """Stop the server of a version, if it runs."""
        who.demand(ProjectRole.DEPLOYER, project)
        with self._lock:
            server = self._servers.pop((project, model, number), None)
        if server is not None:
            server.end()

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.end()
        for server in servers:
            server.join()
