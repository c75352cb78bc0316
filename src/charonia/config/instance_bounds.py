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
    """Return the bounds of a validated, normalised configuration; None where the number is fixed."""
    if INSTANCES_MAX not in config.parameters:
        return None
    bounds = InstanceBounds(config.instance_group[0].count, int(config.parameters[INSTANCES_MAX]))
    return bounds if bounds.least < bounds.most else None


def least_of(config: ModelConfig) -> int:
    """Return the lower bound as the parameter gives it; 0 where it is not given, or no number of instances."""
    text = config.parameters.get(INSTANCES_MIN, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0
