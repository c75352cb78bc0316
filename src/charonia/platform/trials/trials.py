"""Starts servers of single versions on demand."""

import shutil
import threading
from pathlib import Path

from charonia.core.errors import unavailable
from charonia.platform.database.connection import Database
from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import Workload
from charonia.platform.trials.server import TrialPhase, TrialServer, TrialView

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
        spec = DeploymentSpec("trial", models=(DeployedModel(model, versions=(number,)),), environment=environment)
        with self._database.reading() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            named = self._workloads.named(session, found.id, spec)
        if named.runs_code:
            who.demand_code(project)

        def workload() -> Workload:
            self._workloads.place(named)
            return self._workloads.workload("trials", 0, named)

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
            audit.note(session, who, "version.try", f"{project}/{model}/{number}", project_id=found.id)

    def look(self, who: Principal, project: str, model: str, number: int) -> tuple[TrialView, str]:
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
