"""One answer from those of several servers."""

from typing import Any

import pytest

from charonia.platform.deployments.servers import merged_traffic


def answer(requests: int = 0, p99: float = 1.0, state: str = "", **more: Any) -> dict[str, Any]:
    counts = {"sent": requests, "compared": requests, "different": 1, "failed": 0, "dropped": 0}
    shadow = {**counts, "difference_rate": 0.5, "latency_us": {"p99": p99}}
    version = {"version": "1", "is_ready": True, "weight": 100.0, "share": 1.0, "requests": requests, "errors": 1}
    version |= {"in_flight": 2, "latency_us": {"p99": p99}, "shadow": shadow}
    canary = {"state": state, "reason": f"it is {state}"} if state else None
    found = {"model": "m", "weights": {"1": 100.0}, "versions": [version], "canary": canary, "history": []}
    return {**found, **more}


def test_one_answer_stays_as_it_is() -> None:
    assert merged_traffic([answer(3, state="running")]) == answer(3, state="running")


def test_counts_are_summed_and_percentiles_are_those_of_the_slowest() -> None:
    late = {"time": "2026-01-02", "text": "weights"}
    early = {"time": "2026-01-01", "text": "weights"}

    merged = merged_traffic([answer(10, 2.0, history=[late]), answer(30, 5.0, history=[early, late]), answer(0, 1.0)])

    (version,) = merged["versions"]
    assert (version["requests"], version["errors"], version["in_flight"]) == (40, 3, 6)
    assert version["latency_us"] == {"p99": 5.0}
    assert (version["shadow"]["compared"], version["shadow"]["difference_rate"]) == (40, 3 / 40)
    assert merged["history"] == [early, late]
    assert merged["canary"] is None


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("running", "rolled_back"), "rolled_back"),
        (("finished", "running"), "running"),
        (("finished", "finished"), "finished"),
        (("", "paused"), "paused"),
        (("running", "aborted"), "aborted"),
    ],
)
def test_a_server_that_rolls_back_decides_for_all_and_a_plan_is_over_when_it_is_in_all(
    states: tuple[str, str], state: str
) -> None:
    first, second = (answer(state=each, weights={each: 1.0}) for each in states)

    merged = merged_traffic([first, second])

    assert merged["canary"]["state"] == state
    assert merged["weights"] == {state: 1.0}
