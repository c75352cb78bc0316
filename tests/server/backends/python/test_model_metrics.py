"""Metrics that a Python model makes, over a host that only takes notes."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake_host import FakeHost

from charonia.server.backends.python.worker import triton_python_backend_utils as unbound
from charonia.server.backends.python.worker.host import Binding
from charonia.server.channel.datatypes import TritonModelException


@pytest.fixture
def notes() -> FakeHost:
    return FakeHost()


@pytest.fixture
def pb_utils(notes: FakeHost) -> Any:
    return unbound.bound_to(Binding(notes))


def test_a_counter_counts_and_goes_with_its_family(notes: FakeHost, pb_utils: Any) -> None:
    family = pb_utils.MetricFamily(name="n", description="d", kind=pb_utils.MetricFamily.COUNTER)
    metric = family.Metric(labels={"a": "b"})
    metric.increment(2)
    metric.increment(0.5)

    assert metric.value() == 2.5  # in the server's words: other instances count, too
    del metric
    gc.collect()
    assert notes.told[-1] == ("value", 3, 2)
    del family
    gc.collect()
    assert notes.told == [
        ("family", 1, "n", "d", "counter"),
        ("metric", 2, 1, {"a": "b"}, None),
        ("add", 2, 2.0),
        ("add", 2, 0.5),
        ("value", 3, 2),
        ("drop_family", 1),
    ]


def test_metrics_of_a_family_with_the_same_labels_are_one(notes: FakeHost, pb_utils: Any) -> None:
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.GAUGE)
    metrics = [family.Metric(labels=labels) for labels in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1"})]

    for value, metric in enumerate(metrics):
        metric.set(value)

    assert notes.told[-3:] == [("set", 2, 0.0), ("set", 2, 1.0), ("set", 3, 2.0)]
    assert len(notes.told) == 6


@pytest.mark.parametrize(
    ("kind", "use", "verb"),
    [
        (0, lambda m: m.increment(1), "increment"),
        (1, lambda m: m.set(1), "set"),
        (1, lambda m: m.value(), "get"),
        (2, lambda m: m.observe(1), "observe"),
    ],
)
def test_a_metric_cannot_be_used_after_its_family(
    notes: FakeHost, pb_utils: Any, kind: int, use: Callable[[Any], object], verb: str
) -> None:
    metric = pb_utils.MetricFamily("n", "d", kind).Metric(buckets=[1] if kind == 2 else None)
    gc.collect()

    with pytest.raises(TritonModelException, match=f"{verb} metric value: .* 'MetricFamily' has been deleted"):
        use(metric)
    assert notes.told[-1] == ("drop_family", 1)


def test_a_gauge_goes_up_and_down(notes: FakeHost, pb_utils: Any) -> None:
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.GAUGE)
    metric = family.Metric()

    metric.set(5)
    metric.increment(-2)

    assert notes.told[-2:] == [("set", 2, 5.0), ("add", 2, -2.0)]


def test_a_histogram_observes(notes: FakeHost, pb_utils: Any) -> None:
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.HISTOGRAM)
    metric = family.Metric(labels={}, buckets=[1, 2.5, 10])

    metric.observe(3)

    assert notes.told[1:] == [("metric", 2, 1, {}, [1.0, 2.5, 10.0]), ("observe", 2, 3.0)]


KINDS = {"counter": 0, "gauge": 1, "histogram": 2}


@pytest.mark.parametrize(
    ("kind", "use", "message"),
    [
        ("counter", lambda m: m.increment(-1), "counter cannot be incremented by a negative value, -1"),
        ("counter", lambda m: m.set(1), "counter cannot be set; only a gauge can"),
        ("counter", lambda m: m.observe(1), "counter cannot observe values"),
        ("gauge", lambda m: m.observe(1), "gauge cannot observe values"),
        ("gauge", lambda m: m.set("much"), "expected a number, got 'much'"),
        ("gauge", lambda m: m.set(None), "expected a number, got None"),
        ("gauge", lambda m: m.set(math.nan), "expected a number, got NaN"),
        ("histogram", lambda m: m.increment(1), "histogram cannot be incremented"),
        ("histogram", lambda m: m.set(1), "histogram cannot be set"),
        ("histogram", lambda m: m.value(), "histogram cannot be read as one value"),
    ],
)
def test_what_a_kind_of_metric_cannot_do_is_refused(
    pb_utils: Any, kind: str, use: Callable[[Any], object], message: str
) -> None:
    buckets = [1.0] if kind == "histogram" else None
    family = pb_utils.MetricFamily("n", "d", KINDS[kind])
    metric = family.Metric(buckets=buckets)

    with pytest.raises(TritonModelException, match=message):
        use(metric)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("counter", {"labels": ["a"]}, "expected a dict as labels, got list"),
        ("counter", {"labels": {"a": 1}}, "expected strings as labels, got 'a': 1"),
        ("counter", {"buckets": [1]}, "unexpected buckets: a counter has none"),
        ("histogram", {}, "a histogram needs buckets"),
        ("histogram", {"buckets": [1, 1]}, "expected buckets that increase"),
        ("histogram", {"buckets": [2, 1]}, "expected buckets that increase"),
        ("histogram", {"buckets": [math.nan]}, "expected buckets that increase"),
        ("histogram", {"buckets": ["x"]}, "expected numbers as buckets"),
    ],
)
def test_a_metric_that_is_made_wrongly_is_refused(
    notes: FakeHost, pb_utils: Any, kind: str, arguments: dict[str, Any], message: str
) -> None:
    family = pb_utils.MetricFamily("n", "d", KINDS[kind])

    with pytest.raises(TritonModelException, match=message):
        family.Metric(**arguments)
    gc.collect()
    assert len(notes.told) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n", "d", 3), "expected COUNTER, GAUGE or HISTOGRAM as kind, got 3"),
        (("n", "d", "counter"), "expected COUNTER, GAUGE or HISTOGRAM"),
        ((1, "d", 0), "expected a string as name"),
        (("n", 1, 0), "expected a string as description"),
    ],
)
def test_a_family_that_is_made_wrongly_is_refused(
    notes: FakeHost, pb_utils: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(TritonModelException, match=message):
        pb_utils.MetricFamily(*arguments)
    gc.collect()
    assert notes.told == []


def test_a_family_that_contradicts_another_is_refused_in_the_servers_words(notes: FakeHost, pb_utils: Any) -> None:
    notes.refusal = "family 'n' is a gauge of model 'other'"

    with pytest.raises(TritonModelException, match="is a gauge of model 'other'"):
        pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
    gc.collect()
    assert notes.told == []
