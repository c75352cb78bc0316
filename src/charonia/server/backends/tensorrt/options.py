"""Options of plans from configurations and the backend's settings, and which shapes CUDA graphs are captured for. Pure.

Source: the documentation of Triton's TensorRT backend and of its model configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from charonia.config.kinds import InstanceKind, ModelPriority
from charonia.config.model import Cuda, GraphLowerBound, GraphShape, GraphSpec, InstanceGroup, ModelConfig, Optimization
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Param, Params, declared_by, parameter

ALLOCATION = "execution_context_allocation_strategy"
_COMPATIBLE, _POOL = "version-compatible", "memory-pool-byte-size"

STREAM_PRIORITIES = {
    ModelPriority.PRIORITY_DEFAULT: 0,
    ModelPriority.PRIORITY_MAX: -100,
    ModelPriority.PRIORITY_MIN: 100,
}
"""CUDA's priority of an instance's stream; the driver clamps it to what the GPU has."""

GRAPH_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batch sizes that graphs are captured for where neither `graph_spec` nor `preferred_batch_size` names any."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a model.

    Attributes:
        runs_host_code: Whether the plan may bring code that runs in this process, as version-compatible ones do.
        pool_bytes: Limit of the memory of each GPU that batches take, 0 for all that there is.
    """

    plugins: tuple[str, ...] = ()
    runs_host_code: bool = parameter(_COMPATIBLE, kind=bool, default=False, is_setting_only=True)
    priority: int = 0
    has_graphs: bool = False
    pool_bytes: int = parameter(_POOL, kind=int, default=0, ge=0, is_setting_only=True)


PARAMETERS = Params(
    "tensorrt",
    *declared_by(PlanOptions),
    Param(ALLOCATION, kind={name: name for name in ("STATIC", "ON_PROFILE_CHANGE")}),
    Param("enable_multi_device", kind=bool),
)


def read_options(config: ModelConfig, settings: Mapping[str, str]) -> tuple[PlanOptions, list[Problem]]:
    """Return the options, and all problems in the configuration and settings."""
    values = PARAMETERS.values(config, settings)
    if values["enable_multi_device"]:
        values.fail("enable_multi_device", "an engine over several GPUs is not available")
    return values.into(
        PlanOptions,
        plugins=tuple(path for path in settings.get("plugins", "").split(";") if path),
        priority=STREAM_PRIORITIES[(config.optimization or Optimization()).priority],
        has_graphs=_cuda(config).graphs,
    ), [*values.problems, *_problems(config)]


def _problems(config: ModelConfig) -> Iterator[Problem]:
    for index, group in enumerate(config.instance_group):
        if group.kind in (InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL):
            message = f"group '{group.name}' would run on the CPU ({group.kind.name}): a plan runs on a GPU only"
            yield Problem(f"instance_group[{index}].kind", f"{message}; `charonia doctor` looks for GPUs")
        for number, text in enumerate(group.profile):
            if not text.isdecimal():
                path = f"instance_group[{index}].profile[{number}]"
                yield Problem(path, f"expected the number of an optimization profile, got '{text}'")
    accelerators = (config.optimization or Optimization()).execution_accelerators
    if accelerators is not None and (accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator):
        yield Problem(
            "optimization.execution_accelerators",
            "a plan is compiled already; accelerators are for ONNX models (backend onnxruntime)",
        )
    yield from _graph_problems(config)


def without_effect(config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each parameter that is unknown, and for each option that changes nothing here."""
    yield from PARAMETERS.remarks(config)
    for key in ("coalesce-request-input", "execution-policy"):
        if key in settings:
            yield f"model '{config.name}': --backend-config tensorrt,{key} has no effect"
    optimization, cuda = config.optimization or Optimization(), _cuda(config)
    for name, is_set in (
        ("cuda.busy_wait_events", cuda.busy_wait_events),
        ("cuda.output_copy_stream", cuda.output_copy_stream),
        ("eager_batching", optimization.eager_batching),
        ("gather_kernel_buffer_threshold", optimization.gather_kernel_buffer_threshold),
    ):
        if is_set:
            yield f"model '{config.name}': optimization.{name} has no effect"


def group_of(config: ModelConfig, instance: str) -> InstanceGroup:
    """Return the group of an instance, by the instance's name."""
    name = instance.rpartition("_")[0]
    return next((group for group in config.instance_group if group.name == name), InstanceGroup())


def profiles_of(group: InstanceGroup) -> list[int]:
    """Return the numbers of the optimization profiles of a group: profile 0 where it names none."""
    return list(dict.fromkeys(map(int, group.profile))) or [0]


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The shapes of a CUDA graph.

    Attributes:
        upper: Shape of each input as it is captured.
        lower: The smallest shape of each input that the graph may serve; what is missing is filled with zeros.
    """

    upper: Mapping[str, Shape]
    lower: Mapping[str, Shape]

    def serves(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            len(shape) == len(self.upper[name])
            and all(
                low <= size <= high for low, size, high in zip(self.lower[name], shape, self.upper[name], strict=True)
            )
            for name, shape in shapes.items()
        )


def graph_specs(config: ModelConfig) -> tuple[GraphSpec, ...]:
    return _cuda(config).graph_spec


def _cuda(config: ModelConfig) -> Cuda:
    return (config.optimization or Optimization()).cuda or Cuda()


def graph_shapes(config: ModelConfig, usual: Mapping[str, Shape]) -> list[GraphShapes]:
    """Return the shapes to capture graphs for: those of `graph_spec`, else the usual ones in several batch sizes.

    Args:
        usual: The shape of each input that a profile was optimised for.
    """
    specs = graph_specs(config) or tuple(GraphSpec(batch_size=size) for size in _usual_batches(config))
    return [GraphShapes(_shapes(spec, usual), _shapes(spec.graph_lower_bound or spec, usual)) for spec in specs]


def _usual_batches(config: ModelConfig) -> list[int]:
    largest = config.max_batch_size
    if largest == 0:
        return [0]
    oldest = config.sequence_batching.oldest if config.sequence_batching is not None else None
    scheduler = config.dynamic_batching if config.dynamic_batching is not None else oldest
    preferred = scheduler.preferred_batch_size if scheduler is not None else GRAPH_BATCHES
    return sorted({1, largest, *(size for size in preferred if size <= largest)})


def _shapes(spec: GraphSpec | GraphLowerBound, usual: Mapping[str, Shape]) -> dict[str, Shape]:
    batch = (spec.batch_size,) if spec.batch_size else ()
    if not spec.input:
        return {name: (*batch, *shape[len(batch) :]) for name, shape in usual.items()}
    return {name: (*batch, *spec.input.get(name, GraphShape()).dim) for name in usual}


def _graph_problems(config: ModelConfig) -> Iterator[Problem]:
    largest = config.max_batch_size
    names = {tensor.name for tensor in config.input}
    usual: dict[str, Shape] = dict.fromkeys(names, ())
    for index, (spec, shapes) in enumerate(zip(graph_specs(config), graph_shapes(config, usual), strict=False)):
        path, low = f"optimization.cuda.graph_spec[{index}]", spec.graph_lower_bound
        for bound in (spec, *((low,) if low is not None else ())):
            if not min(1, largest) <= bound.batch_size <= largest:
                yield Problem(path, f"expected batch sizes from {min(1, largest)} to {largest}, got {bound.batch_size}")
            if bound.input and bound.input.keys() != names:
                yield Problem(path, f"expected the shape of each input ({', '.join(sorted(names))})")
                return
        if not shapes.serves(shapes.lower):
            yield Problem(f"{path}.graph_lower_bound", "must have the inputs of the graph, and no larger shapes")
