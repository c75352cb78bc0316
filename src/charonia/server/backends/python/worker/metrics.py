"""Custom metrics of models, exposed with the server's."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from ....channel.datatypes import TritonModelException
from .errors import checked_text
from .host import Binding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import ClassVar

    from .host import Host

_KINDS = ("counter", "gauge", "histogram")


class _Family:
    """What a family and its metrics share; metrics do not keep the family alive."""

    def __init__(self, host: Host, name: str, kind: int) -> None:
        self.host = host
        self.name = name
        self.kind = kind
        self.number = 0
        self.metrics: dict[frozenset[tuple[str, str]], int] = {}
        self.is_gone = False


class Metric:
    """One metric of a family, told from the others by its labels: equal labels mean the same metric."""

    def __init__(
        self, family: MetricFamily, labels: Mapping[str, str] | None = None, buckets: Iterable[float] | None = None
    ) -> None:
        self._family = shared = family._family
        self._kind = shared.kind
        bounds = _bounds(shared, buckets)
        names = _labels(shared, labels)
        key = frozenset(names.items())
        self._number = shared.metrics.get(key, 0)
        if not self._number:
            self._number = shared.host.make_number()
            shared.host.metrics([("metric", self._number, shared.number, names, bounds)])
            shared.metrics[key] = self._number

    def increment(self, value: float) -> None:
        """Add to the value; a counter takes nothing negative."""
        host = self._reach("increment")
        if self._kind == MetricFamily.HISTOGRAM:
            raise self._cannot("be incremented; it observes values")
        amount = self._number_of(value)
        if self._kind == MetricFamily.COUNTER and amount < 0:
            raise self._cannot(f"be incremented by a negative value, {amount:g}")
        host.metrics([("add", self._number, amount)])

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        host = self._reach("set")
        if self._kind != MetricFamily.GAUGE:
            raise self._cannot("be set; only a gauge can")
        host.metrics([("set", self._number, self._number_of(value))])

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        host = self._reach("observe")
        if self._kind != MetricFamily.HISTOGRAM:
            raise self._cannot("observe values; only a histogram does")
        host.metrics([("observe", self._number, self._number_of(value))])

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add observations that others have counted to a histogram.

        Args:
            counts: How many are in each bucket alone, and above the last bound.
            total: Their sum.
        """
        host = self._reach("merge")
        if self._kind != MetricFamily.HISTOGRAM:
            raise self._cannot("merge observations; only a histogram does")
        host.metrics([("merge", self._number, [int(count) for count in counts], self._number_of(total))])

    def value(self) -> float:
        """Return the value, which all instances of the model make together."""
        host = self._reach("get")
        if self._kind == MetricFamily.HISTOGRAM:
            raise self._cannot("be read as one value")
        return float(host.ask_metrics(("value", host.make_number(), self._number)))

    def _reach(self, what: str) -> Host:
        if self._family.is_gone:
            raise TritonModelException(
                f"Failed to {what} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been "
                "deleted. Keep the MetricFamily object for as long as its metrics are in use."
            )
        return self._family.host

    def _number_of(self, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type] # what it cannot take is refused
        except (TypeError, ValueError):
            raise TritonModelException(
                f"Metric of family '{self._family.name}': expected a number, got {value!r}"
            ) from None
        if math.isnan(number):
            raise TritonModelException(f"Metric of family '{self._family.name}': expected a number, got NaN")
        return number

    def _cannot(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"Metric of family '{self._family.name}': unsupported operation: a {_KINDS[self._kind]} cannot {what}"
        )


class MetricFamily:
    """A family of custom metrics. It and its metrics last as long as this object."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    _binding: ClassVar[Binding] = Binding(None)
    """Of the model that the class is for; see `bound_to`."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        if isinstance(kind, bool) or kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException(f"MetricFamily: expected COUNTER, GAUGE or HISTOGRAM as kind, got {kind!r}")
        text = checked_text("MetricFamily", "description", description)
        host = self._binding.reach()
        self._family = family = _Family(host, checked_text("MetricFamily", "name", name), int(kind))
        number = host.make_number()
        host.ask_metrics(("family", number, family.name, text, _KINDS[family.kind]))
        family.number = number

    def Metric(  # noqa: N802 # the API's name
        self, labels: Mapping[str, str] | None = None, buckets: Iterable[float] | None = None
    ) -> Metric:
        """Return a metric of the family.

        Args:
            labels: Labels that tell it from the others.
            buckets: Upper bounds of a histogram's buckets, increasing; the last one, infinity, is added.
        """
        return Metric(self, labels, buckets)

    def __del__(self) -> None:
        family = getattr(self, "_family", None)
        if family is not None:
            family.is_gone = True
            if family.number:
                family.host.later(partial(family.host.metrics, [("drop_family", family.number)]))


def _labels(family: _Family, labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException(
            f"Metric of family '{family.name}': expected a dict as labels, got {type(labels).__name__}"
        )
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TritonModelException(
                f"Metric of family '{family.name}': expected strings as labels, got {key!r}: {value!r}"
            )
    return {str(key): str(value) for key, value in labels.items()}


def _bounds(family: _Family, buckets: Iterable[float] | None) -> list[float] | None:
    if family.kind != MetricFamily.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException(
                f"Metric of family '{family.name}': unexpected buckets: a {_KINDS[family.kind]} has none"
            )
        return None
    if buckets is None:
        raise TritonModelException(f"Metric of family '{family.name}': a histogram needs buckets")
    try:
        bounds = [float(bound) for bound in buckets]
    except (TypeError, ValueError):
        raise TritonModelException(
            f"Metric of family '{family.name}': expected numbers as buckets, got {buckets!r}"
        ) from None
    if any(math.isnan(bound) for bound in bounds) or bounds != sorted(set(bounds)):
        raise TritonModelException(f"Metric of family '{family.name}': expected buckets that increase, got {bounds}")
    return bounds
