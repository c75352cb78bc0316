"""The simulated scenarios: steady load, slow servers, a lost zone, a growing load, a rolling update, hot models."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from bench.fleet.policies import LeastOutstanding, Policy, PrefixAffinity, RandomChoice, RoundRobin
from bench.fleet.server import ServiceTimes
from bench.fleet.simulation import Autoscaler, Fleet, Plan

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "round robin": RoundRobin,
    "chance": RandomChoice,
    "two choices, own requests": LeastOutstanding,
    "two choices of 20 drawn for each client": lambda: LeastOutstanding(subset=20),
    "two choices, own requests and reports": lambda: LeastOutstanding("reports"),
    "two choices, one balancer": lambda: LeastOutstanding("all"),
}

REQUESTS = 300_000
"""Requests of a steady run, at the least."""

WARM_S = 0.5

CLIENTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Attributes:
        scenario: Its table.
        labels: What its row says, by column.
        plan: The simulation.
    """

    scenario: str
    labels: Mapping[str, str]
    plan: Plan


def cases(times: ServiceTimes, start_s: float) -> Iterator[Case]:
    """Yield all runs.

    Args:
        times: Measured service times of a server.
        start_s: Measured seconds until a started server answers.
    """
    yield from steady(times)
    yield from slow_servers(times)
    yield from lost_zone(times)
    yield from growing_load(times, start_s)
    yield from rolling_update(times)
    yield from hot_models(times)
    yield from prefixes()


def plan_of(times: ServiceTimes, servers: int, load: float, seconds: float = 0.0) -> Plan:
    """Return a plan of steady load: a share of the servers' capacity."""
    rate = servers * load * times.capacity
    return Plan(
        servers=servers,
        rate=lambda _: rate,
        seconds=seconds or WARM_S + max(0.7, REQUESTS / rate),
        warm_s=WARM_S,
        times=times,
        policy=LeastOutstanding,
        clients=min(CLIENTS_MAX, max(10, servers // 10)),
    )


def steady(times: ServiceTimes) -> Iterator[Case]:
    """All servers alike, each policy, from 10 to 10,000 servers."""
    for servers in (10, 100, 1000, 10_000):
        for load in (0.7, 0.9):
            for name, policy in POLICIES.items():
                labels = {"servers": f"{servers:,}", "load": f"{load:.0%}", "policy": name}
                yield Case("steady", labels, replace(plan_of(times, servers, load), policy=policy))


def slow_servers(times: ServiceTimes) -> Iterator[Case]:
    """Five of a hundred servers take five times as long."""

    def slow(fleet: Fleet) -> None:
        for server in fleet.servers[:5]:
            server.slowness = 5.0

    plan = replace(plan_of(times, 100, 0.7), happenings=[(0.0, slow)])
    for name, policy in POLICIES.items():
        yield Case("slow servers", {"policy": name}, replace(plan, policy=policy))
    hedged = "two choices, own requests, hedged after {:.0f} ms"
    for after in (3.0, 5.0):
        seconds = after * times.by_batch[-1]
        yield Case("slow servers", {"policy": hedged.format(seconds * 1e3)}, replace(plan, hedge_s=seconds))


def lost_zone(times: ServiceTimes) -> Iterator[Case]:
    """One of three zones is lost, and returns a minute later."""

    def lose(fleet: Fleet) -> None:
        fleet.lose([server for server in fleet.servers if server.zone == 0])

    def back(fleet: Fleet) -> None:
        for _ in range(10):
            fleet.add_server()

    short = 2 * times.greatest
    ways = {
        "long queues, retries without a budget": {"waiting_max": 10_000, "retry_share": 10.0, "retries_max": 10},
        "long queues, budget of retries": {"waiting_max": 10_000},
        "short queues, retries without a budget": {"waiting_max": short, "retry_share": 10.0, "retries_max": 10},
        "short queues, budget of retries": {"waiting_max": short},
    }
    for load in (0.6, 0.8):
        plan = replace(plan_of(times, 30, load, 120.0), happenings=[(20.0, lose), (80.0, back)])
        for way, changes in ways.items():
            yield Case("lost zone", {"load before": f"{load:.0%}", "way": way}, replace(plan, **changes))  # type: ignore[arg-type]


def growing_load(times: ServiceTimes, start_s: float) -> Iterator[Case]:
    """The load is three times as high from one moment on, and an autoscaler brings servers."""
    before = 10 * 0.5 * times.capacity
    starts = {
        f"{start_s:.0f} s (server on a machine that has all)": start_s,
        "30 s (pod on a node that has the image)": 30.0,
        "180 s (new node)": 180.0,
    }
    for target in (times.greatest / 2, float(times.greatest)):
        for name, seconds in starts.items():
            scaler = Autoscaler(target=target, least=10, most=60, start_s=seconds)
            plan = replace(
                plan_of(times, 10, 0.5, 420.0),
                rate=lambda now: before * (3 if now >= 60 else 1),
                autoscaler=scaler,
                waiting_max=2 * times.greatest,
            )
            yield Case("growing load", {"target in flight": f"{target:.0f}", "start": name}, plan)


def rolling_update(times: ServiceTimes) -> Iterator[Case]:
    """Thirty servers are replaced, three at a time."""

    def update(killed: bool, waits_s: float, surge: bool) -> Callable[[Fleet], None]:
        def begin(fleet: Fleet) -> None:
            for step in range(10):
                fleet.at(10.0 + 5.0 * step, lambda step=step: replace_some(fleet, step))  # type: ignore[misc]

        def replace_some(fleet: Fleet, step: int) -> None:
            old = fleet.servers[3 * step : 3 * step + 3]
            for _ in old:
                fleet.at(fleet.now + (0.0 if surge else 4.0), fleet.add_server)
            if killed:
                fleet.lose(old)
                return
            for server in old:
                fleet.at(fleet.now + waits_s, lambda server=server: fleet.drain(server, 2.0 - waits_s))  # type: ignore[misc]

        return begin

    ways = {
        "killed, before the new ones are ready": (True, 0.0, False, 2),
        "drained at once, before the new ones are ready; no retries": (False, 0.0, False, 0),
        "drained at once, before the new ones are ready; retries": (False, 0.0, False, 2),
        "drained when no balancer lists it, after the new ones are ready; no retries": (False, 2.0, True, 0),
    }
    for way, (killed, waits_s, surge, retries) in ways.items():
        plan = replace(plan_of(times, 30, 0.8, 70.0), retries_max=retries)
        yield Case("rolling update", {"way": way}, replace(plan, happenings=[(0.0, update(killed, waits_s, surge))]))


def hot_models(times: ServiceTimes) -> Iterator[Case]:
    """Two hundred models, some far more asked for than others, on fifty servers with room for twelve each."""
    shares = [1 / (rank + 1) ** 1.1 for rank in range(200)]
    total = sum(shares)
    timed = replace(times, load_s=1.0)
    ways = {
        "any two of all servers": (),
        "servers of each model by its share": [max(2, round(50 * 3 * share / total)) for share in shares],
        "two servers for each model": [2] * 200,
    }
    for load in (0.1, 0.3):
        for way, spread in ways.items():
            plan = replace(
                plan_of(timed, 50, load, 90.0),
                warm_s=45.0,
                models=shares,
                models_max=12,
                policy=partial(LeastOutstanding, "own", spread),
            )
            yield Case("hot models", {"load": f"{load:.0%}", "way": way}, plan)


def prefixes() -> Iterator[Case]:
    """Prompts with 500 beginnings on 20 servers whose caches have 40 each; a beginning that is missing costs 200 ms.

    Four clients. A request with a cached beginning takes 50 ms.
    """
    shares = [1 / (rank + 1) ** 0.8 for rank in range(500)]
    times = ServiceTimes((0.05,), load_s=0.2)
    policies: Mapping[str, Callable[[], Policy]] = {
        "chance": RandomChoice,
        "two choices, own requests": LeastOutstanding,
        "prefix affinity, bound 1.25": PrefixAffinity,
        "prefix affinity, bound 2": partial(PrefixAffinity, 2.0),
    }
    for load in (0.2, 0.5):
        for name, policy in policies.items():
            plan = replace(
                plan_of(times, 20, load, 120.0),
                warm_s=30.0,
                models=shares,
                models_max=40,
                deadline_s=10.0,
                clients=4,
                policy=policy,
            )
            yield Case("prefixes", {"load": f"{load:.0%}", "policy": name}, plan)
