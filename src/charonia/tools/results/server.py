"""Records of the server that was measured: which one, and its own account of the time. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What the server's statistics say of one model, over the windows of the result.

    The `_ns` fields are sums over the requests (`success_count` of them, or cache hits and misses).

    Attributes:
        name: Model name.
        version: Version as text.
        inference_count: Inferences (batch items).
        execution_count: Batches that were executed.
        success_count: Requests answered.
        fail_count: Requests that failed.
        success_ns: Time from arrival to answer.
        queue_ns: Time in the queue.
        compute_input_ns: Time to prepare inputs.
        compute_infer_ns: Time in the model.
        compute_output_ns: Time to collect outputs.
        queue_count: Requests that waited in a queue, the divisor of the queue and compute sums.
        cache_hit_count: Responses taken from the cache.
        cache_hit_ns: Time that took.
        cache_miss_count: Responses not in the cache.
        cache_miss_ns: Time to look up and to insert them.
        composing: Models of an ensemble, or those named on the command line.
    """

    name: str
    version: str
    inference_count: int
    execution_count: int
    success_count: int
    fail_count: int
    success_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    queue_count: int
    cache_hit_count: int = 0
    cache_hit_ns: int = 0
    cache_miss_count: int = 0
    cache_miss_ns: int = 0
    composing: tuple["ServerModel", ...] = ()

    @property
    def request_ns(self) -> float:
        """Mean time of a request in the server."""
        return self.success_ns / self.success_count if self.success_count else 0.0

    @property
    def overhead_ns(self) -> float:
        """Mean time of a request that is neither queue nor compute nor cache."""
        cache = (self.cache_hit_ns + self.cache_miss_ns) / self.success_count if self.success_count else 0.0
        parts = self.queue_ns + self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns
        return max(0.0, self.request_ns - self.mean(parts) - cache)

    def mean(self, total_ns: int) -> float:
        """Return the mean a request of one of the queue and compute sums."""
        return total_ns / self.queue_count if self.queue_count else 0.0


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's own account of the windows of the result.

    Attributes:
        model: Statistics of the model, None where the server has none.
        other_traffic: Whether the server counted clearly more requests than this client sent.
        notes: What a reader has to know about these numbers, one sentence each.
    """

    model: ServerModel | None
    other_traffic: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from the server's metrics page, over the windows of the result.

    Attributes:
        uuid: Its identity.
        utilization: Mean share of busy time, from 0 to 1; None where the page does not say.
        power_watts: Mean power; None where the page does not say.
        memory_used_bytes: Largest use; None where the page does not say.
        memory_total_bytes: Size; None where the page does not say.
    """

    uuid: str
    utilization: float | None
    power_watts: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None


@dataclass(frozen=True, slots=True)
class Resources:
    """What the server's processes used over the windows of the result, when they run on this machine.

    Attributes:
        cpu_seconds: CPU time, children included.
        cpu_cores: The same for each second of wall time: 1.5 is one and a half cores busy.
        rss_bytes: Largest sum of resident memory that was seen.
        process_count: Number of processes.
    """

    cpu_seconds: float
    cpu_cores: float
    rss_bytes: int
    process_count: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which server was measured.

    Attributes:
        url: Address, as given.
        protocol: `http` or `grpc`.
        name: Name that it says.
        version: Version that it says.
        extensions: Protocol extensions that it says it has.
    """

    url: str
    protocol: str
    name: str
    version: str
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which model was measured.

    Attributes:
        name: Model name.
        version: Version asked for, "" for the server's choice.
        platform: As its metadata says.
        max_batch_size: As its configuration says, 0 for a model that does not batch.
        decoupled: Whether a request may have any number of responses.
        sequence: Whether it works on sequences.
        cached: Whether its responses are cached.
    """

    name: str
    version: str
    platform: str
    max_batch_size: int
    decoupled: bool
    sequence: bool
    cached: bool
