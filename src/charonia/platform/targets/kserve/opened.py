"""Opens the target `kserve` with the platform's settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.kserve.objects import (
    NOTE,
    as_workload,
    kserve_prepared,
    kserve_problem,
    kserve_rendered,
    note,
)
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.objects import (
    INFERENCE_SERVICE,
    RECORD,
    SECRET,
    KserveAddresses,
    ObjectKind,
    RevisionRecord,
    reference,
)
from charonia.platform.targets.kubernetes.opened import owner_of
from charonia.platform.targets.kubernetes.own_objects import OwnObjects
from charonia.platform.targets.kubernetes.repositories import ModelRepositories, open_repositories
from charonia.platform.targets.kubernetes.rollout import Sight
from charonia.platform.targets.kubernetes.target import KubernetesTarget

NAME = "kserve"


def open_kserve(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target, without contacting the cluster. See `open_kubernetes`."""
    owner = owner_of(settings, data)
    return kserve_target(Cluster(settings), settings, owner, open_repositories(store, settings.claim))


def kserve_target(
    cluster: Cluster, settings: KubernetesSettings, owner: str, repositories: ModelRepositories
) -> KubernetesTarget:
    """Return the target in a namespace.

    Args:
        owner: Name of this platform; the objects of the target `kubernetes` have a different owner.
    """
    return KubernetesTarget(
        cluster,
        f"{owner}.{NAME}",
        lambda workload, repository: kserve_rendered(workload, repository, settings),
        repositories,
        KserveAddresses(cluster.namespace, settings.proxy),
        lambda workload: kserve_problem(workload, settings),
        name=NAME,
        objects=KserveObjects,
        prepare=kserve_prepared,
    )


class KserveObjects(OwnObjects):
    """Reads and writes the objects of deployments. See `OwnObjects`."""

    kinds: ClassVar[Mapping[str, tuple[ObjectKind, str]]] = {
        **OwnObjects.kinds,
        "services": (INFERENCE_SERVICE, ""),
        "notes": (SECRET, f",{RECORD}={NOTE}"),
    }

    def apply_objects(self, record: RevisionRecord, serving: int) -> None:
        """Apply the objects of a record, then record their revision in the note. See `OwnObjects`."""
        for each in record.objects:
            applied = self._cluster.apply(each)
            if reference(each).kind == INFERENCE_SERVICE:
                noted = note(applied, self.owner, record.deployment, record.revision, serving)
                self._cluster.apply(noted, force=True)
        self.forget()

    def look(self, deployment: str, *, is_live: bool = False) -> Sight:
        """Return the state of a deployment. See `OwnObjects`."""
        found = self._found(deployment, is_live=is_live)
        service, noted = (next(iter(found[what]), None) for what in ("services", "notes"))
        return self._sight(as_workload(service, noted, found["workloads"]), found)
