"""The target `kubernetes` keeps to what targets promise, in a cluster of an API server over HTTP."""

import pytest
from tests.platform.targets.kubernetes.conftest import ClusterStage, workload
from tests.support.kubernetes_api import Plain
from tests.support.kubernetes_controllers import Fate
from tests.support.process import eventually

from charonia.platform.targets.api import DeploymentTarget, Workload
from charonia.platform.targets.kubernetes.objects import object_name
from charonia.testing.target_suite import TargetCase, TargetSuite


class TestKubernetesTarget(TargetSuite):
    @pytest.fixture
    def target_case(self, stage: ClusterStage) -> TargetCase:
        fates: dict[str, Fate] = {}

        def fate(pod: Plain) -> Fate:
            return fates.get(pod["metadata"]["annotations"]["charonia.dev/template"], Fate.READY)

        def with_fate(revision: int, fate: Fate) -> Workload:
            fates[str(revision)] = fate
            return workload(revision)

        def scale(target: DeploymentTarget, deployment: str, replicas: int) -> None:
            assert target.scale(deployment, replicas) == ""
            name, path = object_name(deployment), ("spec", "replicas")
            present = stage.api.get("deployments", name)
            if stage.api.get("horizontalpodautoscalers", name) and present and present["spec"]["replicas"] != replicas:
                stage.api.change("deployments", name, path, replicas, manager="kube-controller-manager")

        stage.nodes.fate = fate
        return TargetCase(
            make=stage.target,
            workload=lambda revision: with_fate(revision, Fate.READY),
            broken=lambda revision: with_fate(revision, Fate.CRASHES),
            slow=lambda revision: with_fate(revision, Fate.SLOW),
            wait=lambda condition: eventually(condition, 10),
            scale=scale,
        )
