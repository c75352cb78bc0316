"""Whether the machine has room for another instance."""

import pytest

from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.server.scaling.rule import Demand, FreeMemory, Headroom, demand_of, idle_cores, obstacle, threads_of

MIB = 2**20
ROOMY = Headroom(4, 2.0, (FreeMemory("memory", 1000 * MIB, 100 * MIB), FreeMemory("GPU 1", 500 * MIB, 50 * MIB, 1)))


@pytest.mark.parametrize(
    ("room", "demand", "reason"),
    [
        (ROOMY, Demand(900 * MIB), ""),
        (ROOMY, Demand(901 * MIB), "another one takes about 901 MiB of memory, of which 900 MiB may be taken"),
        (ROOMY, Demand(0, 1, 450 * MIB), ""),
        (ROOMY, Demand(0, 1, 451 * MIB), "another one takes about 451 MiB of GPU 1, of which 450 MiB may be taken"),
        (ROOMY, Demand(0, 0, 9000 * MIB), ""),  # what is free on that GPU is not known
        (Headroom(4, 0.4), Demand(), "0.4 of 4 cores are idle"),
        (ROOMY, Demand(on_event_loop=True), "the model computes on the event loop, which all instances share"),
        (ROOMY, Demand(resources=("R1", "R2")), "its instances wait for R1, R2 of the rate limiter"),
    ],
)
def test_what_is_in_the_way_is_said(room: Headroom, demand: Demand, reason: str) -> None:
    assert obstacle(room, demand) == reason


def test_one_more_takes_as_much_as_the_largest_and_what_is_shared_is_there_already() -> None:
    usages = [MemoryUsage("CPU", 0, 7), MemoryUsage("GPU", 1, 5, "m_0"), MemoryUsage("GPU", 1, 6, "m_1")]
    workers = [WorkerState("m_0", 3, 0, "", 0.0), WorkerState("m_1", 4, 0, "", 0.0)]

    assert demand_of(usages, workers, 1) == Demand(4, 1, 6)
    assert demand_of(usages, (), None) == Demand()


def test_one_more_gets_the_idle_cores_and_no_more_threads_than_the_first() -> None:
    assert [threads_of(idle, 4) for idle in (0.5, 1.9, 3.2, 16.0)] == [1, 1, 3, 4]


@pytest.mark.parametrize(
    ("budget", "machine", "own", "others", "idle"),
    [
        (4, 4, 1.0, 0.5, 2.5),
        (4, 16, 1.0, 12.0, 3.0),  # the others have the cores outside of the budget
        (4, 16, 1.0, 5.0, 3.0),
        (4, 16, 1.0, 14.0, 1.0),
        (2, 2, 1.5, 4.0, 0.0),
        (8, 2, 0.0, 2.0, 6.0),
    ],
)
def test_idle_are_the_cores_of_the_budget_that_nothing_uses(
    budget: int, machine: int, own: float, others: float, idle: float
) -> None:
    assert idle_cores(budget, machine, own, others) == idle
