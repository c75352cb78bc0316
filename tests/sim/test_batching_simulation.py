"""Seeded simulations of clients and slots: what the batcher is for, in numbers that never change."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.support.recorded import RecordedScheduler
from tests.support.simulation import Simulation

from charonia.server.scheduling.api import BatchPolicy, Cancel, DropReason, QueueLimits, Run, Submit
from charonia.server.scheduling.dynamic import DynamicBatcher

US = 1_000
MS = 1_000_000
DELAY_NS = 5 * MS
SECOND_NS = 1_000 * MS


def one_ms(run: Run) -> int:
    return MS


def closed_loop(policy: BatchPolicy, clients: int, *, slots: int = 1, think_ns: int = 0) -> Simulation:
    """Each client sends the next request when it has the answer to the last one and has thought; for one second."""
    ids = iter(range(clients, 10**9))
    simulation = Simulation(
        DynamicBatcher(policy),
        one_ms,
        slots=slots,
        on_left=lambda request_id, now_ns: simulation.at(now_ns + think_ns, Submit(next(ids))),
    )
    for request_id in range(clients):
        simulation.at(request_id * 10 * US, Submit(request_id))
    simulation.run(until_ns=SECOND_NS)
    return simulation


def test_a_lone_client_is_as_fast_as_without_a_delay_once_it_is_known_to_be_alone() -> None:
    policy = BatchPolicy(size_max=8, delay_ns=DELAY_NS)

    adapted = len(closed_loop(policy, 1).finished_ns)
    exact = len(closed_loop(replace(policy, adapt_delay=False), 1).finished_ns)
    without = len(closed_loop(replace(policy, delay_ns=0), 1).finished_ns)

    assert (adapted, exact, without) == (985, 166, 1000)  # three delays of 5 ms cost 15 requests


@pytest.mark.parametrize("clients", [2, 3, 5, 8])
def test_clients_that_fit_into_a_batch_go_in_step_and_do_not_wait_in_vain(clients: int) -> None:
    simulation = closed_loop(BatchPolicy(size_max=8, delay_ns=DELAY_NS), clients)

    last = [run for _, run in simulation.runs[-500:]]
    assert {len(run.ids) for run in last} == {clients}
    assert len(simulation.runs) >= 980


@pytest.mark.parametrize("clients", [9, 12, 16, 40])
def test_more_clients_than_a_batch_holds_keep_it_full(clients: int) -> None:
    simulation = closed_loop(BatchPolicy(size_max=8, delay_ns=DELAY_NS), clients)

    batch_sizes = Counter(len(run.ids) for _, run in simulation.runs[10:])
    assert batch_sizes[8] == sum(batch_sizes.values())


def test_clients_that_think_meet_in_batches_all_the_same() -> None:
    policy = BatchPolicy(size_max=8, delay_ns=DELAY_NS)

    adapted = closed_loop(policy, 4, think_ns=3 * MS)
    exact = closed_loop(replace(policy, adapt_delay=False), 4, think_ns=3 * MS)

    assert {len(run.ids) for _, run in adapted.runs[10:]} == {4}
    assert len(adapted.finished_ns) > 1.5 * len(exact.finished_ns)


def open_loop(seed: int, policy: BatchPolicy, slots: int) -> tuple[Simulation, int]:
    """Random arrivals, sizes, shapes, priorities, timeouts and cancellations for one simulated second."""
    chance = random.Random(seed)
    simulation = Simulation(
        RecordedScheduler(DynamicBatcher(policy)), lambda run: chance.randint(100 * US, 3 * MS), slots=slots
    )
    time_ns = count = 0
    while time_ns < SECOND_NS:
        time_ns += round(chance.expovariate(1) * 300 * US)
        size = min(chance.choice((1, 1, 1, 2, 4)), policy.size_max)
        shape = chance.choice("aaaaaaab")
        simulation.at(time_ns, Submit(count, size, shape, chance.randint(0, 3), chance.choice((0, 0, 2_000, 20_000))))
        if chance.random() < 0.05:
            simulation.at(time_ns + chance.randint(0, 4 * MS), Cancel(count))
        count += 1
    simulation.run()
    return simulation, count


@pytest.mark.parametrize("seed", range(8))
def test_a_second_of_random_traffic_loses_nobody_and_keeps_every_promise(seed: int) -> None:
    chance = random.Random(seed)
    limits = QueueLimits(size_max=chance.choice((0, 20)), timeout_ns=chance.choice((0, 10 * MS)), timeout_override=True)
    policy = BatchPolicy(
        size_max=chance.choice((4, 8, 16)),
        preferred_sizes=chance.choice(((), (4,))),
        delay_ns=chance.choice((0, 500 * US, 4 * MS)),
        priority_levels=3,
        default_level=2,
        limits=limits,
        adapt_delay=chance.random() < 0.5,
    )

    simulation, count = open_loop(seed, policy, slots=chance.randint(1, 3))

    started = [request_id for _, run in simulation.runs for request_id in run.ids]
    assert len(started) == len(set(started))
    assert not set(started) & simulation.dropped.keys()
    assert set(simulation.finished_ns) == set(started)
    cancelled = set(range(count)) - set(started) - simulation.dropped.keys()
    assert len(cancelled) < 0.05 * count
    for request_id, (dropped_ns, reason) in simulation.dropped.items():
        waited_ns = dropped_ns - simulation.submitted_ns[request_id]
        if reason is DropReason.TIMEOUT:
            assert waited_ns in (2 * MS, 10 * MS, 20 * MS)
        else:
            assert (waited_ns, reason) == (0, DropReason.QUEUE_FULL)


def test_the_same_seed_gives_the_same_history() -> None:
    policy = BatchPolicy(size_max=8, delay_ns=MS)

    assert open_loop(1, policy, 2)[0].runs == open_loop(1, policy, 2)[0].runs
