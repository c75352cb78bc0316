"""The target of records that tests use keeps to what targets promise."""

from collections.abc import Callable

import pytest
from tests.support.fake_target import FakeTarget

from charonia.platform.deployments.spec import DeploymentSpec
from charonia.platform.targets.api import Workload
from charonia.testing.target_suite import TargetCase, TargetSuite

SLOW_S = 1e9


class TestFakeTarget(TargetSuite):
    @pytest.fixture
    def target_case(self) -> TargetCase:
        target = FakeTarget()

        def wait(condition: Callable[[], bool]) -> bool:
            for _ in range(100):
                if condition():
                    return True
                target.pass_s(0.5)
            return False

        def workload(revision: int) -> Workload:
            target.start_s = 1.0
            return Workload("default/reader", revision, DeploymentSpec.model_construct(name="reader"), ())

        def broken(revision: int) -> Workload:
            target.broken[revision] = "no such file"
            return workload(revision)

        def slow(revision: int) -> Workload:
            found = workload(revision)
            target.start_s = SLOW_S
            return found

        return TargetCase(lambda: target, workload, broken, slow, wait)
