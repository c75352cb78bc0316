"""The conformance suite of targets: the specification of `charonia.platform.targets.api` as tests.

A target's tests derive a class and provide the case:

    class TestMyTarget(TargetSuite):
        @pytest.fixture
        def target_case(self) -> TargetCase:
            return TargetCase(make=MyTarget, workload=..., broken=..., slow=..., wait=...)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from charonia.core.errors import ServingError
from charonia.platform.deployments.spec import Replicas
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase, Workload


@dataclass(frozen=True, slots=True)
class TargetCase:
    """A target, and what to run there.

    Attributes:
        make: Creates the target. A second one adopts running deployments, as after a restart of the platform.
        workload: Returns a workload by the number of its revision. Different revisions differ in their content.
        broken: Returns a workload that can never be ready.
        slow: Returns a workload that takes longer to be ready than the whole test.
        wait: Lets time pass until a condition holds, and returns whether it does.
        scale: Scales a deployment; replaced for targets that scale by themselves.
    """

    make: Callable[[], DeploymentTarget]
    workload: Callable[[int], Workload]
    broken: Callable[[int], Workload]
    slow: Callable[[int], Workload]
    wait: Callable[[Callable[[], bool]], bool]
    scale: Callable[[DeploymentTarget, str, int], object] = lambda target, deployment, replicas: target.scale(
        deployment, replicas
    )

    def apply(self, target: DeploymentTarget, workload: Workload) -> None:
        """Apply a workload, retrying until the target has finished the previous change."""

        def is_begun() -> bool:
            try:
                target.apply(workload)
            except ServingError:
                return False
            return True

        assert self.wait(is_begun), "apply: the target never takes it"

    def serves(self, target: DeploymentTarget, deployment: str, revision: int, replicas: int = 1) -> Observed:
        """Wait until a revision serves and is ready, with so many servers."""

        def is_serving() -> bool:
            self.scale(target, deployment, replicas)
            seen = target.observe(deployment)
            return (
                seen.serving == revision
                and (len(seen.replicas), seen.wanted_replicas) == (replicas, replicas)
                and seen.phase is RevisionPhase.READY
                and all(replica.is_ready for replica in seen.replicas)
            )

        assert self.wait(is_serving), f"expected revision {revision} to serve, got {target.observe(deployment)}"
        return target.observe(deployment)

    def ends(self, target: DeploymentTarget, deployment: str) -> None:
        """Stop a deployment, and wait until it has ended."""

        def is_gone() -> bool:
            seen = target.observe(deployment)
            if seen.phase is not RevisionPhase.ABSENT or seen.serving:
                target.stop(deployment)
                return False
            return True

        assert self.wait(is_gone), f"stop: it never ends, got {target.observe(deployment)}"


def _scalable(case: TargetCase) -> list[Workload]:
    """Return two workloads that may have three servers, and one that can never be ready."""
    workloads = [case.workload(1), case.workload(2), case.broken(3)]
    return [replace(one, spec=one.spec.model_copy(update={"replicas": Replicas(max=3)})) for one in workloads]


class TargetSuite:
    """The tests. A derived class has a fixture `target_case`."""

    def test_there_is_nothing_of_a_deployment_that_was_never_applied(self, target_case: TargetCase) -> None:
        target, name = target_case.make(), target_case.workload(1).deployment

        target.abandon(name)
        target.set_keys(name, [])

        assert target.observe(name) == Observed()
        assert name not in target.deployments()

    def test_a_revision_gets_ready_and_is_adopted_and_the_next_one_takes_its_place(
        self, target_case: TargetCase
    ) -> None:
        target, first = target_case.make(), target_case.workload(1)
        name = first.deployment

        assert list(target.problems(first)) == []
        target_case.apply(target, first)
        seen = target_case.serves(target_case.make(), name, 1)  # by another one, which did not begin it
        target.apply(first)  # changes nothing
        assert target.observe(name) == seen
        assert seen.replicas
        assert seen.http
        assert list(target.deployments()) == [name]

        served: set[int] = set()
        target_case.apply(target, target_case.workload(2))

        def is_over() -> bool:
            served.add(target.observe(name).serving)
            return 2 in served

        assert target_case.wait(is_over), target.observe(name)
        assert served == {1, 2}  # at no time does nothing serve
        assert target_case.serves(target, name, 2).http == seen.http

    def test_a_revision_that_fails_leaves_the_one_before_and_says_why(self, target_case: TargetCase) -> None:
        target, first = target_case.make(), target_case.workload(1)
        name = first.deployment
        target_case.apply(target, first)
        target_case.serves(target, name, 1)

        target_case.apply(target, target_case.broken(2))
        assert target_case.wait(lambda: target.observe(name).phase is RevisionPhase.FAILED), target.observe(name)
        seen = target.observe(name)

        assert (seen.serving, seen.applying) == (1, 2)
        assert seen.reason
        target_case.apply(target, target_case.workload(3))
        target_case.serves(target, name, 3)

    def test_a_first_revision_that_fails_says_why_and_the_next_one_is_tried(self, target_case: TargetCase) -> None:
        target, name = target_case.make(), target_case.workload(1).deployment

        target_case.apply(target, target_case.broken(1))
        assert target_case.wait(lambda: target.observe(name).phase is RevisionPhase.FAILED), target.observe(name)
        seen = target.observe(name)

        assert (seen.serving, seen.applying) == (0, 1)
        assert seen.reason
        target_case.apply(target, target_case.workload(2))
        target_case.serves(target, name, 2)

    def test_what_is_given_up_leaves_the_one_before(self, target_case: TargetCase) -> None:
        target, first = target_case.make(), target_case.workload(1)
        name = first.deployment
        target_case.apply(target, first)
        target_case.serves(target, name, 1)
        target_case.apply(target, target_case.slow(2))
        assert target.observe(name).applying == 2

        def is_given_up() -> bool:
            seen = target.observe(name)
            if seen.phase is RevisionPhase.STARTING:
                target.abandon(name)
                return False
            return seen.serving == 1

        assert target_case.wait(is_given_up), target.observe(name)
        target_case.apply(target, target_case.workload(3))
        target_case.serves(target, name, 3)

    def test_it_is_scaled_and_all_servers_get_the_next_revision(self, target_case: TargetCase) -> None:
        target, (first, second, broken) = target_case.make(), _scalable(target_case)
        name = first.deployment
        assert target.scale(name, 1) == ""
        target_case.apply(target, first)
        one = target_case.serves(target, name, 1)

        three = target_case.serves(target, name, 1, replicas=3)
        assert len({replica.name for replica in three.replicas}) == 3
        assert (three.http, three.grpc) == (one.http, one.grpc)
        target_case.apply(target, second)
        target_case.serves(target_case.make(), name, 2, replicas=3)  # by another one, which did not begin it
        target_case.apply(target, broken)

        def has_failed() -> bool:
            target_case.scale(target, name, 3)
            return target.observe(name).phase is RevisionPhase.FAILED

        assert target_case.wait(has_failed), target.observe(name)
        assert target.observe(name).serving == 2
        assert all(replica.is_ready for replica in target.observe(name).replicas)
        target_case.apply(target, replace(first, revision=4))
        assert target_case.serves(target, name, 4, replicas=1).http == one.http
        target_case.ends(target, name)

    def test_a_deployment_that_was_stopped_keeps_its_address_until_it_is_removed(self, target_case: TargetCase) -> None:
        target, first = target_case.make(), target_case.workload(1)
        name = first.deployment
        target_case.apply(target, first)
        seen = target_case.serves(target, name, 1)

        target_case.ends(target, name)
        target_case.apply(target, first)
        again = target_case.serves(target, name, 1)
        target_case.ends(target, name)
        target.remove(name)
        target.remove(name)

        assert (again.http, again.grpc) == (seen.http, seen.grpc)
        assert target.observe(name) == Observed()
        assert list(target.deployments()) == []
