"""Counts of models that are loaded when they are needed, and their metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.stats.families import Family, family


@dataclass(slots=True)
class ResidencyCounts:
    """What has become of models in `auto` control mode.

    Attributes:
        loads: Loads by model.
        failures: Loads that failed, by model.
        evictions: Unloads to make room, by model.
    """

    loads: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)


def residency_families(
    counts: ResidencyCounts, *, budget: int, sizes: Mapping[str, int], waiting: Mapping[str, int]
) -> list[Family]:
    """Return the metrics of `auto` control mode.

    Args:
        counts: What happened so far.
        budget: Bytes that the loaded models may take together.
        sizes: Bytes that each loaded model takes.
        waiting: Requests that wait for each model to be loaded.
    """
    by_model = (
        ("charonia_model_loads_total", "counter", "Loads on demand", counts.loads),
        ("charonia_model_load_failures_total", "counter", "Loads on demand that failed", counts.failures),
        ("charonia_model_evictions_total", "counter", "Unloads to make room for other models", counts.evictions),
        ("charonia_model_resident_bytes", "gauge", "Memory that a loaded model takes", sizes),
        ("charonia_model_load_waiting", "gauge", "Requests that wait for a model to be loaded", waiting),
    )
    return [
        family("charonia_model_memory_budget_bytes", "gauge", "Memory that loaded models may take", (budget, {})),
        *(
            family(name, kind, text, *((value, {"model": model}) for model, value in sorted(values.items())))
            for name, kind, text, values in by_model
        ),
    ]
