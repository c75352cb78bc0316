"""The target `kubernetes` keeps to what targets promise, in a cluster of an API server over HTTP."""

import pytest
from tests.platform.targets.kubernetes.conftest import ClusterStage, workload
from tests.support.kubernetes_api import Plain
from tests.support.kubernetes_controllers import Fate
from tests.support.process import eventually

from charonia.platform.targets.api import Workload
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

        stage.nodes.fate = fate
        return TargetCase(
            make=stage.target,
            workload=lambda revision: with_fate(revision, Fate.READY),
            broken=lambda revision: with_fate(revision, Fate.CRASHES),
            slow=lambda revision: with_fate(revision, Fate.SLOW),
            wait=lambda condition: eventually(condition, 10),
        )
