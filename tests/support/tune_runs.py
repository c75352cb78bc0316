"""Finished configuration searches of a simulated server, for tests of their readers."""

import difflib
from collections.abc import Callable
from dataclasses import replace

from tests.support.runs import synthetic_run
from tests.support.tuning import SimulatedServer, never, run

from charonia.config.model import ModelConfig
from charonia.tools.results.records import LevelResult, LoadLevel, LoadMode
from charonia.tools.tune.api import (
    Constraint,
    Goal,
    LoadSpace,
    Metric,
    ModelFacts,
    ModelGoal,
    SearchOptions,
    SearchSpace,
    Variant,
)
from charonia.tools.tune.decision import decide
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TuneRun, VariantRecord
from charonia.tools.tune.search.phases import Search
from charonia.tools.tune.space import automatic_dimensions
from charonia.tools.tune.variants import BaseModel, Names, apply_variant, instance_group_text, serving_text

_CORE_COUNT = 4


def synthetic_tune_run(
    *models: str,
    latency_max_ms: float = 0.0,
    noise: float = 0.02,
    refuses: Callable[[Variant], str] = never,
    has_levels: bool = True,
    batch_sizes: tuple[int, ...] = (1,),
) -> TuneRun:
    """Return a run with a search for each model.

    Args:
        models: Names; one model `mlp` without any.
        latency_max_ms: Limit of the 99th percentile, 0 for none.
        noise: Standard deviation between measurements, as a share; 1 drowns everything.
        refuses: Returns why a variant cannot be loaded, "" where it can.
        has_levels: Whether trials have their measurements in full.
    """
    origin = synthetic_run((LoadLevel(LoadMode.CONCURRENCY, 4),), duration_s=0.5)
    level = replace(origin.levels[0], timeline=(), windows=()) if has_levels else None
    names = models or ("mlp",)
    load = LoadSpace(maximum=32, batch_sizes=batch_sizes)
    groups = tuple(_group(name, load, latency_max_ms, noise, refuses, level) for name in names)
    return TuneRun(
        tool="charonia 0.1.0",
        began_at="2026-01-02T03:04:05+00:00",
        duration_s=sum(group.duration_s for group in groups),
        machine=origin.machine,
        server=origin.server,
        is_remote=False,
        options={"model_repository": "models", "profile_models": ",".join(names)},
        seed=0,
        groups=groups,
        command=f"charonia tune -m models --profile-models {','.join(names)}",
    )


def _group(
    name: str,
    load: LoadSpace,
    latency_max_ms: float,
    noise: float,
    refuses: Callable[[Variant], str],
    level: LevelResult | None,
) -> GroupRecord:
    facts = ModelFacts(name, max_batch_size=8, threads_tunable=True)
    dimensions = automatic_dimensions(
        facts, instance_counts=(1, 2, 4), batch_sizes=(1, 4, 8, 16), core_count=_CORE_COUNT
    )
    space = SearchSpace((facts,), dimensions, load, core_count=_CORE_COUNT)
    limits = (Constraint(Metric.LATENCY_P99, maximum=latency_max_ms),) if latency_max_ms else ()
    goal, options = Goal((ModelGoal(name, constraints=limits),)), SearchOptions()
    search = Search(space, goal, options)
    run(search, SimulatedServer(space, _CORE_COUNT, noise=noise, refuses=refuses))
    variants = {told.trial.variant.key: told.trial.variant for told in search.history}
    config = ModelConfig(name=name, platform="onnxruntime_onnx", max_batch_size=8)
    base, numbers = BaseModel(name, config, config), Names()
    return GroupRecord(
        goal=goal,
        decision=decide(goal, search.history, options),
        variants=tuple(_variant(variant, base, numbers) for variant in variants.values()),
        trials=tuple(replace(told, levels={name: level} if told.measured and level else {}) for told in search.history),
        skipped=search.skipped,
        notes=tuple(search.notes),
        duration_s=sum(told.outcome.elapsed_s for told in search.history),
    )


def _variant(variant: Variant, base: BaseModel, numbers: Names) -> VariantRecord:
    config = apply_variant({base.name: base}, variant)[base.name]
    name, text = numbers.name(base, config), serving_text(config)
    before = serving_text(base.config).splitlines()
    diff = "\n".join(difflib.unified_diff(before, text.splitlines(), "default", "recommended", lineterm="", n=2))
    record = ModelConfigRecord(
        base.name,
        name,
        text,
        diff,
        instance_group_text(config) or "1:CPU",
        config.max_batch_size,
        queue_delay_us=config.dynamic_batching.max_queue_delay_microseconds if config.dynamic_batching else None,
    )
    return VariantRecord(variant, name, (record,))
