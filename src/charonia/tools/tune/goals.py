"""Objectives and constraints as people write them in YAML, and what they come to for each model."""

from collections.abc import Callable, Mapping

from charonia.tools.tune.api import Constraint, Metric, ModelGoal, Objective
from charonia.tools.tune.nearest import unknown
from charonia.tools.tune.options import GoalSettings, ModelRequest
from charonia.tools.tune.values import number, shown

LLM_METRICS = ("inter_token_latency_p99", "time_to_first_token_p99", "output_token_throughput")
"""Metrics of Model Analyzer that are not measured here."""

_BOUNDS = ("min", "max")


def objectives(value: object) -> tuple[Objective, ...]:
    """Read objectives: names with equal weights, or weights by name.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = dict.fromkeys(value, 1)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"expected names of metrics, or weights by name, got {shown(value)}")
    weight = number(0, above=True)
    return tuple(Objective(metric(name), _named(name, weight, given)) for name, given in value.items())


def constraints(value: object) -> tuple[Constraint, ...]:
    """Read constraints: `min` or `max` by the name of the metric, or a list of such mappings.

    Raises:
        ValueError: They are not.
    """
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = {name: inner for part in value for name, inner in part.items()}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected limits by the name of the metric, got {shown(value)}")
    found = []
    for name, bounds in value.items():
        known = metric(name)
        if not isinstance(bounds, Mapping) or not bounds or not set(bounds) <= set(_BOUNDS):
            raise ValueError(f"{name}: expected min or max with a number, got {shown(bounds)}")
        limits = {bound: _named(f"{name}.{bound}", number(0), limit) for bound, limit in bounds.items()}
        found.append(Constraint(known, minimum=limits.get("min"), maximum=limits.get("max")))
    return tuple(found)


def metric(name: object) -> Metric:
    """Return the metric of a name.

    Raises:
        ValueError: There is none of that name.
    """
    try:
        return Metric(str(name))
    except ValueError:
        if name in LLM_METRICS:
            raise ValueError(f"'{name}' is not measured: models are measured by requests, not by tokens") from None
        raise ValueError(unknown("metric", str(name), [known.value for known in Metric])) from None


def model_goal(request: ModelRequest, settings: GoalSettings) -> ModelGoal:
    """Return what is wanted of a model: its own goals where it has some, else those of all models."""
    wanted = request.objectives or settings.objectives or (Objective(Metric.THROUGHPUT),)
    limits = list(settings.constraints if request.constraints is None else request.constraints)
    if settings.latency_budget_ms and not _limits(limits, Metric.LATENCY_P99):
        limits.append(Constraint(Metric.LATENCY_P99, maximum=float(settings.latency_budget_ms)))
    if settings.min_throughput and not _limits(limits, Metric.THROUGHPUT):
        limits.append(Constraint(Metric.THROUGHPUT, minimum=float(settings.min_throughput)))
    return ModelGoal(request.name, wanted, tuple(limits), request.weight)


def _limits(constraints_: list[Constraint], of: Metric) -> bool:
    return any(constraint.metric is of for constraint in constraints_)


def _named(name: object, read: Callable[[object], float], value: object) -> float:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
