"""Seeded simulations of overload and of unequal clients: who is served, when, and who loses nothing."""

import random
from collections.abc import Callable

import pytest
from tests.support.simulation import Simulation

from charonia.core.request import NO_FLOW, Flow
from charonia.server.rate_limiter.resources import Arbiter, LimitedScheduler, Member, MemberState, Need, ResourcePool
from charonia.server.scheduling.api import BatchPolicy, Cancel, DropReason, QueueLimits, Run, Scheduler, Submit
from charonia.server.scheduling.dynamic import DynamicBatcher

MS = 1_000_000
SECOND_NS = 1_000 * MS
OVERLOADED = DropReason.OVERLOADED
LIMITS = QueueLimits(size_max=16_384, adapts=True)

HEAVY, LIGHT = Flow("heavy"), Flow("light")


class OfferedLoad:
    """Requests offered to one scheduler."""

    def __init__(self, scheduler: Scheduler, service_ns: Callable[[Run], int], slots: int = 1, seed: int = 1) -> None:
        self.chance = random.Random(seed)
        self.simulation = Simulation(scheduler, service_ns, slots=slots)
        self.patience_ns: dict[int, int] = {}
        self.flows: dict[int, Flow] = {}

    def submit(self, at_ns: int, flow: Flow = NO_FLOW, patience_ns: int = 0, priority: int = 0) -> int:
        """Plan a request; its client leaves after its patience, where it is given."""
        request_id = len(self.flows) + 1
        self.flows[request_id] = flow
        self.simulation.at(at_ns, Submit(request_id, priority=priority, flow=flow))
        if patience_ns:
            self.patience_ns[request_id] = patience_ns
            self.simulation.at(at_ns + patience_ns, Cancel(request_id))
        return request_id

    def poisson(
        self, per_s: float, until_ns: int, flow: Flow = NO_FLOW, patience_ns: int = 0, start_ns: int = 0
    ) -> list[int]:
        ids, time_ns = [], start_ns
        while (time_ns := time_ns + round(self.chance.expovariate(per_s) * SECOND_NS)) < until_ns:
            ids.append(self.submit(time_ns, flow, patience_ns))
        return ids

    def in_time(self, since_ns: int = 0) -> dict[int, int]:
        """Latencies of the requests that arrived since then and were finished before their clients left."""
        simulation = self.simulation
        latencies = {
            number: done - simulation.submitted_ns[number]
            for number, done in simulation.finished_ns.items()
            if simulation.submitted_ns[number] >= since_ns
        }
        return {number: each for number, each in latencies.items() if each <= self.patience_ns.get(number, each)}

    def percentile_ms(self, since_ns: int, share: float = 0.99) -> float:
        latencies = sorted(self.in_time(since_ns).values())
        return latencies[int(share * (len(latencies) - 1))] / MS


def fixed(took_ns: int) -> Callable[[Run], int]:
    return lambda run: took_ns


def batcher(size_max: int = 1, limits: QueueLimits = LIMITS) -> DynamicBatcher:
    return DynamicBatcher(BatchPolicy(size_max=size_max, limits=limits))


MODELS = {
    "one by one": (400, 1, 1, 2.5 * MS),
    "four instances": (400, 4, 1, 10 * MS),
    "batches": (800, 1, 8, 10 * MS),
    "large batches": (160, 1, 32, 200 * MS),
}


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_goodput_stays_at_capacity_under_overload_and_latency_low(kind: str, times: int) -> None:
    capacity, slots, size_max, took_ns = MODELS[kind]
    offered = OfferedLoad(batcher(size_max), fixed(int(took_ns)), slots)
    offered.poisson(times * capacity, 8 * SECOND_NS, patience_ns=SECOND_NS)

    offered.simulation.run()

    assert len(offered.in_time(3 * SECOND_NS)) >= 0.95 * capacity * 5
    assert offered.percentile_ms(4 * SECOND_NS) <= 2 * took_ns / MS + 200


def test_without_the_rule_hardly_a_request_is_in_time() -> None:
    offered = OfferedLoad(batcher(limits=QueueLimits(size_max=16_384)), fixed(5 * MS // 2))
    offered.poisson(2_000, 8 * SECOND_NS, patience_ns=SECOND_NS)

    offered.simulation.run()

    assert len(offered.in_time(3 * SECOND_NS)) < 0.1 * 400 * 5


@pytest.mark.parametrize("slots", [1, 3])
def test_clients_that_send_thousands_at_once_and_wait_lose_nothing_in_the_order_in_which_they_sent(slots: int) -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2), slots)
    ids = [offered.submit(n) for n in range(10_000)]

    offered.simulation.run()

    assert not offered.simulation.dropped
    assert sorted(ids, key=offered.simulation.started_ns.__getitem__) == ids


def test_a_client_that_gives_up_thousands_at_once_changes_nothing() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    for n in range(2_000):
        offered.submit(n, HEAVY, patience_ns=3 * SECOND_NS - n + n * 20_000)  # its connections close one by one
        offered.submit(n, HEAVY)
    offered.poisson(300, 12 * SECOND_NS, HEAVY)

    offered.simulation.run()

    assert not offered.simulation.dropped


def test_a_client_that_leaves_now_and_then_changes_nothing() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    for n in range(40):  # bursts of 500 ms, whose last request is given up
        ids = [offered.submit(n * 600 * MS + each) for each in range(200)]
        offered.simulation.at(n * 600 * MS + 400 * MS, Cancel(ids[-1]))

    offered.simulation.run()

    assert not offered.simulation.dropped


def test_a_patient_client_keeps_its_requests_and_its_share_beside_impatient_ones() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    offered.poisson(2_000, 10 * SECOND_NS, HEAVY, patience_ns=SECOND_NS)
    bulk = [offered.submit(3 * SECOND_NS + n, LIGHT) for n in range(1_000)]

    offered.simulation.run()

    assert not offered.simulation.dropped.keys() & set(bulk)
    # It has half of the model until it is done.
    assert max(offered.simulation.finished_ns[n] for n in bulk) == pytest.approx(8 * SECOND_NS, rel=0.05)


def test_clients_that_wait_longer_than_those_who_leave_are_served_beside_them_in_one_flow() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    patient = offered.poisson(300, 10 * SECOND_NS)
    offered.poisson(30, 10 * SECOND_NS, patience_ns=30 * MS)

    offered.simulation.run()

    assert not offered.simulation.dropped.keys() & set(patient)


def test_shedding_ends_with_the_overload() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    offered.poisson(2_000, 5 * SECOND_NS, patience_ns=SECOND_NS)
    later = [offered.submit(30 * SECOND_NS + n) for n in range(5_000)]

    offered.simulation.run()

    assert OVERLOADED in {reason for _, reason in offered.simulation.dropped.values()}
    assert not offered.simulation.dropped.keys() & set(later)


def test_a_crowd_of_clients_with_one_request_each_is_shed_like_a_single_one() -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    time_ns = 0
    while time_ns < 8 * SECOND_NS:
        time_ns += round(offered.chance.expovariate(2_000) * SECOND_NS)
        offered.submit(time_ns, Flow(str(offered.chance.randrange(2_000))), patience_ns=SECOND_NS)

    offered.simulation.run()

    assert len(offered.in_time(3 * SECOND_NS)) >= 0.9 * 400 * 5


def test_a_configured_limit_or_timeout_means_what_it_says() -> None:
    limits = QueueLimits(size_max=16_384, timeout_ns=3 * SECOND_NS)
    offered = OfferedLoad(batcher(limits=limits), fixed(5 * MS // 2))
    offered.poisson(2_000, 5 * SECOND_NS, patience_ns=SECOND_NS)

    offered.simulation.run()

    assert not offered.simulation.dropped


def test_a_model_that_waits_for_resources_sheds_and_keeps_none_of_them() -> None:
    arbiter, member = Arbiter(), Member("m", "1", "m_0", (Need(ResourcePool("R", 0), 1),))
    arbiter.join([member])
    scheduler = LimitedScheduler(DynamicBatcher(BatchPolicy(limits=LIMITS)), {0: member}, arbiter)
    offered = OfferedLoad(scheduler, fixed(5 * MS // 2))
    offered.poisson(2_000, 8 * SECOND_NS, patience_ns=SECOND_NS)

    offered.simulation.run()

    assert len(offered.in_time(3 * SECOND_NS)) >= 0.95 * 400 * 5
    assert member.state is MemberState.IDLE


@pytest.mark.parametrize(("weight", "share"), [(1, 1 / 2), (3, 3 / 4)])
def test_flows_with_a_backlog_share_by_weight(weight: int, share: float) -> None:
    offered = OfferedLoad(batcher(), fixed(MS))
    for n in range(4_000):
        offered.submit(n, Flow("a", weight))
        offered.submit(n, Flow("b"))

    offered.simulation.run(until_ns=SECOND_NS)

    served = [offered.flows[n] for n in offered.simulation.finished_ns]
    assert served.count(Flow("a", weight)) == pytest.approx(share * len(served), abs=2)


@pytest.mark.parametrize("patience_ns", [0, SECOND_NS])
def test_a_light_client_keeps_its_requests_beside_a_heavy_one(patience_ns: int) -> None:
    offered = OfferedLoad(batcher(), fixed(5 * MS // 2))
    light = offered.poisson(20, 10 * SECOND_NS, LIGHT, patience_ns=SECOND_NS)
    offered.poisson(2_500, 10 * SECOND_NS, HEAVY, patience_ns=patience_ns)

    offered.simulation.run()

    in_time = offered.in_time()
    latencies = [in_time[n] for n in light if n in in_time]
    assert len(latencies) >= 0.99 * len(light)
    assert sorted(latencies)[int(0.99 * len(latencies))] <= 20 * MS


def test_when_the_queue_is_full_the_flow_that_holds_most_of_it_loses() -> None:
    offered = OfferedLoad(batcher(limits=QueueLimits(size_max=100)), fixed(5 * MS // 2))
    light = offered.poisson(20, 5 * SECOND_NS, LIGHT)
    heavy = offered.poisson(2_500, 5 * SECOND_NS, HEAVY)

    offered.simulation.run()

    assert not offered.simulation.dropped.keys() & set(light)
    assert {reason for _, reason in offered.simulation.dropped.values()} == {DropReason.QUEUE_FULL}
    assert len(offered.simulation.finished_ns) == pytest.approx(
        len(light) + len(heavy) - len(offered.simulation.dropped)
    )


def test_priority_comes_before_fairness() -> None:
    policy = BatchPolicy(priority_levels=2, default_level=2, limits=LIMITS)
    offered = OfferedLoad(DynamicBatcher(policy), fixed(MS))
    offered.submit(0, LIGHT)
    last = [offered.submit(1, LIGHT, priority=2) for _ in range(3)]
    first = [offered.submit(2, HEAVY, priority=1) for _ in range(50)]

    offered.simulation.run()

    started = offered.simulation.started_ns
    assert max(started[n] for n in first) < min(started[n] for n in last)
