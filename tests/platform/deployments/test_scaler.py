"""How many servers a deployment is to have, where something else than the platform decides."""

from dataclasses import replace
from typing import Any

import pytest
from tests.support.fake_target import FakeTarget

from charonia.platform.deployments.scaler import Scaler
from charonia.platform.deployments.spec import Replicas
from charonia.platform.targets.api import Observed, Replica, RevisionPhase


def test_what_the_cluster_scales_is_left_to_it() -> None:
    seen = Observed(serving=1, wanted_replicas=3, scaled_by="the autoscaler of the cluster")

    told = Scaler(lambda *_: ()).scale(1, "default/reader", FakeTarget(), seen, Replicas(max=5), 0.0)

    assert told == "3 of 1 to 5 servers; the autoscaler of the cluster decides"


class CountingTarget(FakeTarget):
    """Keeps the numbers of servers that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def scale(self, deployment: str, replicas: int) -> str:
        self.asked.append(replicas)
        return ""


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({}, []),
        ({"phase": RevisionPhase.STARTING}, [1]),
        ({"wanted_replicas": 2}, [1]),
        ({"scaled_by": "the autoscaler of the cluster"}, [1]),
        ({"replicas": ()}, [1]),
        ({"replicas": (Replica("1", is_ready=False),)}, [1]),
        ({"replicas": (Replica("1", is_ready=True, doing="it is upgraded"),)}, [1]),
    ],
)
def test_a_fixed_number_is_asked_for_until_it_is_there_and_settled(change: dict[str, Any], asked: list[int]) -> None:
    target = CountingTarget()
    settled = Observed(1, phase=RevisionPhase.READY, wanted_replicas=1, replicas=(Replica("1", is_ready=True),))

    assert Scaler(lambda *_: ()).scale(1, "a/b", target, replace(settled, **change), Replicas(), 0.0) == ""

    assert target.asked == asked
