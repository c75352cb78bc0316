"""Statistics of one model version, as the statistics extension reports them.

All times are cumulative nanoseconds. Source: Triton's statistics extension.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count `count` occurrences that took `ns` together."""
        self.count += count
        self.ns += ns

    def merge(self, more: "Duration") -> None:
        self.add(more.ns, more.count)


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def merge(self, more: "BatchStatistics") -> None:
        self.compute_input.merge(more.compute_input)
        self.compute_infer.merge(more.compute_infer)
        self.compute_output.merge(more.compute_output)


class ResponseKind(Enum):
    """What became of a response; the value is the field of `ResponseStatistics`."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY_RESPONSE = "empty_response"
    CANCEL = "cancel"


@dataclass(slots=True)
class ResponseStatistics:
    """Responses of one index of a model that may send several."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class MemoryUsage:
    """Memory that a model takes on one device.

    Attributes:
        type: "CPU" or "GPU".
        id: Number of the device.
        instance: Instance whose own it is, "" for what instances share.
    """

    type: str
    id: int
    byte_size: int
    instance: str = ""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of the worker process of one instance.

    Attributes:
        instance: Name of the instance.
        memory_bytes: Resident memory of the process, 0 while there is none; its child processes are not included.
        restarts: How often it was started again since the model was loaded.
        problem: Why it is not ready, "" if it is ready.
        cpu_seconds: CPU time of the process so far.
    """

    instance: str
    memory_bytes: int
    restarts: int
    problem: str
    cpu_seconds: float = 0.0


@dataclass(slots=True)
class ModelStatistics:
    """Everything counted for one model version.

    Attributes:
        name: Model name.
        version: Model version, as text.
        last_inference_ms: Wall-clock time of the last inference, ms since the epoch, 0 for none.
        inference_count: Batch elements of successful requests that an instance computed.
        execution_count: Batches that an instance ran.
        load_ns: Time that instances would have needed for these executions in full batches.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    responses: dict[str, ResponseStatistics] = field(default_factory=dict)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    memory: list[MemoryUsage] = field(default_factory=list)
    load_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """Time in which instances executed batches; that of a batch counts once, whatever its size."""
        counted = self.batches.values()
        return sum(each.compute_input.ns + each.compute_infer.ns + each.compute_output.ns for each in counted)

    def merge(self, more: "ModelStatistics") -> None:
        """Count the executed requests that another process has counted for the same version, too."""
        self.last_inference_ms = max(self.last_inference_ms, more.last_inference_ms)
        self.inference_count += more.inference_count
        self.execution_count += more.execution_count
        self.load_ns += more.load_ns
        for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
            getattr(self, name).merge(getattr(more, name))
        for size, counted in more.batches.items():
            self.batches.setdefault(size, BatchStatistics()).merge(counted)


PROMPT_TOKENS = "prompt_tokens"
COMPLETION_TOKENS = "completion_tokens"
CACHED_TOKENS = "cached_tokens"
"""Response parameters with which an engine model reports them, with its last response."""


class TokenUsage(NamedTuple):
    """The tokens of a request.

    Attributes:
        prompt: Tokens of the prompt.
        completion: Tokens of the answer.
        cached: Tokens of the prompt whose computation was saved by a cache.
    """

    prompt: int
    completion: int = 0
    cached: int = 0


def usage_of(parameters: Mapping[str, object]) -> TokenUsage | None:
    """Return the usage in the parameters of a response, None if it is missing."""
    prompt = parameters.get(PROMPT_TOKENS)
    if type(prompt) is not int:
        return None
    completion, cached = parameters.get(COMPLETION_TOKENS), parameters.get(CACHED_TOKENS)
    return TokenUsage(prompt, completion if type(completion) is int else 0, cached if type(cached) is int else 0)
