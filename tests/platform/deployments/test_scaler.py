"""How many servers a deployment is to have, where something else than the platform decides."""

from tests.support.fake_target import FakeTarget

from charonia.platform.deployments.replica_rule import ReplicaBounds
from charonia.platform.deployments.scaler import Scaler
from charonia.platform.targets.api import Observed


def test_what_the_cluster_scales_is_left_to_it() -> None:
    seen = Observed(serving=1, wanted_replicas=3, scaled_by="the autoscaler of the cluster")

    told = Scaler(lambda *_: ()).scale(1, "default/reader", FakeTarget(), seen, ReplicaBounds(1, 5), 0.0)

    assert told == "3 of 1 to 5 servers; the autoscaler of the cluster decides"
