"""Records of the measured server: identity, statistics and resources. Pure."""

from dataclasses import dataclass

from charonia.core.metadata import PRODUCT, USUAL_NAME, ServerMetadata


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The server's statistics of one model, over the windows of the result.

    The `_ns` fields are sums over the requests (`success_count` of them, or cache hits and misses).

    Attributes:
        name: Model name.
        version: Version as text.
        inference_count: Inferences (batch items).
        execution_count: Executed batches.
        success_count: Successful requests.
        fail_count: Failed requests.
        success_ns: Time from arrival to answer.
        queue_ns: Time in the queue.
        compute_input_ns: Time to prepare inputs.
        compute_infer_ns: Time in the model.
        compute_output_ns: Time to collect outputs.
        queue_count: Requests that waited in a queue, the divisor of the queue and compute sums.
        cache_hit_count: Responses from the cache.
        cache_hit_ns: Time to look them up.
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
        """Mean time of a request outside of queue, compute and cache."""
        cache = (self.cache_hit_ns + self.cache_miss_ns) / self.success_count if self.success_count else 0.0
        parts = self.queue_ns + self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns
        return max(0.0, self.request_ns - self.mean(parts) - cache)

    def mean(self, total_ns: int) -> float:
        """Return the mean per request of one of the queue and compute sums."""
        return total_ns / self.queue_count if self.queue_count else 0.0


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's statistics over the windows of the result.

    Attributes:
        model: Statistics of the model, None if the server has none.
        other_traffic: Whether the server counted clearly more requests than this client sent.
        notes: Remarks on these numbers, one sentence each.
    """

    model: ServerModel | None
    other_traffic: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from the server's metrics page, over the windows of the result.

    Attributes:
        utilization: Mean share of busy time, from 0 to 1; None if unknown.
        power_watts: Mean power; None if unknown.
        memory_used_bytes: Highest use of memory; None if unknown.
        memory_total_bytes: Size of memory; None if unknown.
    """

    uuid: str
    utilization: float | None
    power_watts: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that the server's processes used over the windows of the result, if they run on this machine.

    Attributes:
        cpu_seconds: CPU time, including child processes.
        cpu_cores: CPU time per second: 1.5 means one and a half cores busy.
        rss_bytes: Highest sum of resident memory.
        process_count: Number of processes.
    """

    cpu_seconds: float
    cpu_cores: float
    rss_bytes: int
    process_count: int


OTHERS_MIN = 0.2
"""Cores that other programs take, from which on they may have disturbed a measurement that needed all cores."""

IDLE_SHARE_MAX = 0.15
"""Share of idle cores above which other programs have taken nothing that was needed."""

STOLEN_SHARE_MIN = 0.03
"""Share of the cores that the hypervisor takes, from which on that is worth a remark."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Who used the cores of the client's machine over the windows of the result; CPU time per second.

    Attributes:
        core_count: Cores that the load generator may use.
        idle_cores: Not used.
        other_cores: Used by programs other than the load generator and the server.
        stolen_cores: Given to other virtual machines by the hypervisor, although a program wanted to run here.
    """

    core_count: int
    idle_cores: float
    other_cores: float
    stolen_cores: float

    @property
    def disturbance(self) -> str:
        """A sentence on the programs that used cores which the measurement needed, "" if there were none."""
        took = []
        if self.other_cores >= OTHERS_MIN and self.idle_cores <= IDLE_SHARE_MAX * self.core_count:
            took.append(f"other programs took {self.other_cores:.1f}")
        if self.stolen_cores >= STOLEN_SHARE_MIN * self.core_count:
            took.append(f"the hypervisor took {self.stolen_cores:.2g} (steal time)")
        if not took:
            return ""
        return f"Of {self.core_count} cores, {' and '.join(took)} during the measurement."


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The measured server.

    Attributes:
        url: Address, as given.
        protocol: `http` or `grpc`.
        name: Its name, from its metadata; `charonia` for one that goes by the protocol's usual name.
        version: Its version, from its metadata.
        extensions: Its protocol extensions, from its metadata.
    """

    url: str
    protocol: str
    name: str
    version: str
    extensions: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str, protocol: str, metadata: ServerMetadata) -> "ServerInfo":
        """Return the information in a server's metadata."""
        is_charonia = metadata.name == USUAL_NAME and PRODUCT in metadata.extensions
        return cls(url, protocol, PRODUCT if is_charonia else metadata.name, metadata.version, metadata.extensions)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The measured model.

    Attributes:
        name: Model name.
        version: Requested version, "" for the server's choice.
        platform: Platform, from its metadata.
        max_batch_size: From its configuration, 0 for a model that does not support batching.
        decoupled: Whether a request may have any number of responses.
        sequence: Whether it uses sequence batching.
        cached: Whether its responses are cached.
    """

    name: str
    version: str
    platform: str
    max_batch_size: int
    decoupled: bool
    sequence: bool
    cached: bool
