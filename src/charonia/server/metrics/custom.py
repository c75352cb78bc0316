"""Custom metrics, which models define and the metrics page shows. Pure.

Models declare families (name, description, kind) and metrics in them, each with its own labels. Two declarations with
the same name and labels share one metric, so that instances of a model count together. A metric exists until the last
family object with which it was made is released, a family until its last one.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal

from charonia.core.errors import invalid, not_found, unavailable

SERIES_MAX = 10_000
"""Limit of families, and of the metrics of each."""

Kind = Literal["counter", "gauge", "histogram"]
KINDS: tuple[Kind, ...] = ("counter", "gauge", "histogram")

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class CustomMetric:
    """One metric: its labels and its value.

    Attributes:
        labels: Label and value, sorted by label.
        value: Value of a counter or a gauge; the sum of the values of a histogram.
        bounds: Upper bounds of a histogram's buckets, ascending.
        counts: Values in each bucket alone (not cumulative), one more than `bounds`; empty unless a histogram.
    """

    def __init__(self, labels: tuple[tuple[str, str], ...], bounds: tuple[float, ...] | None) -> None:
        self.labels = labels
        self.value = 0.0
        self.bounds = bounds or ()
        self.counts = [0] * (len(bounds) + 1) if bounds is not None else []
        self.holders = 0


class CustomFamily:
    """Metrics of one name.

    Attributes:
        name: Name, as the model gave it.
        description: Its help text: that of its first declaration.
        kind: "counter", "gauge" or "histogram".
        metrics: Its metrics by labels.
    """

    def __init__(self, name: str, description: str, kind: Kind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.metrics: dict[tuple[tuple[str, str], ...], CustomMetric] = {}
        self.holders = 0


class CustomMetrics:
    """The families of all models.

    Args:
        reserved: Names of metrics that models may not use: the server's own.
    """

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._families: dict[str, CustomFamily] = {}

    def families(self) -> Iterator[CustomFamily]:
        for name in sorted(self._families):
            if self._families[name].metrics:
                yield self._families[name]

    def declare(self, name: str, description: str, kind: str) -> CustomFamily:
        """Return the family of this name, held once more.

        Raises:
            ServingError: INVALID_ARG for a name that is taken by a metric of the server, by a family of another
                kind, or that no metric can have; UNAVAILABLE when there are too many.
        """
        if not _NAME.fullmatch(name):
            raise invalid(f"metric family '{name}': a name has letters, digits, '_' and ':' and begins with no digit")
        known = next((k for k in KINDS if k == kind), None)
        if known is None:
            raise invalid(f"metric family '{name}': expected one of the kinds {', '.join(KINDS)}, got '{kind}'")
        if name in self._reserved:
            raise invalid(f"metric family '{name}': the server has a metric of this name")
        family = self._families.get(name)
        if family is None:
            if len(self._families) >= SERIES_MAX:
                raise unavailable(f"metric family '{name}': there are {SERIES_MAX} families already")
            family = self._families[name] = CustomFamily(name, description, known)
        elif family.kind != kind:
            raise invalid(f"metric family '{name}' exists with kind {family.kind}, got kind {kind}")
        family.holders += 1
        return family

    def add(self, family: CustomFamily, labels: dict[str, str], buckets: Sequence[float] | None) -> CustomMetric:
        """Return the metric of a family with these labels, held once more.

        Raises:
            ServingError: INVALID_ARG for labels or buckets that no metric can have; UNAVAILABLE when there are too
                many.
        """
        for label in labels:
            if not _LABEL.fullmatch(label) or label == "le":
                raise invalid(f"a metric of family '{family.name}': '{label}' cannot be a label")
        key = tuple(sorted((label, str(value)) for label, value in labels.items()))
        metric = family.metrics.get(key)
        if metric is None:
            if len(family.metrics) >= SERIES_MAX:
                raise unavailable(f"metric family '{family.name}' has {SERIES_MAX} metrics already")
            metric = family.metrics[key] = CustomMetric(key, _bounds(family, buckets))
        metric.holders += 1
        return metric

    def drop_metric(self, family: CustomFamily, metric: CustomMetric) -> None:
        """Release a metric; the last release removes it."""
        metric.holders -= 1
        if not metric.holders:
            del family.metrics[metric.labels]

    def drop_family(self, family: CustomFamily) -> None:
        """Release a family; the last release removes it."""
        family.holders -= 1
        if not family.holders:
            del self._families[family.name]


class MetricHolder:
    """The metrics of one worker, which refers to them by number; all are released when it ends."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._all = metrics
        self._families: dict[int, tuple[CustomFamily, list[int]]] = {}  # each with the numbers of its metrics
        self._metrics: dict[int, CustomMetric] = {}

    def declare(self, number: int, name: str, description: str, kind: str) -> None:
        """Declare a family under a number. Raises as `CustomMetrics.declare`."""
        self._families[number] = (self._all.declare(name, description, kind), [])

    def add(self, number: int, family: int, labels: dict[str, str], buckets: Sequence[float] | None) -> None:
        """Declare a metric under a number. Raises as `CustomMetrics.add`."""
        if family in self._families:
            found, numbers = self._families[family]
            self._metrics[number] = self._all.add(found, labels, buckets)
            numbers.append(number)

    def value(self, number: int) -> float:
        """Return the value of a counter or a gauge.

        Raises:
            ServingError: NOT_FOUND: the metric does not exist; the log says why.
        """
        if number not in self._metrics:
            raise not_found("the metric is not there: the server has refused it")
        return self._metrics[number].value

    def increase(self, number: int, value: float) -> None:
        if number in self._metrics:
            self._metrics[number].value += value

    def set(self, number: int, value: float) -> None:
        if number in self._metrics:
            self._metrics[number].value = value

    def observe(self, number: int, value: float) -> None:
        """Count a value in a histogram."""
        if number in self._metrics:
            metric = self._metrics[number]
            metric.value += value
            metric.counts[bisect_left(metric.bounds, value)] += 1

    def merge(self, number: int, counts: Sequence[int], total: float) -> None:
        """Add values to a histogram that others have counted.

        Args:
            number: The metric.
            counts: How many there are in each of its buckets.
            total: Their sum.

        Raises:
            ValueError: The metric has another number of buckets.
        """
        if number in self._metrics:
            metric = self._metrics[number]
            if len(counts) != len(metric.counts):
                raise ValueError(f"expected counts of {len(metric.counts)} buckets, got {len(counts)}")
            metric.value += total
            metric.counts = [before + more for before, more in zip(metric.counts, counts, strict=True)]

    def drop_family(self, number: int) -> None:
        """Release a family and its metrics."""
        family, numbers = self._families.pop(number, (None, []))
        if family is not None:
            for each in numbers:
                self._all.drop_metric(family, self._metrics.pop(each))
            self._all.drop_family(family)

    def drop_all(self) -> None:
        """Release everything: the worker has ended."""
        for number in list(self._families):
            self.drop_family(number)


def _bounds(family: CustomFamily, buckets: Sequence[float] | None) -> tuple[float, ...] | None:
    if family.kind != "histogram":
        return None
    bounds = tuple(float(bound) for bound in buckets or ())
    if any(math.isnan(bound) for bound in bounds) or list(bounds) != sorted(set(bounds)):
        raise invalid(f"a metric of family '{family.name}': expected buckets in ascending order, got {list(bounds)}")
    return bounds[:-1] if bounds and math.isinf(bounds[-1]) else bounds
