"""What a report of the server's load holds."""

import pytest

from charonia.server.load_reports import AGE_NS, EngineLoad
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
    zeros = dict.fromkeys(LOAD_METRICS[:5], 0.0)

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
