"""The model configuration as frozen records.

They mirror the `ModelConfig` message of `charonia/schema/model_config.proto` field by field, so a path such as
`dynamic_batching.max_queue_delay_microseconds` means the same in config.pbtxt, in JSON and here. A message field whose
absence has a meaning is None if it is not set; repeated fields are tuples, maps are dicts.

Source of meanings and defaults: Triton's model configuration documentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.config.kinds import (
    BatchInputKind,
    BatchOutputKind,
    ControlKind,
    Format,
    InstanceKind,
    ModelPriority,
    SecondaryDeviceKind,
    TimeoutAction,
)
from charonia.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class Reshape:
    """The shape of the framework's tensor, or of the tensor of an ensemble's steps, if it differs from `dims`."""

    shape: tuple[int, ...] = ()


class _Reshaped:
    __slots__ = ()
    name: str
    dims: tuple[int, ...]
    reshape: Reshape | None

    @property
    def inner_dims(self) -> tuple[int, ...]:
        """Dims that the framework has for it, or the steps of an ensemble."""
        return self.dims if self.reshape is None else self.reshape.shape


@dataclass(frozen=True, slots=True)
class ModelInput(_Reshaped):
    """An input; `dims` has -1 for a variable dimension and excludes the batch dimension of a batching model."""

    name: str = ""
    data_type: DataType | None = None
    format: Format = Format.FORMAT_NONE
    dims: tuple[int, ...] = ()
    reshape: Reshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True)
class ModelOutput(_Reshaped):
    """An output; `dims` as for inputs. `label_filename` is relative to the model's folder."""

    name: str = ""
    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    reshape: Reshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that is computed from the batch rather than sent."""

    kind: BatchInputKind = BatchInputKind.BATCH_ELEMENT_COUNT
    target_name: tuple[str, ...] = ()
    data_type: DataType | None = None
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """An output whose split over the requests follows an input's shapes."""

    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = BatchOutputKind.BATCH_SCATTER_WITH_INPUT_SHAPE
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Latest:
    """Serve the `num_versions` highest versions."""

    num_versions: int = 1


@dataclass(frozen=True, slots=True)
class All:
    """Serve every version."""


@dataclass(frozen=True, slots=True)
class Specific:
    """Serve just these versions."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions are served: exactly one of the three is set."""

    latest: Latest | None = None
    all: All | None = None
    specific: Specific | None = None


@dataclass(frozen=True, slots=True)
class RateLimiterResource:
    """A resource that an instance holds while it runs."""

    name: str = ""
    global_: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """The resources that an instance needs to run, and its priority."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SecondaryDevice:
    """A helper device of an instance."""

    kind: SecondaryDeviceKind = SecondaryDeviceKind.KIND_NVDLA
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A number of instances of one kind."""

    name: str = ""
    kind: InstanceKind = InstanceKind.KIND_AUTO
    count: int = 0
    rate_limiter: RateLimiter | None = None
    gpus: tuple[int, ...] = ()
    secondary_devices: tuple[SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An execution accelerator and its parameters."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutionAccelerators:
    """Accelerators for GPU and CPU instances."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """Graph optimisation level."""

    level: int = 0


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A shape in a CUDA graph specification."""

    dim: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphLowerBound:
    """The smallest shapes that a captured CUDA graph may serve."""

    batch_size: int = 0
    input: Mapping[str, GraphShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Shapes to capture a CUDA graph for."""

    batch_size: int = 0
    input: Mapping[str, GraphShape] = field(default_factory=dict)
    graph_lower_bound: GraphLowerBound | None = None


@dataclass(frozen=True, slots=True)
class Cuda:
    """CUDA specific settings."""

    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[GraphSpec, ...] = ()
    output_copy_stream: bool = False


@dataclass(frozen=True, slots=True)
class PinnedMemoryBuffer:
    """Whether pinned memory is used for transfers."""

    enable: bool = False


@dataclass(frozen=True, slots=True)
class Optimization:
    """Optimisation settings for the framework."""

    graph: Graph | None = None
    priority: ModelPriority = ModelPriority.PRIORITY_DEFAULT
    cuda: Cuda | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: int = 0
    eager_batching: bool = False


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of one priority level's queue. 0 means none, for the timeout and the size."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How requests are combined into batches."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """One control that a sequence control input carries."""

    kind: ControlKind = ControlKind.CONTROL_SEQUENCE_START
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType | None = None


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input that the sequence batcher fills."""

    name: str = ""
    control: tuple[SequenceControl, ...] = ()


@dataclass(frozen=True, slots=True)
class InitialState:
    """The initial value of a sequence's state: zeros or a file."""

    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A state that the server keeps between the requests of a sequence."""

    input_name: str = ""
    output_name: str = ""
    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class SequenceDirect:
    """One slot for each sequence."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceOldest:
    """Batches of the oldest requests of many sequences."""

    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """How the requests of sequences are routed and batched."""

    direct: SequenceDirect | None = None
    oldest: SequenceOldest | None = None
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble and the mapping of its tensors."""

    model_name: str = ""
    model_version: int = 0
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)
    model_namespace: str = ""


@dataclass(frozen=True, slots=True)
class EnsembleScheduling:
    """The data flow of an ensemble."""

    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """Data of one input of a warm-up sample: exactly one source is set."""

    data_type: DataType | None = None
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelWarmup:
    """A sample that runs before the model is ready."""

    name: str = ""
    batch_size: int = 0
    inputs: Mapping[str, WarmupInput] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True, slots=True)
class ModelOperations:
    """Libraries of custom operations."""

    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionPolicy:
    """Whether a request may have any number of responses."""

    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class RepositoryAgent:
    """A hook that runs while the model is loaded."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RepositoryAgents:
    """The model's repository agents, in order."""

    agents: tuple[RepositoryAgent, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseCacheConfig:
    """Whether responses of the model may be cached."""

    enable: bool = False


@dataclass(frozen=True, slots=True)
class MetricIdentifier:
    """Which metric family an override is for."""

    family: str = ""


@dataclass(frozen=True, slots=True)
class HistogramOptions:
    """Upper bounds of a histogram's buckets."""

    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricControl:
    """An override for one metric family."""

    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


@dataclass(frozen=True, slots=True)
class ModelMetricsConfig:
    """Metric overrides of the model."""

    metric_control: tuple[MetricControl, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All fields of config.pbtxt.

    `parameters` maps a key to its `string_value`.
    """

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: VersionPolicy | None = None
    max_batch_size: int = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: Optimization | None = None
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    instance_group: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: TransactionPolicy | None = None
    model_repository_agents: RepositoryAgents | None = None
    response_cache: ResponseCacheConfig | None = None
    model_metrics: ModelMetricsConfig | None = None

    @property
    def is_decoupled(self) -> bool:
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled
