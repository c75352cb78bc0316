"""A cluster of an API server and controllers for tests, and targets in it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes_api import NAMESPACE, KubernetesApi, kubeconfig, kubernetes_api
from tests.support.kubernetes_controllers import Controllers, controllers
from tests.support.models import identity_pbtxt
from tests.support.process import eventually

from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import PlacedModel, RevisionPhase, Workload, key_file
from charonia.platform.targets.kserve.objects import kserve_target
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.objects import ServiceAddresses, keys_name, object_name
from charonia.platform.targets.kubernetes.repositories import ModelRepositories, repository_folder
from charonia.platform.targets.kubernetes.target import KubernetesTarget

NAME = "default/reader"
OBJECT = object_name(NAME)


@dataclass
class MemoryRepositories(ModelRepositories):
    """Repositories that are records. See `ModelRepositories`."""

    published: list[str] = field(default_factory=list)
    configs: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def problem(self) -> str:
        return ""

    def address(self, workload: Workload) -> str:
        return f"s3://bucket/{repository_folder(workload)}"

    def publish(self, workload: Workload) -> None:
        self.published.append(self.address(workload))

    def configure(self, address: str, configs: Mapping[str, str]) -> None:
        self.configs[address] = dict(configs)

    def remove_except(self, deployment: str, kept: Collection[str]) -> None:
        for address in [each for each in self.configs if f"/{deployment}/" in each and each not in kept]:
            del self.configs[address]


def rendered(workload: Workload, repository: str) -> Sequence[Mapping[str, Any]]:
    """Return objects as the chart has them, in little."""
    name = object_name(workload.deployment)
    spec = workload.spec
    selector = {"app.kubernetes.io/instance": name}
    container: dict[str, Any] = {
        "name": "server",
        "image": "charonia:1.0",
        "args": [f"--model-repository={repository}"],
        "resources": {"limits": {"memory": f"{spec.device.memory_mib or 100}Mi"}},
    }
    container["args"].append(f"--api-keys=/etc/{keys_name(name)}/{key_file(spec)}")
    template = {"metadata": {"labels": selector}, "spec": {"containers": [container]}}
    is_scaled = spec.replicas.max > spec.replicas.min
    replicas = {} if is_scaled else {"replicas": spec.replicas.min}
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "Helm"}},
            "spec": {**replicas, "selector": {"matchLabels": selector}, "template": template},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": selector, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
        },
    ]
    if is_scaled:
        bounds = {"minReplicas": spec.replicas.min, "maxReplicas": spec.replicas.max}
        metadata = {"name": name}
        objects.append(
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": metadata,
                "spec": {**bounds, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}},
            }
        )
    return objects


def workload(revision: int, *, version: int = 0, traffic: str = "", **more: Any) -> Workload:
    """Return a workload with one model, by default of the version that is the number of its revision."""
    number = version or revision
    config = identity_pbtxt("identity", dims=(4,))
    if traffic:
        config += f"parameters {{ key: \"traffic\" value {{ string_value: '{traffic}' }} }}\n"
    model = PlacedModel("echo", {number: Path("nowhere")}, config, 1, {number: f"content {number}"})
    spec = DeploymentSpec(
        name="reader", target="kubernetes", models=(DeployedModel(name="echo", versions=(number,)),), **more
    )
    return Workload(NAME, revision, spec, (model,))


def serves(target: KubernetesTarget, revision: int) -> bool:
    """Wait until a revision serves, and return whether it does."""

    def is_so() -> bool:
        seen = target.observe(NAME)
        return (seen.serving, seen.phase) == (revision, RevisionPhase.READY)

    return eventually(is_so)


@dataclass
class ClusterStage:
    """A cluster, and what targets in it have."""

    api: KubernetesApi
    nodes: Controllers
    repositories: MemoryRepositories
    config: Path
    made: list[KubernetesTarget] = field(default_factory=list)

    def target(self, owner: str = "platform", render: Callable[..., Any] = rendered) -> KubernetesTarget:
        cluster = Cluster(KubernetesSettings(str(self.config)))
        addresses = ServiceAddresses(NAMESPACE, self.api.url)
        self.made.append(KubernetesTarget(cluster, owner, render, self.repositories, addresses))
        return self.made[-1]

    def kserve_target(self, owner: str = "platform", mode: str = "standard") -> KubernetesTarget:
        settings = KubernetesSettings(str(self.config), proxy=self.api.url, store_secret="store", kserve_mode=mode)
        self.made.append(kserve_target(Cluster(settings), settings, owner, self.repositories))
        return self.made[-1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[ClusterStage]:
    with kubernetes_api() as api, controllers(api) as nodes:
        config = tmp_path / "kubeconfig"
        config.write_text(kubeconfig(api))
        stage = ClusterStage(api, nodes, MemoryRepositories(), config)
        yield stage
        for target in stage.made:
            target.close()
