"""Summaries, buckets of a model's own, and which latencies a page shows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.metrics.model_metrics import (
    BATCH_SIZE,
    FIRST_RESPONSE,
    REQUEST_DURATION,
    SLOT_NS,
    SLOTS,
    SUMMARIES,
    ModelMetrics,
    Summary,
)
from charonia.server.metrics.prometheus import ModelSample, PageView, render
from charonia.server.scheduling.api import CloseReason

US = 1000
MINUTE_NS = SLOTS * SLOT_NS


def observed(*values: int, at_ns: int = 0) -> Summary:
    summary = Summary()
    summary.observe(np.array(values, np.int64), np.full(len(values), at_ns, np.int64))
    return summary


def run_batch(metrics: ModelMetrics, end_ns: int = 400 * US) -> None:
    metrics.batch_done(
        arrivals_ns=[end_ns - 300 * US, end_ns - 200 * US],
        inferences=2,
        batch_size=2,
        reason=CloseReason.FULL,
        marks_ns=(end_ns - 100 * US, end_ns - 90 * US, end_ns - 10 * US, end_ns),
        wall_ms=1,
    )


def page(metrics: ModelMetrics, view: PageView | None = None) -> dict[str, float]:
    lines = render([ModelSample(metrics, {}, 0)], view=view).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_that_of_the_values_to_a_small_error(values: list[int], quantile: float) -> None:
    (found,) = observed(*values).quantiles([quantile], 0)

    exact = sorted(values)[int(quantile * (len(values) - 1) + 0.5)]
    assert math.isclose(found, exact, rel_tol=1 / 128)


def test_values_are_forgotten_after_a_minute_and_count_goes_on() -> None:
    summary = observed(5, at_ns=0)
    summary.observe(np.array([7]), np.array([SLOT_NS]))
    assert summary.quantiles([0, 1], SLOT_NS) == [5, 7]

    assert summary.quantiles([0, 1], MINUTE_NS) == [7, 7]
    assert math.isnan(summary.quantiles([0.5], 2 * MINUTE_NS)[0])
    assert (summary.count, summary.total) == (2, 12)


def test_old_slots_do_not_pile_up() -> None:
    summary = Summary()
    for slot in range(100):
        summary.observe(np.array([1]), np.array([slot * SLOT_NS]))

    assert len(summary._slots) == SLOTS


def test_nothing_is_counted_where_nothing_was() -> None:
    summary = observed()

    assert math.isnan(summary.quantiles([0.5], 0)[0])
    assert summary.count == 0


def test_a_page_shows_summaries_where_they_are_wanted() -> None:
    metrics = ModelMetrics("m", "1")
    metrics.summarize()
    metrics.summarize()
    run_batch(metrics)

    shown = page(metrics, PageView(quantiles=(0.5, 1), now_ns=400 * US))

    labels = 'model="m",version="1"'
    assert shown[f'nv_inference_request_summary_us{{{labels},quantile="1"}}'] == 300
    assert shown[f"nv_inference_request_summary_us_sum{{{labels}}}"] == 500
    assert shown[f"nv_inference_request_summary_us_count{{{labels}}}"] == 2
    assert shown[f"nv_inference_queue_summary_us_sum{{{labels}}}"] == 300
    assert shown[f"nv_inference_compute_input_summary_us_sum{{{labels}}}"] == 20
    assert shown[f"nv_inference_compute_infer_summary_us_sum{{{labels}}}"] == 160
    assert shown[f"nv_inference_compute_output_summary_us_sum{{{labels}}}"] == 20
    assert not any("summary" in name for name in page(metrics))


def test_requests_that_end_after_their_batch_and_ensembles_are_summarized() -> None:
    metrics = ModelMetrics("m", "1")
    metrics.summarize()
    metrics.request_done(100 * US, 1, 200 * US, (210 * US, 250 * US), 400 * US)
    metrics.composed(duration_ns=900 * US, inferences=1, queue_ns=US, compute_ns=2 * US, end_ns=US, wall_ms=1)

    shown = page(metrics, PageView(quantiles=(1,)))

    assert shown['nv_inference_request_summary_us_sum{model="m",version="1"}'] == 300 + 900
    assert shown['nv_inference_compute_infer_summary_us_sum{model="m",version="1"}'] == 190 + 2


def test_hits_and_misses_of_the_response_cache_are_summarized() -> None:
    metrics = ModelMetrics("m", "1")
    metrics.is_cached = True
    metrics.summarize()
    metrics.cache_hit(end_ns=US, duration_ns=30 * US, queue_ns=10 * US, lookup_ns=20 * US, wall_ms=7)
    metrics.cache_miss(US, 7 * US)

    shown = page(metrics, PageView(quantiles=(1,)))

    for name, us in (("hit", 20), ("miss", 7)):
        assert shown[f'nv_cache_{name}_summary_per_model{{model="m",version="1",quantile="1"}}'] == pytest.approx(
            us, 0.01
        )
        assert shown[f'nv_cache_{name}_summary_per_model_sum{{model="m",version="1"}}'] == us
        assert shown[f'nv_cache_{name}_summary_per_model_count{{model="m",version="1"}}'] == 1


def test_a_model_without_summaries_has_none() -> None:
    text = render([ModelSample(ModelMetrics("m", "1"), {}, 0)], view=PageView(quantiles=(0.5,))).decode()

    assert not any(name in text for name in SUMMARIES)


def test_counters_of_latencies_go_and_other_counters_stay() -> None:
    metrics = ModelMetrics("m", "1")
    run_batch(metrics)

    shown = page(metrics, PageView(counters=False))

    assert not any(name.split("{")[0].endswith("_duration_us") for name in shown)
    assert shown['nv_inference_request_success{model="m",version="1"}'] == 2


def test_histograms_of_latencies_go_and_that_of_batch_sizes_stays() -> None:
    metrics = ModelMetrics("m", "1")
    run_batch(metrics)

    names = {name.split("{")[0] for name in page(metrics, PageView(histograms=False))}

    assert "charonia_request_duration_seconds_bucket" not in names
    assert "charonia_batch_size_bucket" in names


def test_buckets_may_be_a_models_own() -> None:
    buckets = {REQUEST_DURATION: (250 * US, 350 * US), FIRST_RESPONSE: (1000 * US,), BATCH_SIZE: (3,)}
    metrics = ModelMetrics("m", "1", buckets)
    run_batch(metrics)
    metrics.first_response(10)

    shown = page(metrics)

    labels = 'model="m",version="1"'
    assert shown[f'charonia_request_duration_seconds_bucket{{{labels},le="0.00025"}}'] == 1
    assert shown[f'charonia_request_duration_seconds_bucket{{{labels},le="0.00035"}}'] == 2
    assert shown[f'nv_inference_first_response_histogram_ms_bucket{{{labels},le="1"}}'] == 1
    assert shown[f'charonia_batch_size_bucket{{{labels},le="3"}}'] == 1
