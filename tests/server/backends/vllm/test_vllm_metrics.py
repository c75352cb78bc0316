"""vLLM's metrics on their way to the server."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from charonia.server.backends.vllm.worker.metrics import SERIES_MAX, MetricsRelay

LABELS = {"model": "lm", "version": "1"}
ENGINE = {"model_name": "m", "engine": "0"}


class Family:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    reports: list[tuple[Any, ...]]

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name
        self.kind = kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> "Metric":  # noqa: N802
        return Metric(self, labels, buckets)


class Metric:
    def __init__(self, family: Family, labels: dict[str, str], buckets: list[float] | None) -> None:
        self.about = (family.name, family.kind, labels)
        self.buckets = buckets

    def increment(self, value: float) -> None:
        Family.reports.append((*self.about, value))

    set = increment

    def merge(self, counts: list[int], total: float) -> None:
        Family.reports.append((*self.about, self.buckets, counts, total))


@pytest.fixture
def collectors() -> Iterator[list[Any]]:
    Family.reports = []
    made: list[Any] = []
    yield made
    for each in made:
        REGISTRY.unregister(each)


def reported(relay: MetricsRelay) -> list[tuple[Any, ...]]:
    Family.reports = []
    relay.report()
    return Family.reports


def test_what_has_changed_is_reported_once_with_the_models_labels(collectors: list[Any]) -> None:
    tokens = Counter("vllm:tokens", "Tokens.", [*ENGINE, "source"])
    running = Gauge("vllm:running", "Requests.", [*ENGINE])
    collectors += [tokens, running]
    tokens.labels(**ENGINE, source="disk").inc(3)
    running.labels(**ENGINE).set(2)
    relay = MetricsRelay(Family, LABELS)
    assert reported(relay) == [
        ("vllm:tokens_total", Family.COUNTER, {**LABELS, "source": "disk"}, 3),
        ("vllm:running", Family.GAUGE, LABELS, 2),
    ]
    assert reported(relay) == []
    tokens.labels(**ENGINE, source="disk").inc(4)
    running.labels(**ENGINE).set(0)
    assert [report[3] for report in reported(relay)] == [4, 0]


def test_histograms_are_reported_by_what_their_buckets_have_gained(collectors: list[Any]) -> None:
    latency = Histogram("vllm:latency_seconds", "Latency.", [*ENGINE], buckets=[1, 10])
    collectors.append(latency)
    relay = MetricsRelay(Family, LABELS)
    latency.labels(**ENGINE).observe(0.5)
    latency.labels(**ENGINE).observe(20)
    about = ("vllm:latency_seconds", Family.HISTOGRAM, LABELS, [1.0, 10.0])
    assert reported(relay) == [(*about, [1, 0, 1], 20.5)]
    assert reported(relay) == []
    latency.labels(**ENGINE).observe(5)
    assert reported(relay) == [(*about, [0, 1, 0], 5)]


def test_other_metrics_and_settings_are_left_out_and_there_is_a_limit(collectors: list[Any]) -> None:
    many = Gauge("vllm:many", "Many.", ["number"])
    other = Gauge("other", "Other.")
    settings = Gauge("vllm:cache_config_info", "Settings.", ["block_size"])
    collectors += [many, other, settings]
    settings.labels(block_size="16").set(1)
    for number in range(SERIES_MAX + 1):
        many.labels(number=str(number)).set(1)
    assert len(reported(MetricsRelay(Family, LABELS))) == SERIES_MAX
    assert {report[0] for report in Family.reports} == {"vllm:many"}
