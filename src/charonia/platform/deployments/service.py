"""Wires the parts that manage the deployments of a platform."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select

from charonia.platform.database.connection import Database
from charonia.platform.database.tables import DeploymentRow
from charonia.platform.deployments.canaries import Canaries
from charonia.platform.deployments.changes import DeploymentChanges
from charonia.platform.deployments.collector import Collector
from charonia.platform.deployments.reads import DeploymentReads
from charonia.platform.deployments.reconciler import Reconciler
from charonia.platform.deployments.scaler import Scaler
from charonia.platform.deployments.server_keys import ServerKeys
from charonia.platform.deployments.servers import DeploymentServers
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.targets.api import DeploymentTarget


class Deployments:
    """The deployments of a platform."""

    def __init__(self, database: Database, targets: Mapping[str, DeploymentTarget], workloads: Workloads) -> None:
        self._database = database
        self._workloads = workloads
        self.targets = tuple(targets)
        self.collector = Collector(self._metrics_pages)
        self.reconciler = Reconciler(database, targets, workloads, Scaler(self.collector.since))
        self.reads = DeploymentReads(database, self.collector)
        self.changes = DeploymentChanges(database, targets, workloads, self.reconciler.wake)
        self.keys = ServerKeys(database, targets, workloads)
        self.servers = DeploymentServers(database, targets, self.reads, self.changes)
        self.canaries = Canaries(database, self.servers)

    def start(self) -> None:
        """Begin to reconcile, and to collect figures."""
        with self._database.reading() as session:
            self._workloads.sweep(session)
        self.reconciler.start()
        self.collector.start()
        self.canaries.start()

    def close(self) -> None:
        """Stop; deployments continue to run."""
        self.reconciler.close()
        self.collector.close()
        self.canaries.close()

    def _metrics_pages(self) -> Mapping[int, Sequence[str]]:
        with self._database.reading() as session:
            query = select(DeploymentRow.id, DeploymentRow.observed)
            return {number: _pages(observed) for number, observed in session.execute(query)}


def _pages(observed: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics addresses of all servers, or of the one page that covers them."""
    own = [replica["metrics"] for replica in observed.get("replicas", ()) if replica.get("metrics")]
    return own or [page for page in [observed.get("metrics")] if page]
