"""Turns the options and the models found on the server into the problem of a search: space, goal, limits. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia.config.backends import record_of
from charonia.config.kinds import InstanceKind
from charonia.tools.results.records import LoadMode
from charonia.tools.tune.api import (
    PERCENTILES,
    Constraint,
    Dimension,
    Goal,
    LoadSpace,
    MemoryLimit,
    Metric,
    ModelFacts,
    ModelGoal,
    Objective,
    SearchOptions,
    SearchSpace,
)
from charonia.tools.tune.options import GoalSettings, ModelRequest, SearchSettings, TuneOptions
from charonia.tools.tune.space import SMALL_SPACE, automatic_dimensions, manual_dimensions, powers_of_two
from charonia.tools.tune.variants import BaseModel

QUEUE_DELAYS_US = (100, 500, 2000, 10_000)
"""Queue delays that the best variants are tried with, as long as they bring more."""

_SMALL_REPEATS_MAX = 3
"""In a small space, the best variant is less likely to be a lucky one, so fewer repeats are enough."""


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The arguments of a search."""

    space: SearchSpace
    goal: Goal
    options: SearchOptions


def problem_of(
    options: TuneOptions,
    requests: Sequence[ModelRequest],
    bases: Mapping[str, BaseModel],
    *,
    core_count: int = 0,
    memory: MemoryLimit | None = None,
    time_budget_s: float = 0.0,
) -> SearchProblem:
    """Return the search for the models of a group.

    Args:
        core_count: Cores of the server, 0 for unknown.
        memory: Memory of the server, None for unknown.
        time_budget_s: Time for the group, 0 for no limit.
    """
    settings = options.search
    profiled = {request.name: request for request in requests}
    settings_of = {request.name: request for request in options.models.composing} | profiled
    automatic = {name for name in bases if _is_automatic(options, settings_of.get(name))}
    facts = tuple(_facts(base, base.name in profiled, base.name in automatic) for base in bases.values())
    dimensions: list[Dimension] = []
    if not options.launch.reload_disabled:
        for each in facts:
            dimensions += _dimensions(each, settings_of.get(each.name), settings, core_count)
    space = SearchSpace(facts, tuple(dimensions), _load(options, requests), memory, core_count)
    return SearchProblem(space, goal_of(options, requests), _search_options(options, space, time_budget_s))


def goal_of(options: TuneOptions, requests: Sequence[ModelRequest]) -> Goal:
    return Goal(tuple(model_goal(request, options.goal) for request in requests))


def percentiles(goal: Goal) -> dict[str, float | None]:
    """Return the percentile of each model's latency that its goal is about, None for the mean."""
    found: dict[str, float | None] = {}
    for model in goal.models:
        metrics = {objective.metric for objective in model.objectives}
        metrics |= {constraint.metric for constraint in model.constraints}
        found[model.model] = next((percent for metric, percent in PERCENTILES.items() if metric in metrics), None)
    return found


def _is_automatic(options: TuneOptions, request: ModelRequest | None) -> bool:
    """Return whether the search chooses the values to try."""
    named = request is not None and bool(request.config_parameters)
    return not (named or options.search.disabled or options.launch.reload_disabled)


def _facts(base: BaseModel, is_profiled: bool, is_automatic: bool) -> ModelFacts:
    complete = base.complete
    is_ensemble = complete.ensemble_scheduling is not None
    record = record_of(complete.backend, complete.platform)
    return ModelFacts(
        name=base.name,
        max_batch_size=complete.max_batch_size,
        instance_count=base.instance_count,
        is_profiled=is_profiled,
        instances_tunable=not is_ensemble and base.kind is not InstanceKind.KIND_MODEL,
        batching_tunable=base.batches_dynamically,
        threads_tunable=bool(record.thread_parameter) and base.kind is InstanceKind.KIND_CPU,
        instance_memory_mb=base.instance_memory_mb,
        is_batching=complete.dynamic_batching is not None,
        queue_delays_us=_queue_delays(base) if is_automatic else (),
    )


def _queue_delays(base: BaseModel) -> tuple[int, ...]:
    """Return the delays beyond the model's own."""
    batching = base.complete.dynamic_batching
    own = batching.max_queue_delay_microseconds if batching is not None else 0
    return tuple(delay for delay in QUEUE_DELAYS_US if delay > own) if base.batches_dynamically else ()


def _dimensions(
    facts: ModelFacts, request: ModelRequest | None, settings: SearchSettings, core_count: int
) -> Sequence[Dimension]:
    if request is not None and request.config_parameters:
        return manual_dimensions(facts.name, {name: json.loads(text) for name, text in request.config_parameters})
    if settings.disabled:
        return ()
    return automatic_dimensions(
        facts,
        instance_counts=range(settings.instances_min, settings.instances_max + 1),
        batch_sizes=powers_of_two(settings.batch_size_min, settings.batch_size_max),
        core_count=core_count,
    )


def _load(options: TuneOptions, requests: Sequence[ModelRequest]) -> LoadSpace:
    search, measure = options.search, options.measure
    rates = next((request.request_rate for request in requests if request.request_rate), ()) or measure.request_rate
    counts = next((request.concurrency for request in requests if request.concurrency), ()) or measure.concurrency
    by_rate = bool(rates) or (search.by_rate and not counts)
    values: tuple[float, ...] = rates if by_rate else tuple(map(float, counts))
    if not values and search.disabled:
        values = (float(search.rate_min if by_rate else search.concurrency_min),)
    return LoadSpace(
        mode=LoadMode.REQUEST_RATE if by_rate else LoadMode.CONCURRENCY,
        minimum=float(search.rate_min if by_rate else search.concurrency_min),
        maximum=float(search.rate_max if by_rate else search.concurrency_max),
        values=values,
        batch_sizes=next((request.batch_sizes for request in requests if request.batch_sizes), measure.batch_sizes),
        formula=search.formula and not values,
        stops_early=search.stops_early,
        binary_steps_max=search.binary_steps_max,
    )


def _search_options(options: TuneOptions, space: SearchSpace, time_budget_s: float) -> SearchOptions:
    search = options.search
    size = math.prod(len(dimension.values) for dimension in space.dimensions)
    return SearchOptions(
        mode=search.mode,
        time_budget_s=time_budget_s,
        seed=search.seed,
        finalist_count=options.output.configs_per_model,
        repeats_max=_SMALL_REPEATS_MAX if size <= SMALL_SPACE else SearchOptions().repeats_max,
    )


def model_goal(request: ModelRequest, settings: GoalSettings) -> ModelGoal:
    """Return the goal of a model: its own if it has one, else that of all models."""
    wanted = request.objectives or settings.objectives or (Objective(Metric.THROUGHPUT),)
    limits = list(settings.constraints if request.constraints is None else request.constraints)
    if settings.latency_budget_ms and not _limits(limits, Metric.LATENCY_P99):
        limits.append(Constraint(Metric.LATENCY_P99, maximum=float(settings.latency_budget_ms)))
    if settings.min_throughput and not _limits(limits, Metric.THROUGHPUT):
        limits.append(Constraint(Metric.THROUGHPUT, minimum=float(settings.min_throughput)))
    return ModelGoal(request.name, wanted, tuple(limits), request.weight)


def _limits(constraints: list[Constraint], of: Metric) -> bool:
    return any(constraint.metric is of for constraint in constraints)
