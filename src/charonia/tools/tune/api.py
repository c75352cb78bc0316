"""The records that the parts of the configuration search share. Pure.

Metrics are keyed by the names that users write in objectives and constraints (`Metric`), in the units of the tables:
latencies in ms, memory in MB (10^6 bytes), rates in 1/s, utilisation in %.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Self

from charonia.tools.results.records import Estimate, LevelResult, LoadMode


class Metric(StrEnum):
    """Metrics, named as in Model Analyzer's files."""

    THROUGHPUT = "perf_throughput"
    LATENCY_AVG = "perf_latency_avg"
    LATENCY_P50 = "perf_latency_p50"
    LATENCY_P90 = "perf_latency_p90"
    LATENCY_P95 = "perf_latency_p95"
    LATENCY_P99 = "perf_latency_p99"
    OUTPUT_TOKENS = "output_token_throughput"
    TTFT_AVG = "time_to_first_token_avg"
    TTFT_P50 = "time_to_first_token_p50"
    TTFT_P99 = "time_to_first_token_p99"
    ITL_AVG = "inter_token_latency_avg"
    ITL_P50 = "inter_token_latency_p50"
    ITL_P99 = "inter_token_latency_p99"
    CPU_USED_RAM = "cpu_used_ram"
    CPU_AVAILABLE_RAM = "cpu_available_ram"
    GPU_USED_MEMORY = "gpu_used_memory"
    GPU_FREE_MEMORY = "gpu_free_memory"
    GPU_UTILIZATION = "gpu_utilization"
    GPU_POWER_USAGE = "gpu_power_usage"

    @property
    def text(self) -> "MetricText":
        return METRICS[self]


class MetricText(NamedTuple):
    """How reports show a metric.

    Attributes:
        head: Head of its column in Model Analyzer's tables.
        unit: " ms" for a time, " MB" for memory, or what follows the number.
        short: Its name in plots, "" for one without a plot.
    """

    head: str
    name: str
    unit: str
    short: str = ""
    larger_is_better: bool = False


# fmt: off
METRICS = {
    Metric.THROUGHPUT: MetricText("Throughput (infer/sec)", "throughput", "/s", larger_is_better=True),
    Metric.LATENCY_P99: MetricText("p99 Latency (ms)", "p99 latency", " ms", "p99"),
    Metric.LATENCY_P95: MetricText("p95 Latency (ms)", "p95 latency", " ms", "p95"),
    Metric.LATENCY_P90: MetricText("p90 Latency (ms)", "p90 latency", " ms", "p90"),
    Metric.LATENCY_P50: MetricText("p50 Latency (ms)", "median latency", " ms", "p50"),
    Metric.LATENCY_AVG: MetricText("Avg Latency (ms)", "mean latency", " ms", "mean"),
    Metric.OUTPUT_TOKENS: MetricText("Output Token Throughput (tokens/sec)", "output tokens", "/s",
                                     larger_is_better=True),
    Metric.TTFT_P99: MetricText("p99 Time To First Token (ms)", "p99 time to first token", " ms", "TTFT p99"),
    Metric.TTFT_P50: MetricText("p50 Time To First Token (ms)", "median time to first token", " ms", "TTFT p50"),
    Metric.TTFT_AVG: MetricText("Avg Time To First Token (ms)", "mean time to first token", " ms", "TTFT mean"),
    Metric.ITL_P99: MetricText("p99 Inter Token Latency (ms)", "p99 inter-token latency", " ms", "ITL p99"),
    Metric.ITL_P50: MetricText("p50 Inter Token Latency (ms)", "median inter-token latency", " ms", "ITL p50"),
    Metric.ITL_AVG: MetricText("Avg Inter Token Latency (ms)", "mean inter-token latency", " ms", "ITL mean"),
    Metric.CPU_USED_RAM: MetricText("RAM Usage (MB)", "memory", " MB", "Memory"),
    Metric.CPU_AVAILABLE_RAM: MetricText("RAM Available (MB)", "free memory", " MB", larger_is_better=True),
    Metric.GPU_USED_MEMORY: MetricText("GPU Memory Usage (MB)", "GPU memory", " MB", "GPU memory"),
    Metric.GPU_FREE_MEMORY: MetricText("GPU Memory Available (MB)", "free GPU memory", " MB", larger_is_better=True),
    Metric.GPU_UTILIZATION: MetricText("GPU Utilization (%)", "GPU utilisation", " %", larger_is_better=True),
    Metric.GPU_POWER_USAGE: MetricText("GPU Power Usage (W)", "GPU power", " W"),
}
"""The texts of each metric; the order is that of preference."""
# fmt: on

PERCENTILES = {
    Metric.LATENCY_P99: 99.0,
    Metric.LATENCY_P95: 95.0,
    Metric.LATENCY_P90: 90.0,
    Metric.LATENCY_P50: 50.0,
}
"""The percentile of the response time that a metric is."""


class SearchMode(StrEnum):
    """How variants are chosen."""

    RACE = "race"
    """All are measured briefly, hopeless ones are dropped, the best are repeated."""
    BRUTE = "brute"


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A variant's changes to the configuration of one model; None and empty mean unchanged.

    Attributes:
        instance_count: Instances, all in one group of the kind that the model runs on.
        max_batch_size: Largest batch. Setting it turns dynamic batching on where that is legal.
        queue_delay_us: `dynamic_batching.max_queue_delay_microseconds`.
        thread_count: Threads of each instance, the model parameter `intra_op_thread_count`.
        fields: Whole fields of config.pbtxt by name, each replaced by a value given as JSON text.
    """

    model: str
    instance_count: int | None = None
    max_batch_size: int | None = None
    queue_delay_us: int | None = None
    thread_count: int | None = None
    fields: tuple[tuple[str, str], ...] = ()

    def settings(self) -> dict[str, object]:
        """Return the changes, by the names of the attributes and of the fields."""
        named = {
            "instance_count": self.instance_count,
            "max_batch_size": self.max_batch_size,
            "queue_delay_us": self.queue_delay_us,
            "thread_count": self.thread_count,
        }
        return {name: value for name, value in named.items() if value is not None} | {
            name: json.loads(text) for name, text in self.fields
        }

    @property
    def is_empty(self) -> bool:
        return not self.settings()

    def __str__(self) -> str:
        """Return the changes in short form: `2 instances, 1 thread each, batch 8, delay 100 us`."""
        texts = []
        if self.instance_count is not None:
            texts.append(counted_noun(self.instance_count, "instance"))
        if self.thread_count is not None:
            texts.append(f"{counted_noun(self.thread_count, 'thread')} each")
        if self.max_batch_size is not None:
            texts.append(f"batch {self.max_batch_size}")
        if self.queue_delay_us is not None:
            texts.append(f"delay {self.queue_delay_us} us")
        return ", ".join([*texts, *(text for name, value in self.fields for text in _field(name, json.loads(value)))])


_FIELD_LENGTH_MAX = 60
_SHORT_NAMES = {
    "max_queue_delay_microseconds": "delay {} us",
    "preferred_batch_size": "preferred batches {}",
    "max_batch_size": "batch {}",
}


def counted_noun(count: int, name: str) -> str:
    """Return a number of things: `1 instance`, `2 instances`."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def _field(name: str, value: object) -> Iterator[str]:
    """Yield a field of config.pbtxt in words; parts of messages by their own names."""
    if name == "instance_group" and isinstance(value, list) and all(isinstance(group, dict) for group in value):
        for group in value:
            kind = str(group.get("kind", "")).removeprefix("KIND_")
            yield counted_noun(int(group.get("count", 1)), f"{kind} instance".lstrip())
    elif isinstance(value, dict) and value:
        for part, inner in value.items():
            yield from _field(part if name in ("dynamic_batching", "parameters") else f"{name}.{part}", inner)
    elif name in _SHORT_NAMES:
        listed = ", ".join(map(str, value)) if isinstance(value, list) else value
        yield _SHORT_NAMES[name].format(listed)
    else:
        text = f"{name} {value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        yield text if len(text) <= _FIELD_LENGTH_MAX else f"{text[: _FIELD_LENGTH_MAX - 1]}…"


@dataclass(frozen=True)  # without slots: they leave no place for the key
class Variant:
    """A configuration of everything that is tuned together.

    Attributes:
        changes: One a model, in the order of `SearchSpace.models`. None at all: the unmodified configuration.
    """

    changes: tuple[ModelChange, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether it is the configuration as it was found."""
        return all(change.is_empty for change in self.changes)

    def change(self, model: str) -> ModelChange:
        return next((change for change in self.changes if change.model == model), ModelChange(model))

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal variants: JSON, keys sorted."""
        changed = {change.model: change.settings() for change in self.changes if not change.is_empty}
        return json.dumps(changed, sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        if self.is_default:
            return "default configuration"
        changes = [change for change in self.changes if not change.is_empty]
        return "; ".join(f"{change.model}: {change}" if len(changes) > 1 else str(change) for change in changes)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The load on one model.

    Attributes:
        mode: Meaning of `value`: concurrency or request rate.
        value: Requests in flight, or requests a second.
    """

    model: str
    mode: LoadMode
    value: float
    batch_size: int = 1

    def __str__(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size != 1 else ""
        return f"{'request rate' if self.mode.is_rate else 'concurrency'} {self.value:g}{batch}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement to make.

    Attributes:
        number: Its number in this search, from 1.
        loads: The load on each profiled model, all at the same time.
        repeat: How often this variant was measured under these loads before.
        effort: Share of the usual time to spend, from 0 to 1: a racing search looks briefly first.
    """

    number: int
    variant: Variant
    loads: tuple[LoadPoint, ...]
    repeat: int
    effort: float
    purpose: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a trial.

    Attributes:
        metrics: By model, then by name of the metric (`Metric`).
        elapsed_s: Wall time that it took, with loading the variant; it counts against the time budget.
    """

    metrics: Mapping[str, Mapping[str, Estimate]]
    elapsed_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """A trial that could not be measured.

    Attributes:
        loading: Whether the variant could not be loaded: it is not tried again under other loads.
    """

    reason: str
    loading: bool = False
    elapsed_s: float = 0.0


Outcome = Measured | TrialFailed


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial and its outcome.

    Attributes:
        measured: The measurements, None for a failure.
        failed: Why it failed, None otherwise.
    """

    trial: Trial
    measured: Measured | None = None
    failed: TrialFailed | None = None
    levels: dict[str, LevelResult] = field(default_factory=dict)
    is_resumed: bool = False

    @classmethod
    def of(cls, trial: Trial, outcome: Outcome) -> Self:
        return cls(trial, failed=outcome) if isinstance(outcome, TrialFailed) else cls(trial, outcome)

    @property
    def outcome(self) -> Outcome:
        return self.measured or self.failed or TrialFailed("nothing is known of it")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A variant that was not measured."""

    variant: Variant
    reason: str


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric to maximize or minimize."""

    metric: Metric
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit that a configuration has to keep.

    Attributes:
        minimum: Least value, None for none.
        maximum: Largest value, None for none.
    """

    metric: Metric
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class ModelGoal:
    """The goal for one profiled model."""

    model: str
    objectives: tuple[Objective, ...] = (Objective(Metric.THROUGHPUT),)
    constraints: tuple[Constraint, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal for all models that are tuned together."""

    models: tuple[ModelGoal, ...]
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model before the first measurement.

    Attributes:
        max_batch_size: Of its configuration, 0 for a model without batching.
        is_profiled: Whether load is sent to it; False for a model that composes another.
        instances_tunable: Whether it has instances: not an ensemble.
        batching_tunable: Whether dynamic batching is legal: not an ensemble, sequences or a model without batching.
        threads_tunable: Whether its threads can be set: ONNX on the CPU.
        instance_memory_mb: Least memory of each additional instance, 0 if unknown.
        is_batching: Whether dynamic batching is on in its configuration.
        queue_delays_us: Queue delays to try with the best variants, in order; () leaves it unchanged.
    """

    name: str
    max_batch_size: int = 0
    instance_count: int = 1
    is_profiled: bool = True
    instances_tunable: bool = True
    batching_tunable: bool = True
    threads_tunable: bool = False
    instance_memory_mb: float = 0.0
    is_batching: bool = False
    queue_delays_us: tuple[int, ...] = ()


class Setting(StrEnum):
    """Attributes of a `ModelChange` that a dimension can sweep; a field of config.pbtxt is named by its own name."""

    INSTANCE_COUNT = "instance_count"
    MAX_BATCH_SIZE = "max_batch_size"
    QUEUE_DELAY = "queue_delay_us"
    THREAD_COUNT = "thread_count"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One setting of one model and the values that it may take. A search tries no other values.

    Attributes:
        setting: A `Setting`, or the name of a field of config.pbtxt.
        values: In order, neighbours next to each other, all different: int, or JSON text for a field.
    """

    model: str
    setting: str
    values: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much memory there is.

    Attributes:
        base_mb: Used with the default configuration, 0 where that is unknown.
    """

    metric: Metric
    limit_mb: float
    base_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSpace:
    """Which loads a variant is measured under.

    Attributes:
        values: Exactly these loads, in order; empty: a search between minimum and maximum in powers of two.
        formula: Whether concurrency is 2 x batch size x instances instead of a sweep, within minimum and maximum.
        stops_early: Whether explicit values end at the plateau too.
        binary_steps_max: Most steps between a load that keeps the constraints and one that does not.
    """

    mode: LoadMode = LoadMode.CONCURRENCY
    minimum: float = 1.0
    maximum: float = 1024.0
    values: tuple[float, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    formula: bool = False
    stops_early: bool = False
    binary_steps_max: int = 5


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Everything that may be tried.

    Attributes:
        models: The models that are tuned together: profiled and composing ones.
        dimensions: The settings; their product without what cannot fit are the variants, besides the default one.
        memory: What memory there is, None for not caring.
        core_count: Cores of the server: instances x threads beyond them are left out. 0: unknown.
    """

    models: tuple[ModelFacts, ...]
    dimensions: tuple[Dimension, ...]
    load: LoadSpace = LoadSpace()
    memory: MemoryLimit | None = None
    core_count: int = 0

    @property
    def profiled(self) -> tuple[str, ...]:
        """Names of the models that load is sent to."""
        return tuple(model.name for model in self.models if model.is_profiled)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search goes about it.

    Attributes:
        time_budget_s: Most wall time of all trials together, 0 for no limit.
        finalist_count: Variants that are repeated at the end, besides the default one.
    """

    mode: SearchMode = SearchMode.RACE
    time_budget_s: float = 0.0
    trials_max: int = 2000
    seed: int = 0
    finalist_count: int = 3
    repeats_max: int = 6
