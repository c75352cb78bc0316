"""Metric families that parts of the server beside the models contribute to the metrics page."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family."""

    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its values.

    Attributes:
        name: Its name.
        kind: "gauge" or "counter".
        help: One sentence without a full stop.
        samples: Its values.
    """

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def family(name: str, kind: str, help: str, *samples: tuple[float, Mapping[str, str]]) -> Family:
    """Return a family of these values with their labels."""
    return Family(name, kind, help, tuple(Sample(value, labels) for value, labels in samples))
