"""Metrics that models make: shared by name and labels, held by workers, refused where they contradict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.server.metrics import custom
from charonia.server.metrics.custom import CustomMetrics, MetricHolder
from charonia.server.metrics.prometheus import metric_names, render


def page(metrics: CustomMetrics) -> list[str]:
    return [line for line in render([], None, metrics).decode().splitlines() if line]


def test_a_counter_is_on_the_page_with_its_labels() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    worker.declare(1, "pages_total", "Pages\nread", "counter")
    worker.add(2, 1, {"kind": 'a"b', "b": "x"}, None)
    worker.add(3, 1, {}, None)
    worker.increase(2, 2)
    worker.increase(2, 0.5)

    assert page(metrics) == [
        r"# HELP pages_total Pages\nread",
        "# TYPE pages_total counter",
        r'pages_total{b="x",kind="a\"b"} 2.5',
        "pages_total 0",
    ]


def test_a_histogram_has_cumulative_buckets() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    worker.declare(1, "seconds", "Time", "histogram")
    worker.add(2, 1, {"step": "ocr"}, [0.1, 1, float("inf")])
    worker.add(3, 1, {}, [5])
    for value in (0.05, 0.1, 0.5, 3):
        worker.observe(2, value)

    assert page(metrics)[2:] == [
        'seconds_bucket{step="ocr",le="0.1"} 2',
        'seconds_bucket{step="ocr",le="1"} 3',
        'seconds_bucket{step="ocr",le="+Inf"} 4',
        'seconds_sum{step="ocr"} 3.65',
        'seconds_count{step="ocr"} 4',
        'seconds_bucket{le="5"} 0',
        'seconds_bucket{le="+Inf"} 0',
        "seconds_sum 0",
        "seconds_count 0",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "NaN"), (float("inf"), "+Inf"), (-float("inf"), "-Inf"), (1e20, "1e+20")]
)
def test_a_gauge_shows_what_was_set_last_by_whomever(value: float, text: str) -> None:
    metrics = CustomMetrics()
    workers = [MetricHolder(metrics), MetricHolder(metrics)]
    for worker in workers:
        worker.declare(1, "level", "Level", "gauge")
        worker.add(2, 1, {}, None)
    workers[0].set(2, 7)
    workers[1].set(2, value)

    assert page(metrics)[-1] == f"level {text}"


def test_instances_count_together_until_the_last_of_them_has_ended() -> None:
    metrics = CustomMetrics()
    workers = [MetricHolder(metrics), MetricHolder(metrics)]
    for worker in workers:
        worker.declare(1, "n_total", "N", "counter")
        worker.add(2, 1, {}, None)
        worker.increase(2, 1)
    workers[0].drop_all()
    assert page(metrics)[-1] == "n_total 2"
    workers[1].drop_all()
    assert page(metrics) == []


def test_a_family_without_metrics_is_not_on_the_page() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    worker.declare(1, "n_total", "N", "counter")
    assert list(metrics.families()) == []
    worker.add(2, 1, {}, None)
    worker.drop_family(1)
    worker.drop_family(1)
    worker.increase(2, 1)
    worker.declare(3, "n_total", "another kind now", "gauge")
    assert list(metrics.families()) == []


def test_families_of_one_name_share_their_metrics_whatever_their_descriptions() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    for family, description in ((1, "first"), (2, "second")):
        worker.declare(family, "n", description, "gauge")
        worker.add(family + 2, family, {"a": "1"}, None)
    worker.set(3, 5)

    assert worker.value(4) == 5
    worker.drop_family(1)
    assert page(metrics) == ["# HELP n first", "# TYPE n gauge", 'n{a="1"} 5']
    with pytest.raises(ServingError, match="is not there"):
        worker.value(3)


@pytest.mark.parametrize(
    ("name", "description", "kind", "words"),
    [
        ("n_total", "N", "gauge", "got kind gauge"),
        ("1n", "N", "counter", "begins with no digit"),
        ("n", "N", "summary", "expected one of the kinds"),
        ("nv_inference_count", "N", "counter", "the server has a metric of this name"),
    ],
)
def test_a_family_that_cannot_be_is_refused(name: str, description: str, kind: str, words: str) -> None:
    metrics = CustomMetrics(reserved=metric_names())
    worker = MetricHolder(metrics)
    worker.declare(1, "n_total", "N", "counter")
    with pytest.raises(ServingError, match=words) as caught:
        worker.declare(2, name, description, kind)
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("labels", "buckets", "words"),
    [
        ({"le": "1"}, [1.0], "'le' cannot be a label"),
        ({"a-b": "1"}, [1.0], "'a-b' cannot be a label"),
        ({}, [2.0, 1.0], "ascending"),
        ({}, [float("nan")], "ascending"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(labels: dict[str, str], buckets: list[float] | None, words: str) -> None:
    worker = MetricHolder(CustomMetrics())
    worker.declare(1, "h", "H", "histogram")
    with pytest.raises(ServingError, match=words):
        worker.add(2, 1, labels, buckets)


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "SERIES_MAX", 2)
    worker = MetricHolder(CustomMetrics())
    worker.declare(1, "a", "A", "gauge")
    worker.declare(2, "b", "B", "gauge")
    with pytest.raises(ServingError, match="2 families already"):
        worker.declare(3, "c", "C", "gauge")
    worker.add(4, 1, {"x": "1"}, None)
    worker.add(5, 1, {"x": "2"}, None)
    with pytest.raises(ServingError, match="2 metrics already"):
        worker.add(6, 1, {"x": "3"}, None)


def test_what_was_never_declared_is_ignored() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    worker.add(1, 9, {}, None)
    worker.increase(1, 1)
    worker.set(1, 1)
    worker.observe(1, 1)
    assert page(metrics) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"]), st.booleans()), max_size=40))
def test_a_metric_is_there_exactly_while_a_family_with_it_is(deeds: list[tuple[int, str, bool]]) -> None:
    metrics = CustomMetrics()
    workers = [MetricHolder(metrics) for _ in range(3)]
    held: list[dict[int, str]] = [{}, {}, {}]
    for number, (who, label, takes) in enumerate(deeds):
        if takes:
            workers[who].declare(number, "m", "M", "gauge")
            workers[who].add(100 + number, number, {"l": label}, None)
            held[who][number] = label
        elif held[who]:
            dropped, _ = held[who].popitem()
            workers[who].drop_family(dropped)
        there = {dict(metric.labels)["l"] for family in metrics.families() for metric in family.metrics.values()}
        assert there == {label for each in held for label in each.values()}


def test_observations_that_others_have_counted_are_added() -> None:
    metrics = CustomMetrics()
    worker = MetricHolder(metrics)
    worker.declare(1, "seconds", "Time", "histogram")
    worker.add(2, 1, {}, [1, 5])
    worker.observe(2, 0.5)
    worker.merge(2, [1, 0, 2], 30.5)

    assert page(metrics)[2:] == [
        'seconds_bucket{le="1"} 2',
        'seconds_bucket{le="5"} 2',
        'seconds_bucket{le="+Inf"} 4',
        "seconds_sum 31",
        "seconds_count 4",
    ]
    with pytest.raises(ValueError, match="expected counts of 3 buckets, got 2"):
        worker.merge(2, [1, 2], 3)
