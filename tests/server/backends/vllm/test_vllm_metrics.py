"""vLLM's metrics on their way to the server."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from tests.support import pretended_vllm

from charonia.server.backends.vllm.worker import metrics
from charonia.server.backends.vllm.worker.metrics import SERIES_MAX, MetricsRelay, later_statistics

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
    settings = Gauge("vllm:other_config_info", "Settings.", ["block_size"])
    collectors += [many, other, settings]
    settings.labels(block_size="16").set(1)
    for number in range(SERIES_MAX + 1):
        many.labels(number=str(number)).set(1)
    assert len(reported(MetricsRelay(Family, LABELS))) == SERIES_MAX
    assert {report[0] for report in Family.reports} == {"vllm:many"}


def test_what_endpoint_pickers_read_is_reported_and_only_the_present_adapters(collectors: list[Any]) -> None:
    cache = Gauge("vllm:cache_config_info", "Settings.", ["block_size", "num_gpu_blocks", "cache_dtype"])
    loras = Gauge("vllm:lora_requests_info", "Adapters.", ["max_lora", "running_lora_adapters"])
    collectors += [cache, loras]
    cache.labels(block_size="16", num_gpu_blocks="100", cache_dtype="auto").set(1)
    loras.labels(max_lora="2", running_lora_adapters="sql").set(10)
    relay = MetricsRelay(Family, LABELS)
    assert reported(relay) == [
        ("vllm:cache_config_info", Family.GAUGE, {**LABELS, "block_size": "16", "num_gpu_blocks": "100"}, 1),
        ("vllm:lora_requests_info", Family.GAUGE, {**LABELS, "max_lora": "2", "running_lora_adapters": "sql"}, 10),
    ]
    for running, at in (("doll", 11), ("sql", 12)):
        loras.labels(max_lora="2", running_lora_adapters=running).set(at)
        assert [(report[2]["running_lora_adapters"], report[3]) for report in reported(relay)] == [(running, at)]
        assert len([known for known in relay._metrics if known[0] == "vllm:lora_requests_info"]) == 1


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in pretended_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def test_statistics_are_counted_in_their_order_when_they_are_asked_for(vllm: None) -> None:
    logger = later_statistics()()
    logger.record(None, "first", engine_idx=0)
    logger.record(None, "second")
    assert logger.recorded == []
    assert [logger.count(), logger.count(), logger.count()] == [True, True, False]
    assert logger.recorded == ["first", "second"]


def test_no_more_statistics_wait_than_the_limit(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "RECORDS_MAX", 2)
    logger = later_statistics()()
    for number in range(5):
        logger.record(None, number)
    assert logger.recorded == [0, 1, 2]
