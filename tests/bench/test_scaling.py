"""The closed loop of autoscaling: a constant load settles, and three times the load is absorbed in time."""

import pytest
from bench.fleet.scaling import PODS, RULES, capacity, on_time_after, simulate

SETTLED_S = 600.0
STEP_S = 300.0


def late_after(name: str) -> float:
    return 5 * max(each.by_batch[-1] for each in PODS[name][0])


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize("rule", ["HPA, busy share", "KEDA, busy share", "platform"])
def test_a_constant_load_settles(name: str, rule: str) -> None:
    models, start_s = PODS[name]
    rate = 3.2 * capacity(models)

    found = simulate(models, lambda _: rate, RULES[rule](), pods=4, seconds=1500.0, start_s=start_s)

    assert found.changes(SETTLED_S) == 0
    assert found.at(SETTLED_S) in (4, 5)
    assert found.late(SETTLED_S, late_after(name)) == 0.0


@pytest.mark.parametrize("rule", ["HPA, queue ratio", "KEDA, queue ratio"])
def test_the_waiting_time_alone_does_not_settle(rule: str) -> None:
    models, start_s = PODS["8 instances"]
    rate = 3.2 * capacity(models)

    found = simulate(models, lambda _: rate, RULES[rule](), pods=4, seconds=1500.0, start_s=start_s)

    assert found.changes(SETTLED_S) > 5


@pytest.mark.parametrize(
    ("name", "rule", "on_time_s", "most"),
    [
        ("8 instances", "HPA, busy share", 180, 10),
        ("8 instances", "KEDA, busy share", 180, 10),
        ("8 instances", "platform", 180, 12),
        ("dynamic batching", "HPA, busy share", 180, 12),
        ("GPU, start 180 s", "HPA, busy share", 600, 12),
        ("three models", "HPA, busy share", 180, 10),
    ],
)
def test_three_times_the_load_is_absorbed(name: str, rule: str, on_time_s: int, most: int) -> None:
    models, start_s = PODS[name]
    before = 3.2 / 3 * capacity(models)

    found = simulate(
        models,
        lambda now: before * (3 if now >= STEP_S else 1),
        RULES[rule](),
        pods=2,
        seconds=STEP_S + on_time_s + 60.0,
        start_s=start_s,
    )

    assert {count for at, count in found.pods if at < STEP_S} == {2}
    assert on_time_after(found, STEP_S, late_after(name)) <= on_time_s
    assert max(count for _, count in found.pods) <= most
