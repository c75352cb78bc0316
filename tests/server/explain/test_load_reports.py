"""What a report of the server's load holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from charonia.core.statistics import BatchStatistics, Duration, ModelStatistics
from charonia.server.explain.load_reports import (
    AGE_NS,
    RATE_NS_MAX,
    RATE_NS_MIN,
    EngineLoad,
    LoadCounts,
    counts_of,
    rates_between,
)
from charonia.server.metrics.custom import CustomMetrics
from charonia.wire.orca import LOAD_METRICS


class Clock:
    now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


def gauge(custom: CustomMetrics, name: str, value: float, **labels: str) -> None:
    custom.add(custom.declare(name, "", "gauge"), labels, None).value = value


def reported(custom: CustomMetrics, *chosen: str) -> dict[str, float]:
    return dict(EngineLoad(chosen or LOAD_METRICS, list, custom).latest())


def test_a_server_without_models_has_nothing_to_do() -> None:
    zeros = dict.fromkeys(("application_utilization", *LOAD_METRICS[3:7]), 0.0)

    assert reported(CustomMetrics()) == zeros


def test_the_cache_of_a_language_model_is_reported_as_it_tells_it() -> None:
    custom = CustomMetrics()
    for kind, value in (("used", 30), ("max", 120), ("tokens_per", 64)):
        gauge(custom, "nv_trt_llm_kv_cache_block_metrics", value, kv_cache_block_type=kind, model="a")
    for kind, value in (("used", 90), ("max", 100)):  # one is missing
        gauge(custom, "nv_trt_llm_kv_cache_block_metrics", value, kv_cache_block_type=kind, model="b")

    load = reported(custom, "kv_cache_utilization", "max_token_capacity")

    assert load == {"kv_cache_utilization": 0.25, "max_token_capacity": 7680}


def test_the_fullest_cache_counts() -> None:
    custom = CustomMetrics()
    gauge(custom, "vllm:kv_cache_usage_perc", 0.2, model="a")
    gauge(custom, "vllm:kv_cache_usage_perc", 0.7, model="b")

    assert reported(custom, "kv_cache_utilization") == {"kv_cache_utilization": 0.7}


def test_metrics_are_chosen_by_name_custom_ones_too() -> None:
    custom = CustomMetrics()
    gauge(custom, "sessions", 3, model="a")
    gauge(custom, "sessions", 4, model="b")

    assert reported(custom, "sessions", "queue_depth", "unknown") == {"sessions": 7, "queue_depth": 0}


@pytest.mark.parametrize(("later_ns", "expected"), [(AGE_NS - 1, 1.0), (AGE_NS, 2.0)])
def test_a_report_serves_for_a_short_time(later_ns: int, expected: float) -> None:
    custom, clock = CustomMetrics(), Clock()
    gauge(custom, "sessions", 1)
    load = EngineLoad(["sessions"], list, custom, clock)
    load.latest()
    gauge(custom, "sessions", 2)
    clock.now_ns += later_ns

    assert load.latest() == {"sessions": expected}


def version(**counted: Any) -> Any:
    return SimpleNamespace(
        metrics=SimpleNamespace(statistics=ModelStatistics("m", "1", **counted)), pending=0, in_flight=0
    )


def test_versions_count_requests_failures_executions_and_their_time() -> None:
    batches = {
        1: BatchStatistics(Duration(2, 1), Duration(2, 20), Duration(2, 3)),
        4: BatchStatistics(compute_infer=Duration(1, 40)),
    }
    runner = version(success=Duration(6, 999), fail=Duration(2, 9), execution_count=3, batches=batches)

    assert counts_of([runner], 7) == LoadCounts(7, {id(runner.metrics): (8, 2, 3, 64)})


def test_rates_are_those_since_a_report_before() -> None:
    begin = LoadCounts(1_000_000_000, {1: (10, 1, 5, 500_000_000)})
    end = LoadCounts(3_000_000_000, {1: (16, 2, 9, 1_500_000_000), 2: (4, 0, 0, 0)})

    rates = rates_between(begin, end)

    assert rates.values == {"rps_fractional": 5.0, "eps": 0.5}
    assert rates.busy == {1: 0.5}  # the other one has not ended any execution


def test_a_version_that_was_unloaded_takes_nothing_away() -> None:
    begin = LoadCounts(1_000_000_000, {1: (10, 1, 5, 500_000_000)})

    assert rates_between(begin, LoadCounts(2_000_000_000, {})).values == {"rps_fractional": 0.0, "eps": 0.0}


@pytest.mark.parametrize("later_ns", [RATE_NS_MIN - 1, RATE_NS_MIN, RATE_NS_MAX, RATE_NS_MAX + 1])
def test_rates_are_taken_over_a_second_to_a_minute(later_ns: int) -> None:
    clock, runner = Clock(), version(success=Duration(10, 1))
    load = EngineLoad(["rps_fractional"], lambda: [runner], CustomMetrics(), clock)
    assert load.latest() == {}
    runner.metrics.statistics.success.add(1, 60)
    clock.now_ns += later_ns

    is_known = RATE_NS_MIN <= later_ns <= RATE_NS_MAX
    assert load.latest() == ({"rps_fractional": 60e9 / later_ns} if is_known else {})
