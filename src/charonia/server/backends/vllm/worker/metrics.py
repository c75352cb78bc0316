"""Hands vLLM's Prometheus metrics to the server, which shows them beside its own."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

PREFIX = "vllm:"

RECORDS_MAX = 4096
"""Steps of the engine whose statistics may wait."""

SERIES_MAX = 512
"""Metrics that are handed on; there are about a hundred."""

_INFORMATION = "_info"
"""Ends of families whose labels are settings of the engine, dozens of them."""

_CACHE = "vllm:cache_config_info"
_LORAS = "vllm:lora_requests_info"
"""Those that endpoint pickers of clusters read, of the first the labels below. Its series with the greatest value, a
time, is the present one; the others are left out."""

_CACHE_LABELS = ("block_size", "num_gpu_blocks")
_DROPPED_LABELS = ("model_name", "engine")


def later_statistics() -> Any:
    """Return a logger class of vLLM whose Prometheus metrics are brought up to date when they are read.

    vLLM's own does so after each step of the engine, between the tokens and the clients. `latest` of the class is
    the logger that was made last. None for a version of vLLM that has no such class.
    """
    try:
        from vllm.v1.metrics.loggers import PrometheusStatLogger
    except ImportError:
        return None

    class LaterStatistics(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._waiting: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque()
            LaterStatistics.latest = self

        def record(self, *args: Any, **kwargs: Any) -> None:
            self._waiting.append((args, kwargs))
            if len(self._waiting) > RECORDS_MAX:
                self.count()

        def count(self) -> bool:
            """Count the statistics of one step; return whether there were any."""
            if not self._waiting:
                return False
            args, kwargs = self._waiting.popleft()
            super().record(*args, **kwargs)
            return True

    return LaterStatistics


class MetricsRelay:
    """Reads vLLM's metrics, and reports what has changed since the last time.

    Args:
        family_class: `MetricFamily` of the Python models' API.
        labels: Labels of every metric, in place of those with which vLLM names the model.
    """

    def __init__(self, family_class: Any, labels: dict[str, str]) -> None:
        from prometheus_client import REGISTRY

        self._registry = REGISTRY
        self._family_class = family_class
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[Any, ...], Any] = {}
        self._values: dict[tuple[Any, ...], Any] = {}

    def report(self) -> None:
        for family in self._registry.collect():
            if (
                family.name.startswith(PREFIX)
                and (not family.name.endswith(_INFORMATION) or family.name in (_CACHE, _LORAS))
                and family.type in ("counter", "gauge", "histogram")
            ):
                self._report(family)

    def _report(self, family: Any) -> None:
        if family.type == "histogram":
            for key, buckets in _histograms(family.samples).items():
                self._merge(family, key, *buckets)
            return
        suffix = "_total" if family.type == "counter" else ""
        samples = [sample for sample in family.samples if sample.name == family.name + suffix]
        if family.name == _LORAS and samples:
            samples = [max(samples, key=lambda sample: sample.value)]
            self._drop_others(family.name, _key(samples[0].labels))
        for sample in samples:
            labels = sample.labels
            if family.name == _CACHE:
                labels = {name: labels[name] for name in _CACHE_LABELS if name in labels}
            self._change(family, sample.name, _key(labels), float(sample.value))

    def _drop_others(self, name: str, key: tuple[tuple[str, str], ...]) -> None:
        if any(known[0] == name and known[1] != key for known in self._metrics):
            self._metrics = {known: metric for known, metric in self._metrics.items() if known[0] != name}
            self._values = {known: value for known, value in self._values.items() if known[0] != name}
            self._families.pop(name, None)  # which removes its series

    def _change(self, family: Any, name: str, key: tuple[tuple[str, str], ...], value: float) -> None:
        before = self._values.get((name, key))
        metric = self._metric(family, name, key)
        if metric is None or value == before:
            return
        self._values[name, key] = value
        if family.type == "gauge":
            metric.set(value)
        elif value > (before or 0.0):
            metric.increment(value - (before or 0.0))

    def _merge(
        self, family: Any, key: tuple[tuple[str, str], ...], bounds: list[float], counts: list[int], total: float
    ) -> None:
        before, sum_before = self._values.get((family.name, key), ([0] * len(counts), 0.0))
        metric = self._metric(family, family.name, key, bounds)
        if metric is None or counts == before:
            return
        self._values[family.name, key] = (counts, total)
        metric.merge([now - then for now, then in zip(counts, before, strict=True)], total - sum_before)

    def _metric(
        self, family: Any, name: str, key: tuple[tuple[str, str], ...], bounds: list[float] | None = None
    ) -> Any:
        found = self._metrics.get((name, key))
        if found is None and len(self._metrics) < SERIES_MAX:
            if name not in self._families:
                kind = getattr(self._family_class, family.type.upper())
                self._families[name] = self._family_class(name, family.documentation, kind)
            labels = {**dict(key), **self._labels}
            found = self._metrics[name, key] = self._families[name].Metric(labels, bounds)
        return found


def _key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((name, value) for name, value in labels.items() if name not in _DROPPED_LABELS and name != "le")
    )


def _histograms(samples: list[Any]) -> dict[tuple[tuple[str, str], ...], tuple[list[float], list[int], float]]:
    """Return upper bounds, the last is infinity and left out, counts of each bucket alone, and sum, by the labels."""
    cumulative: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        key = _key(sample.labels)
        if sample.name.endswith("_bucket"):
            cumulative.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    found = {}
    for key, buckets in cumulative.items():
        buckets.sort()
        totals = [0.0, *(count for _, count in buckets)]
        counts = [int(after - before) for before, after in pairwise(totals)]
        found[key] = ([bound for bound, _ in buckets[:-1]], counts, sums.get(key, 0.0))
    return found
