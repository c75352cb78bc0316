"""Metrics in a model's configuration: tags that can be labels, buckets that a histogram can have."""

import pytest

from charonia.config.model import HistogramOptions, MetricControl, MetricIdentifier, ModelConfig, ModelMetricsConfig
from charonia.server.metrics.metric_families import (
    BUCKETS_MAX,
    bucket_problems,
    chosen_buckets,
    tag_problems,
    unknown_families,
)

REQUESTS = "charonia_request_duration_seconds"


def config(family: str = REQUESTS, *buckets: float) -> ModelConfig:
    control = MetricControl(MetricIdentifier(family), HistogramOptions(buckets))
    return ModelConfig(model_metrics=ModelMetricsConfig((control,)))


def test_buckets_are_counted_in_the_unit_of_the_histogram() -> None:
    assert chosen_buckets(config(REQUESTS, 0.001, 0.5)) == {REQUESTS: (1_000_000, 500_000_000)}
    assert chosen_buckets(config("charonia_batch_size", 3, 9)) == {"charonia_batch_size": (3, 9)}
    assert chosen_buckets(config("nv_inference_first_response_histogram_ms", 5)) == {
        "nv_inference_first_response_histogram_ms": (5_000_000,)
    }
    assert chosen_buckets(ModelConfig()) == chosen_buckets(ModelConfig(model_metrics=ModelMetricsConfig())) == {}


def test_buckets_that_are_one_and_the_same_when_counted_are_one() -> None:
    assert chosen_buckets(config(REQUESTS, 1e-12, 2e-12, 1, float("inf"))) == {REQUESTS: (0, 1_000_000_000)}


def test_a_control_without_options_chooses_nothing() -> None:
    assert chosen_buckets(ModelConfig(model_metrics=ModelMetricsConfig((MetricControl(),)))) == {}


@pytest.mark.parametrize(
    ("made", "path", "part"),
    [
        (config(REQUESTS, *range(BUCKETS_MAX + 1)), "histogram_options.buckets", f"at most {BUCKETS_MAX} buckets"),
        (config(REQUESTS, float("inf")), "histogram_options.buckets", "finite"),
    ],
)
def test_buckets_that_cannot_be_counted_are_refused(made: ModelConfig, path: str, part: str) -> None:
    (problem,) = bucket_problems(made)

    assert problem.path == f"model_metrics.metric_control[0].{path}"
    assert part in problem.message


def test_a_family_that_the_server_does_not_have_is_left_out() -> None:
    made = config("nv_inference_count", 1)

    assert list(bucket_problems(made)) == []
    assert unknown_families(made) == ["nv_inference_count"]
    assert unknown_families(config(REQUESTS, 1)) == unknown_families(ModelConfig()) == []
    assert chosen_buckets(made) == {}


def test_right_buckets_are_no_problem() -> None:
    assert list(bucket_problems(config(REQUESTS, 0.1, 1))) == list(bucket_problems(ModelConfig())) == []


@pytest.mark.parametrize("tag", ["", "team-name", 'a"b', "ä"])
def test_a_tag_that_is_no_label_is_refused(tag: str) -> None:
    (problem,) = tag_problems(ModelConfig(metric_tags={tag: "x", "team_1": "y"}))

    assert problem.path == f"metric_tags[{tag}]"
