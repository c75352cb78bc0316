"""Wires the parts that manage the deployments of a platform, and records the outcome of canary plans."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import select

from charonia.core.errors import Code, ServingError
from charonia.platform.database.connection import Database
from charonia.platform.database.lease import PlatformLease, RepeatedStep
from charonia.platform.database.tables import DeploymentRow, ProjectRow
from charonia.platform.deployments.changes import DeploymentChanges
from charonia.platform.deployments.collector import Collector, FigureHistory
from charonia.platform.deployments.reads import DeploymentReads
from charonia.platform.deployments.reconciler import Reconciler
from charonia.platform.deployments.scaler import Scaler
from charonia.platform.deployments.servers import UNDER_WAY, DeploymentServers, ServerKeys
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people import keys
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.targets.api import DeploymentTarget

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Interval between polls of running plans."""


class _Plan(NamedTuple):
    """A running canary plan."""

    deployment_id: int
    project: str
    name: str
    model: str
    who: str
    waiting: Mapping[str, Any]
    """The plan to begin, and the revision that must serve before; {} for a plan that has begun."""


class Canaries:
    """Polls the canary plans of deployments."""

    def __init__(self, database: Database, reads: DeploymentReads, servers: DeploymentServers) -> None:
        self._database = database
        self._reads = reads
        self._servers = servers

    def step(self) -> None:
        for plan in self._plans():
            try:
                self._check_rollout(plan)
            except ServingError as error:
                if error.code is Code.NOT_FOUND:
                    self._discard(plan)
                elif error.code is not Code.UNAVAILABLE:
                    _log.error("canary of '%s' in '%s/%s': %s", plan.model, plan.project, plan.name, error)
                    if plan.waiting:
                        self._discard(plan)

    def _check_rollout(self, plan: _Plan) -> None:
        if plan.waiting:
            with self._database.reading() as session:
                who = keys.standing_deployer(session, plan.waiting.get("by", ""), plan.who, plan.project)
            view = self._reads.get(who, plan.project, plan.name)
            revision = plan.waiting["revision"]
            if view.serving == revision == view.wanted and view.state in ("ready", "degraded"):
                begun = {"canary": plan.waiting["plan"]}
                self._servers.set_traffic(who, plan.project, plan.name, plan.model, begun)
            elif view.wanted != revision:  # it has failed, or another one follows it
                self._discard(plan)
            return
        # The servers have carried it out: what is left is to record it.
        who = Principal.of(plan.who, [Grant(ProjectRole.DEPLOYER, plan.project, may_run_code=True)])
        traffic = self._servers.traffic(who, plan.project, plan.name, plan.model)
        canary = traffic.get("canary")
        if canary is not None and canary["state"] in UNDER_WAY:
            return
        if canary is not None:  # otherwise its server has exited, and the plan with it
            self._keep(who, plan, canary, traffic["weights"])
        self._discard(plan)

    def _keep(self, who: Principal, plan: _Plan, canary: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        note = f"canary of version {canary['plan']['version']} of '{plan.model}': {canary['state']}: {canary['reason']}"
        self._servers.set_traffic(who, plan.project, plan.name, plan.model, {"weights": weights}, note=note)

    def _plans(self) -> list[_Plan]:
        query = select(DeploymentRow.id, ProjectRow.name, DeploymentRow.name, DeploymentRow.canaries).join(
            ProjectRow, ProjectRow.id == DeploymentRow.project_id
        )
        with self._database.reading() as session:
            return [
                _Plan(number, project, name, model, *((kept, {}) if isinstance(kept, str) else (kept["who"], kept)))
                for number, project, name, canaries in session.execute(query)
                for model, kept in canaries.items()
            ]

    def _discard(self, plan: _Plan) -> None:
        with self._database.transaction() as session:
            row = session.get(DeploymentRow, plan.deployment_id)
            if row is not None:
                row.canaries = {model: kept for model, kept in row.canaries.items() if model != plan.model}


class Deployments:
    """The deployments of a platform."""

    def __init__(
        self,
        database: Database,
        targets: Mapping[str, DeploymentTarget],
        workloads: Workloads,
        lease: PlatformLease | None = None,
    ) -> None:
        self._database = database
        self._workloads = workloads
        self.targets = tuple(targets)
        lease = lease or PlatformLease(database)
        is_held = lease.is_held
        self.collector = Collector(self._metrics_pages, FigureHistory(database), may_write=is_held)
        self.reconciler = Reconciler(database, targets, workloads, Scaler(self.collector.since), lease)
        self.reads = DeploymentReads(database, self.collector)
        self.changes = DeploymentChanges(database, targets, workloads, self.reconciler.wake)
        self.keys = ServerKeys(database, targets, workloads, self.collector.latest)
        self.servers = DeploymentServers(database, targets, self.reads, self.changes)
        self.canaries = Canaries(database, self.reads, self.servers)
        self._canaries = RepeatedStep("canaries", self.canaries.step, LOOK_S, is_held)

    def start(self) -> None:
        """Begin to reconcile, and to collect figures."""
        with self._database.reading() as session:
            self._workloads.sweep(session)
        self.reconciler.start()
        self.collector.start()
        self._canaries.start()

    def close(self) -> None:
        """Stop; deployments continue to run."""
        self.reconciler.close()
        self.collector.close()
        self._canaries.close()

    def _metrics_pages(self) -> Mapping[int, Sequence[str]]:
        with self._database.reading() as session:
            query = select(DeploymentRow.id, DeploymentRow.observed)
            return {number: _pages(observed) for number, observed in session.execute(query)}


def _pages(observed: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics addresses of all servers, or of the one page that covers them."""
    own = [replica["metrics"] for replica in observed.get("replicas", ()) if replica.get("metrics")]
    return own or [page for page in [observed.get("metrics")] if page]
