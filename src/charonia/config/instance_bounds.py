"""How many instances a model has at least and at most, where their number follows the load."""

from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.parameters import INSTANCES_MAX, INSTANCES_MIN


@dataclass(frozen=True, slots=True)
class InstanceBounds:
    """The bounds of the number of a model's instances.

    Attributes:
        least: The fewest; the model is loaded with so many.
        most: The most.
    """

    least: int
    most: int


def bounds_of(config: ModelConfig) -> InstanceBounds | None:
    """Return the bounds of a normalised configuration; None where the number is fixed."""
    most = _number(config, INSTANCES_MAX)
    least = config.instance_group[0].count if config.instance_group else most
    return InstanceBounds(least, most) if least < most else None


def least_of(config: ModelConfig) -> int:
    """Return the lower bound as the parameter gives it; 0 where it is not given, or no number of instances."""
    return _number(config, INSTANCES_MIN)


def _number(config: ModelConfig, parameter: str) -> int:
    """Return the number that a parameter gives, 0 where it gives none."""
    text = config.parameters.get(parameter, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0
