"""Opens the target `kubernetes` as the settings of the platform say."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.data_folder import write_private
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.chart import Chart
from charonia.platform.targets.kubernetes.marks import Plain, object_name
from charonia.platform.targets.kubernetes.repositories import open_repositories
from charonia.platform.targets.kubernetes.service_addresses import ServiceAddresses
from charonia.platform.targets.kubernetes.target import KubernetesTarget
from charonia.platform.targets.kubernetes.values import chart_values, usual_values

OWNER_FILE = "kubernetes-owner"
"""File of the data folder with the name of this platform among others, where no setting has it."""


def open_kubernetes(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target. It asks the cluster nothing yet.

    Args:
        settings: Of the cluster.
        store: The artifact store.
        data: The data folder of the platform.

    Raises:
        ServingError: INVALID_ARG where the kubeconfig cannot be used; UNSUPPORTED without the extra.
    """
    cluster = Cluster(settings)
    chart = Chart(settings.chart, settings.helm, settings.values)

    def render(workload: Workload, repository: str) -> Sequence[Plain]:
        name = object_name(workload.deployment)
        values = chart_values(workload, repository, settings)
        return chart.render(name, cluster.namespace, usual_values(workload), values)

    return KubernetesTarget(
        cluster,
        owner_of(settings, data),
        render,
        open_repositories(store, settings.claim),
        ServiceAddresses(cluster.namespace, settings.proxy),
        lambda _: chart.problem(),
    )


def owner_of(settings: KubernetesSettings, data: Path) -> str:
    """Return the name of this platform among all that use the namespace: the setting, or what is kept in its data."""
    if settings.owner:
        return settings.owner
    path = data / OWNER_FILE
    if not path.exists():
        write_private(path, secrets.token_hex(8))
    return path.read_text().strip()
