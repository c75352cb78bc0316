"""The problem of a search, from the options and the models that were found."""

from dataclasses import replace
from typing import Any

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig
from charonia.config.pbtxt import parse
from charonia.tools.results.records import LoadMode
from charonia.tools.tune.api import (
    Constraint,
    Dimension,
    Goal,
    LoadSpace,
    MemoryLimit,
    Metric,
    ModelFacts,
    ModelGoal,
    Objective,
    SearchMode,
    SearchOptions,
)
from charonia.tools.tune.options import (
    GoalSettings,
    LaunchMode,
    LaunchOptions,
    MeasureSettings,
    ModelRequest,
    ModelsSettings,
    OutputSettings,
    SearchSettings,
    TuneOptions,
)
from charonia.tools.tune.profile import model_goal, percentiles, problem_of
from charonia.tools.tune.variants import BaseModel

TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 }'
ONNX = parse(f'name: "m" backend: "onnxruntime" max_batch_size: 8 {TENSORS}')
PYTHON = replace(ONNX, backend="python")
ENSEMBLE = parse(
    f'name: "m" platform: "ensemble" max_batch_size: 8 {TENSORS} ensemble_scheduling {{ step {{ model_name: "s" '
    'model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }'
)
MODEL = ModelRequest("m")
REMOTE = LaunchOptions(LaunchMode.REMOTE)
FIXED = LaunchOptions(LaunchMode.REMOTE, reload_disabled=True)
BASE = BaseModel("m", ONNX, ONNX, instance_memory_mb=7)
FACTS = ModelFacts("m", 8, threads_tunable=True, instance_memory_mb=7, queue_delays_us=(100, 500, 2000, 10_000))
THREADS = Dimension("m", "thread_count", (1, 2, 4))
COUNTS = Dimension("m", "instance_count", (1, 2, 3, 4, 5))
BATCHES = Dimension("m", "max_batch_size", (1, 2, 4, 8, 16, 32, 64, 128))
SWEPT = ModelRequest("m", config_parameters=(("max_batch_size", "[2, 4]"),))


def options(launch: LaunchOptions = REMOTE, request: ModelRequest = MODEL, **parts: Any) -> TuneOptions:
    return TuneOptions(ModelsSettings((request,)), launch, **parts)


@pytest.mark.parametrize(
    ("base", "request_", "changes", "facts", "dimensions"),
    [
        (BASE, MODEL, {}, FACTS, (COUNTS, THREADS, BATCHES)),
        (
            replace(BASE, kind=InstanceKind.KIND_GPU),
            MODEL,
            {"search": SearchSettings(instances_min=2, instances_max=3, batch_size_min=4, batch_size_max=8)},
            replace(FACTS, threads_tunable=False),
            (Dimension("m", "instance_count", (2, 3)), Dimension("m", "max_batch_size", (4, 8))),
        ),
        (
            replace(BASE, kind=InstanceKind.KIND_MODEL),
            MODEL,
            {},
            replace(FACTS, threads_tunable=False, instances_tunable=False),
            (BATCHES,),
        ),
        (replace(BASE, complete=PYTHON), MODEL, {}, replace(FACTS, threads_tunable=False), (COUNTS, BATCHES)),
        (
            replace(BASE, complete=ENSEMBLE),
            MODEL,
            {},
            replace(FACTS, threads_tunable=False, instances_tunable=False, batching_tunable=False, queue_delays_us=()),
            (),
        ),
        (BASE, SWEPT, {}, replace(FACTS, queue_delays_us=()), (Dimension("m", "max_batch_size", (2, 4)),)),
        (BASE, MODEL, {"search": SearchSettings(disabled=True)}, replace(FACTS, queue_delays_us=()), ()),
        (BASE, SWEPT, {"launch": FIXED}, replace(FACTS, queue_delays_us=()), ()),
        (BASE, ModelRequest("other"), {}, replace(FACTS, is_profiled=False), (COUNTS, THREADS, BATCHES)),
    ],
)
def test_what_is_tried_depends_on_the_model_and_the_options(
    base: BaseModel,
    request_: ModelRequest,
    changes: dict[str, Any],
    facts: ModelFacts,
    dimensions: tuple[Dimension, ...],
) -> None:
    memory = MemoryLimit(Metric.CPU_USED_RAM, 100)

    space = problem_of(options(request=request_, **changes), [request_], {"m": base}, core_count=4, memory=memory).space

    assert space.models == (facts,)
    assert space.dimensions == dimensions
    assert (space.memory, space.core_count) == (memory, 4)


def test_the_threads_of_a_server_whose_cores_are_unknown_are_left_alone() -> None:
    assert problem_of(options(), [MODEL], {"m": BASE}).space.dimensions == (COUNTS, BATCHES)


@pytest.mark.parametrize(
    ("batching", "is_batching", "delays"),
    [
        (None, False, (100, 500, 2000, 10_000)),
        (DynamicBatching(max_queue_delay_microseconds=500), True, (2000, 10_000)),
    ],
)
def test_queue_delays_beyond_the_models_own_are_tried(
    batching: DynamicBatching | None, is_batching: bool, delays: tuple[int, ...]
) -> None:
    config: ModelConfig = replace(ONNX, dynamic_batching=batching)

    (facts,) = problem_of(options(), [MODEL], {"m": replace(BASE, complete=config)}).space.models

    assert (facts.is_batching, facts.queue_delays_us) == (is_batching, delays)


RATES = LoadMode.REQUEST_RATE


@pytest.mark.parametrize(
    ("search", "measure", "request_", "load"),
    [
        ({}, {}, {}, LoadSpace()),
        (
            {"concurrency_min": 2, "concurrency_max": 8, "stops_early": True, "binary_steps_max": 3, "formula": True},
            {"batch_sizes": (1, 4)},
            {},
            LoadSpace(LoadMode.CONCURRENCY, 2, 8, (), (1, 4), True, True, 3),
        ),
        ({"formula": True}, {"concurrency": (3,)}, {}, LoadSpace(values=(3.0,))),
        (
            {},
            {"concurrency": (3,)},
            {"concurrency": (5, 6), "batch_sizes": (2,)},
            LoadSpace(values=(5, 6), batch_sizes=(2,)),
        ),
        ({"by_rate": True}, {}, {}, LoadSpace(RATES, 16, 8192)),
        ({"by_rate": True, "rate_min": 5, "rate_max": 7}, {}, {}, LoadSpace(RATES, 5, 7)),
        ({"by_rate": True}, {"concurrency": (3,)}, {}, LoadSpace(values=(3,))),
        ({}, {"request_rate": (9.5,)}, {}, LoadSpace(RATES, 16, 8192, (9.5,))),
        ({}, {"request_rate": (9.5,)}, {"request_rate": (1.5,)}, LoadSpace(RATES, 16, 8192, (1.5,))),
        ({"disabled": True, "concurrency_min": 2}, {}, {}, LoadSpace(minimum=2, values=(2.0,))),
        ({"disabled": True, "by_rate": True}, {}, {}, LoadSpace(RATES, 16, 8192, (16.0,))),
        ({"disabled": True}, {"concurrency": (3,)}, {}, LoadSpace(values=(3,))),
    ],
)
def test_the_loads_of_a_model_replace_those_of_all(
    search: dict[str, Any], measure: dict[str, Any], request_: dict[str, Any], load: LoadSpace
) -> None:
    request = ModelRequest("m", **request_)
    given = options(request=request, search=SearchSettings(**search), measure=MeasureSettings(**measure))

    found = problem_of(given, [ModelRequest("other"), request], {}).space.load

    assert found == load
    assert all(type(each) is float for each in (found.minimum, found.maximum, *found.values))


def test_a_small_space_is_searched_with_fewer_repeats() -> None:
    search = SearchSettings(SearchMode.BRUTE, seed=5, instances_max=2, batch_size_max=8)
    given = options(search=search, output=OutputSettings(configs_per_model=2))

    def found(options: TuneOptions) -> SearchOptions:
        return problem_of(options, [MODEL], {"m": BASE}, time_budget_s=60).options

    assert found(given) == SearchOptions(SearchMode.BRUTE, 60, seed=5, finalist_count=2, repeats_max=3)
    assert found(replace(given, search=replace(search, instances_max=3))).repeats_max == SearchOptions().repeats_max


P99, LEAST = Constraint(Metric.LATENCY_P99, maximum=20), Constraint(Metric.THROUGHPUT, minimum=9)
BUDGETS = GoalSettings(latency_budget_ms=20, min_throughput=9)
OWN = (Constraint(Metric.LATENCY_P99, maximum=1), Constraint(Metric.THROUGHPUT, minimum=2))
LATENCY = (Objective(Metric.LATENCY_P90),)


@pytest.mark.parametrize(
    ("settings", "request_", "objectives", "constraints"),
    [
        (GoalSettings(), {}, (Objective(Metric.THROUGHPUT),), ()),
        (BUDGETS, {}, (Objective(Metric.THROUGHPUT),), (P99, LEAST)),
        (replace(BUDGETS, objectives=LATENCY, constraints=OWN), {}, LATENCY, OWN),
        (replace(BUDGETS, constraints=OWN[:1]), {"objectives": LATENCY}, LATENCY, (OWN[0], LEAST)),
        (replace(BUDGETS, constraints=OWN), {"constraints": OWN[1:]}, (Objective(Metric.THROUGHPUT),), (OWN[1], P99)),
        (GoalSettings(constraints=OWN), {"constraints": ()}, (Objective(Metric.THROUGHPUT),), ()),
    ],
)
def test_the_goal_of_a_model_replaces_that_of_all(
    settings: GoalSettings,
    request_: dict[str, Any],
    objectives: tuple[Objective, ...],
    constraints: tuple[Constraint, ...],
) -> None:
    goal = ModelGoal("m", objectives, constraints, 2.5)

    assert model_goal(ModelRequest("m", weight=2.5, **request_), settings) == goal


@pytest.mark.parametrize(
    ("goal", "percent"),
    [
        (ModelGoal("m"), None),
        (ModelGoal("m", LATENCY), 90),
        (ModelGoal("m", constraints=(P99,)), 99),
        (ModelGoal("m", (Objective(Metric.LATENCY_P50), Objective(Metric.LATENCY_P95))), 95),
    ],
)
def test_the_percentile_that_a_goal_is_about(goal: ModelGoal, percent: float | None) -> None:
    assert percentiles(Goal((goal,))) == {"m": percent}
