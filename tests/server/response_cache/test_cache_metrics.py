"""The metrics of a response cache."""

from charonia.server.metrics.metric_families import Family
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.metrics.prometheus import ModelSample, PageView, render
from charonia.server.response_cache.api import CacheCounters, cache_families, local_families, remote_families

US = 1000


def metrics(*, is_cached: bool = True) -> ModelMetrics:
    made = ModelMetrics("m", "1")
    made.is_cached = is_cached
    made.summarize()
    made.cache_hit(end_ns=100 * US, duration_ns=30 * US, queue_ns=10 * US, lookup_ns=20 * US, wall_ms=7)
    made.cache_miss(100 * US, 7 * US)
    made.collapsed = 3
    return made


def values(families: list[Family]) -> dict[str, float]:
    return {family.name: sample.value for family in families for sample in family.samples}


def test_a_hit_is_a_success_without_an_execution_and_a_miss_takes_longer() -> None:
    statistics = metrics().statistics

    assert (statistics.success.count, statistics.success.ns) == (1, 37 * US)
    assert (statistics.queue.count, statistics.queue.ns) == (1, 10 * US)
    assert (statistics.cache_hit.count, statistics.cache_hit.ns) == (1, 20 * US)
    assert (statistics.cache_miss.count, statistics.cache_miss.ns) == (1, 7 * US)
    assert statistics.compute_infer.count == statistics.execution_count == statistics.inference_count == 0


def test_the_page_has_them_for_models_with_a_cache_only() -> None:
    view = PageView(quantiles=(0.5,), now_ns=100 * US)

    page = render([ModelSample(metrics(), {}, 0)], view=view).decode()
    without = render([ModelSample(metrics(is_cached=False), {}, 0)], view=view).decode()

    labels = '{model="m",version="1"}'
    for line in (
        f"nv_cache_num_hits_per_model{labels} 1",
        f"nv_cache_num_misses_per_model{labels} 1",
        f"nv_cache_hit_duration_per_model{labels} 20",
        f"nv_cache_miss_duration_per_model{labels} 7",
        f"charonia_cache_collapsed_total{labels} 3",
        f"nv_cache_hit_summary_per_model_count{labels} 1",
        f"nv_cache_miss_summary_per_model_sum{labels} 7",
    ):
        assert line in page
    assert "nv_inference_request_summary_us_count" not in page
    assert "nv_inference_request_summary_us_count" in without
    assert "cache" not in without


def test_the_cache_as_a_whole_counts_look_ups_and_insertions() -> None:
    counters = CacheCounters()
    counters.looked_up(True, 3 * US)
    counters.looked_up(False, 4 * US)
    counters.inserted(5 * US)

    assert values(cache_families(counters)) == {
        "nv_cache_num_lookups": 2,
        "nv_cache_num_hits": 1,
        "nv_cache_num_misses": 1,
        "nv_cache_lookup_duration": 7,
        "nv_cache_insertion_duration": 5,
    }
    assert values(local_families(0.5, 2, 1)) == {
        "nv_cache_util": 0.5,
        "nv_cache_num_entries": 2,
        "nv_cache_num_evictions": 1,
    }
    assert values(remote_families(False, 1, 2)) == {
        "charonia_cache_up": 0,
        "charonia_cache_errors_total": 1,
        "charonia_cache_skipped_total": 2,
    }
    assert b"\nnv_cache_num_lookups 2\n" in render([], families=cache_families(counters))
