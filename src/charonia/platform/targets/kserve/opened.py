"""Opens the target `kserve` as the settings of the platform say."""

from pathlib import Path

from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.kserve.objects import kserve_prepared, kserve_problem, kserve_rendered
from charonia.platform.targets.kserve.own_objects import KserveObjects
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.opened import owner_of
from charonia.platform.targets.kubernetes.repositories import ModelRepositories, open_repositories
from charonia.platform.targets.kubernetes.service_addresses import KserveAddresses
from charonia.platform.targets.kubernetes.target import KubernetesTarget

NAME = "kserve"


def open_kserve(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target. It asks the cluster nothing yet. See `open_kubernetes`."""
    owner = owner_of(settings, data)
    return kserve_target(Cluster(settings), settings, owner, open_repositories(store, settings.claim))


def kserve_target(
    cluster: Cluster, settings: KubernetesSettings, owner: str, repositories: ModelRepositories
) -> KubernetesTarget:
    """Return the target in a namespace.

    Args:
        cluster: The namespace.
        settings: Of the cluster.
        owner: Name of this platform; what the target `kubernetes` has is not of the same owner.
        repositories: Where pods find models.
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
