"""The simulation of many servers, against queueing theory and its own books."""

import json
import math
import re
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench.fleet.policies import LeastOutstanding, RandomChoice, RoundRobin
from bench.fleet.server import ServiceTimes
from bench.fleet.simulation import Autoscaler, Fleet, Plan, Result

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
TABLES = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
LABELS = ("load before", "load", "target in flight", "way", "start", "policy")
ONE_BY_ONE = ServiceTimes((0.01,))
BATCHES = ServiceTimes(tuple(0.01 + 0.002 * size for size in range(1, 9)), load_s=0.5)


def exponential() -> ServiceTimes:
    draw = Random(7)
    return ServiceTimes((0.01,), tuple(draw.expovariate(1.0) for _ in range(20_000)))


def simulate(servers: int, load: float, times: ServiceTimes = BATCHES, **changes: object) -> Result:
    """Simulate servers that get a share of what they can do, as seconds and policy say."""
    rate = servers * load * times.capacity
    values = {"seconds": 20.0, "policy": RandomChoice, "rate": lambda now: rate, **changes}
    return Fleet(Plan(servers=servers, times=times, **values)).run()  # type: ignore[arg-type]


def test_one_server_with_exponential_times_waits_as_theory_says() -> None:
    times = exponential()
    result = simulate(1, 0.7, times, seconds=3000.0, deadline_s=100.0, network_s=0.0, waiting_max=10**6)

    rate = times.capacity * (1 - 0.7)
    assert sum(result.latencies) / len(result.latencies) == pytest.approx(1 / rate, rel=0.08)
    assert result.quantile(0.99) == pytest.approx(math.log(100) / rate, rel=0.12)


def test_one_server_with_equal_times_waits_half_as_long_as_with_exponential_ones() -> None:
    result = simulate(1, 0.7, ONE_BY_ONE, seconds=3000.0, deadline_s=100.0, network_s=0.0)

    waits = sum(result.latencies) / len(result.latencies) - 0.01
    assert waits == pytest.approx(0.7 * 0.01 / (2 * (1 - 0.7)), rel=0.08)


def test_batches_carry_what_single_requests_could_not() -> None:
    result = simulate(3, 0.9, seconds=30.0)

    assert 3 * 0.9 * BATCHES.capacity > 3 / BATCHES.by_batch[0]
    assert result.goodput > 0.999


@pytest.mark.parametrize("knows", ["own", "reports", "all"])
def test_two_choices_have_a_shorter_tail_than_chance(knows: str) -> None:
    chance = simulate(30, 0.85, ONE_BY_ONE, clients=2)
    chosen = simulate(30, 0.85, ONE_BY_ONE, clients=2, policy=lambda: LeastOutstanding(knows))

    assert chosen.quantile(0.99) < 0.7 * chance.quantile(0.99)


def test_a_client_alone_takes_its_servers_in_turn() -> None:
    result = simulate(4, 0.5, ONE_BY_ONE, clients=1, policy=RoundRobin)
    chance = simulate(4, 0.5, ONE_BY_ONE, clients=1)

    assert result.quantile(0.99) < chance.quantile(0.99)


@pytest.mark.parametrize("policy", [RandomChoice, RoundRobin, LeastOutstanding])
def test_every_request_has_one_end(policy: type) -> None:
    result = simulate(
        6,
        0.9,
        policy=policy,
        waiting_max=4,
        warm_s=0.0,
        happenings=[(5.0, lambda fleet: fleet.lose([server for server in fleet.servers if server.zone == 0]))],
    )

    answered_in_time = len(result.latencies)
    dropped = result.offered - result.executions - result.failed - result.refused
    assert result.failed > 0
    assert result.refused > 0
    assert dropped >= 0
    assert answered_in_time <= result.executions
    assert sum(came for came, _ in result.by_second.values()) == result.offered
    assert sum(good for _, good in result.by_second.values()) == answered_in_time


def test_a_drained_server_loses_nothing_where_clients_send_again() -> None:
    def replace(fleet: Fleet) -> None:
        fleet.add_server()
        fleet.drain(fleet.servers[0], unlisted_s=1.0)

    sent_again = simulate(4, 0.6, happenings=[(5.0, replace)])
    once_only = simulate(4, 0.6, happenings=[(5.0, replace)], retries_max=0)

    assert (sent_again.failed, sent_again.refused, sent_again.goodput) == (0, 0, 1.0)
    assert once_only.refused > 0


def test_retries_have_a_budget() -> None:
    result = simulate(
        4, 0.6, retry_share=0.0, happenings=[(5.0, lambda fleet: fleet.lose(fleet.servers[:3]))], noticed_s=60.0
    )

    assert result.refused > 1000


def test_servers_are_added_after_their_lag_and_leave_after_calm() -> None:
    capacity = BATCHES.capacity
    scaler = Autoscaler(target=4, least=2, most=20, start_s=30.0, calm_s=60.0)
    result = simulate(
        2,
        0.0,
        seconds=400.0,
        rate=lambda now: 6 * capacity * 0.8 if 50 <= now < 200 else 0.4 * capacity,
        autoscaler=scaler,
        policy=LeastOutstanding,
    )

    first_more = next(at for at, count in result.servers if count > 2)
    assert 50 + 15 + 30 <= first_more <= 50 + 15 + 15 + 30 + 1
    assert max(count for _, count in result.servers) >= 6
    assert result.servers[-1][1] < 6
    assert result.servers[-1][0] >= 200 + 60


def test_a_hedged_request_is_executed_twice_and_counted_once() -> None:
    def slow(fleet: Fleet) -> None:
        fleet.servers[0].slowness = 10.0

    plain = simulate(10, 0.3, happenings=[(0.0, slow)])
    hedged = simulate(10, 0.3, happenings=[(0.0, slow)], hedge_s=0.05)

    assert hedged.quantile(0.99) < 0.7 * plain.quantile(0.99)
    assert hedged.offered < hedged.executions < 1.3 * hedged.offered
    assert hedged.goodput <= 1.0


def test_measured_batches_become_times() -> None:
    times = ServiceTimes.measured({1: [0.1, 0.2, 0.3], 2: [0.4, 0.4, 0.4]})

    assert times.by_batch == (0.2, 0.4)
    assert sorted(times.factors) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.5])
    with pytest.raises(ValueError, match="all sizes"):
        ServiceTimes.measured({2: [0.1]})


def results(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results" / name).read_text(encoding="utf-8"))["rows"]
    return rows


def test_the_page_has_the_simulated_figures() -> None:
    rows = results("fleet.json")
    steady = sorted((row for row in rows if row["scenario"] == "steady"), key=lambda row: row["policy"])
    for policy, group in groupby(steady, key=lambda row: row["policy"]):
        assert [policy, *(f"{row['p50 ms']} / {row['p99 ms']}" for row in group)] in TABLES
    for row in rows:
        labels = [row[label] for label in row if label in LABELS]
        figures = {f"{value:,}" if isinstance(value, int) else value for value in row.values()}
        if row["scenario"] != "steady":
            assert any(cells[: len(labels)] == labels and figures.issuperset(cells) for cells in TABLES), row


def test_the_page_has_the_measured_figures_and_says_how_far_the_simulation_is_from_them() -> None:
    rows = results("fleet_real.json")
    differences = []
    for row in rows:
        pairs = [(row[f"p{share} ms real"], row[f"p{share} ms simulated"]) for share in (50, 90, 99)]
        differences += [abs(real - simulated) / real for real, simulated in pairs]
        if "killed" not in row["load"]:
            assert [row["load"], row["policy"], *(f"{real} / {simulated}" for real, simulated in pairs)] in TABLES

    found = re.search(r"Most of the figures differ by less than (\d+) %, none by more than (\d+) %", PAGE)
    assert found
    assert sorted(differences)[len(differences) // 2] < int(found[1]) / 100
    assert max(differences) <= int(found[2]) / 100
