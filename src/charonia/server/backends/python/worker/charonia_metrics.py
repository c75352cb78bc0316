"""Custom metrics of models, exposed with the server's."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker.charonia_errors import TritonModelException, checked_text
    from charonia.server.backends.python.worker.charonia_host import Binding
else:  # siblings of the worker's script; the package is not there
    from charonia_errors import TritonModelException, checked_text
    from charonia_host import Binding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import ClassVar

_KINDS = ("counter", "gauge", "histogram")


class Metric:
    """One metric of a family, told from the others by its labels. It lasts as long as this object."""

    def __init__(
        self, family: MetricFamily, labels: Mapping[str, str] | None = None, buckets: Iterable[float] | None = None
    ) -> None:
        self._family = family
        self._kind = family._kind
        bounds = _bounds(family, buckets)
        names = _labels(family, labels)
        self._value = 0.0
        self._lock = threading.Lock()
        self._host = family._host
        self._number = self._host.make_number()
        self._host.metrics([("metric", self._number, family._number, names, bounds)])

    def increment(self, value: float) -> None:
        """Add to the value; a counter takes nothing negative."""
        if self._kind == MetricFamily.HISTOGRAM:
            raise self._cannot("be incremented; it observes values")
        amount = self._number_of(value)
        if self._kind == MetricFamily.COUNTER and amount < 0:
            raise self._cannot(f"be incremented by a negative value, {amount:g}")
        with self._lock:
            self._value += amount
            self._host.metrics([("add", self._number, amount)])

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        if self._kind != MetricFamily.GAUGE:
            raise self._cannot("be set; only a gauge can")
        given = self._number_of(value)
        with self._lock:
            self._value = given
            self._host.metrics([("set", self._number, given)])

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        if self._kind != MetricFamily.HISTOGRAM:
            raise self._cannot("observe values; only a histogram does")
        self._host.metrics([("observe", self._number, self._number_of(value))])

    def value(self) -> float:
        """Return the value, as this instance of the model has made it."""
        if self._kind == MetricFamily.HISTOGRAM:
            raise self._cannot("be read as one value")
        return self._value

    def _number_of(self, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type] # what it cannot take is refused
        except (TypeError, ValueError):
            raise TritonModelException(
                f"Metric of family '{self._family._name}': expected a number, got {value!r}"
            ) from None
        if math.isnan(number):
            raise TritonModelException(f"Metric of family '{self._family._name}': expected a number, got NaN")
        return number

    def _cannot(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"Metric of family '{self._family._name}': unsupported operation: a {_KINDS[self._kind]} cannot {what}"
        )

    def __del__(self) -> None:
        number = getattr(self, "_number", 0)
        if number:
            self._host.later(partial(self._host.metrics, [("drop_metric", number)]))


class MetricFamily:
    """A family of custom metrics. It lasts as long as this object or one of its metrics does."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    _binding: ClassVar[Binding] = Binding(None)
    """Of the model that the class is for; see `bound_to`."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        if isinstance(kind, bool) or kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException(f"MetricFamily: expected COUNTER, GAUGE or HISTOGRAM as kind, got {kind!r}")
        self._name = checked_text("MetricFamily", "name", name)
        self._kind = int(kind)
        self._host = self._binding.reach()
        number = self._host.make_number()
        self._host.declare_family(
            number, self._name, checked_text("MetricFamily", "description", description), _KINDS[self._kind]
        )
        self._number = number

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
        number = getattr(self, "_number", 0)
        if number:
            self._host.later(partial(self._host.metrics, [("drop_family", number)]))


def _labels(family: MetricFamily, labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException(
            f"Metric of family '{family._name}': expected a dict as labels, got {type(labels).__name__}"
        )
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TritonModelException(
                f"Metric of family '{family._name}': expected strings as labels, got {key!r}: {value!r}"
            )
    return {str(key): str(value) for key, value in labels.items()}


def _bounds(family: MetricFamily, buckets: Iterable[float] | None) -> list[float] | None:
    if family._kind != MetricFamily.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException(
                f"Metric of family '{family._name}': unexpected buckets: a {_KINDS[family._kind]} has none"
            )
        return None
    try:
        bounds = [float(bound) for bound in buckets or ()]
    except (TypeError, ValueError):
        raise TritonModelException(
            f"Metric of family '{family._name}': expected numbers as buckets, got {buckets!r}"
        ) from None
    if not bounds:
        raise TritonModelException(f"Metric of family '{family._name}': a histogram needs buckets")
    if any(math.isnan(bound) for bound in bounds) or bounds != sorted(set(bounds)):
        raise TritonModelException(f"Metric of family '{family._name}': expected buckets that increase, got {bounds}")
    return bounds
