"""Options of a model's sessions, from its configuration and the backend's settings, and choice of execution providers.

Pure. Which providers are installed is an argument.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from charonia.config.kinds import InstanceKind
from charonia.config.model import Accelerator, ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.api import Placement
from charonia.server.backends.parameters import Param, Params, declared_by, parameter

GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED"}
"""Names of ONNX Runtime's optimisation levels by `optimization.graph.level`."""

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ENTRY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")

# fmt: off
GPU_PARAMETERS = (
    Param("arena_extend_strategy", "GPU: 0 doubles the allocated memory, 1 allocates the requested size",
          {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}, shown="1"),
    Param("cudnn_conv_algo_search", "0 exhaustive, 1 heuristic, 2 default",
          {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}, shown="ONNX Runtime's"),
    Param("do_copy_in_default_stream", "1 copies in the stream that computes",
          {"0": "0", "1": "1", "false": "0", "true": "1"}, shown="ONNX Runtime's"),
    Param("gpu_mem_limit", "GPU memory limit of a session, in bytes", int, ge=0),
)
"""Parameters of GPU instances, with ONNX Runtime's name of each value."""

# fmt: on


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The parameters of a model, and what else its configuration says of sessions.

    Attributes:
        intra_op_threads: Threads within one operator; 0 for the instance's share of the thread budget.
        has_pattern: Whether memory patterns are on, a plan for each shape; None to decide by the model.
        entries: Session configuration entries that the model asks for.
        run_entries: Run configuration entries.
        op_libraries: Libraries of custom operators.
        gpu_options: Options of the CUDA provider.
    """

    # fmt: off
    intra_op_threads: int = parameter("intra_op_thread_count", "threads that one operator may use, for each instance; "
                                      "see [threads](threads.md)", int, 0, "the thread budget", ge=0)
    inter_op_threads: int = parameter("inter_op_thread_count", "threads across independent operators, with "
                                      "`execution_mode` 1", int, 1, ge=0)
    is_parallel: bool = parameter("execution_mode", "0: sequential operators; 1: independent operators in parallel",
                                  {"0": False, "1": True}, False, "0")
    has_arena: bool = parameter("enable_mem_arena", "keep memory between runs", bool, True, "1")
    has_pattern: bool | None = parameter("enable_mem_pattern", "plan memory ahead; the plans for every shape seen are "
                                         "kept", bool, None, "1, 0 for variable shapes")
    uses_global_pool: bool = parameter("enable-global-threadpool", kind=bool, default=False, is_setting_only=True)
    # fmt: on
    graph_level: str = GRAPH_LEVELS[0]
    entries: tuple[tuple[str, str], ...] = ()
    run_entries: tuple[tuple[str, str], ...] = ()
    op_libraries: tuple[str, ...] = ()
    gpu_options: tuple[tuple[str, str], ...] = ()


PARAMETERS = Params(
    "onnxruntime",
    *declared_by(SessionPlan),
    Param(_SHRINKAGE, "devices whose arena shrinks after every run: `cpu:0`, `cpu:0;gpu:0`"),
    *GPU_PARAMETERS,
    settings=("intra_op_thread_count", "inter_op_thread_count"),
)


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[SessionPlan, list[Problem]]:
    values = PARAMETERS.values(config, settings)
    problems = values.problems
    level = config.optimization.graph.level if config.optimization and config.optimization.graph else 0
    if level not in GRAPH_LEVELS:
        problems.append(
            Problem("optimization.graph.level", f"expected -1 (basic), 0 (all) or 1 (extended), got {level}")
        )
    operations = config.model_operations
    plan = values.into(
        SessionPlan,
        inter_op_threads=values["inter_op_thread_count"] or 1,
        graph_level=GRAPH_LEVELS.get(level, GRAPH_LEVELS[0]),
        entries=tuple((k, v) for k, v in sorted(config.parameters.items()) if k.startswith(_ENTRY_PREFIXES)),
        run_entries=tuple((k, v) for k, v in config.parameters.items() if k == _SHRINKAGE),
        op_libraries=operations.op_library_filename if operations is not None else (),
        gpu_options=tuple((each.name, str(values[each.name])) for each in GPU_PARAMETERS if each.name in values),
    )
    return plan, problems


def ineffective_parameters(config: ModelConfig) -> Iterator[str]:
    return PARAMETERS.remarks(config, [key for key in config.parameters if key.startswith(_ENTRY_PREFIXES)])


def idle_accelerators(config: ModelConfig) -> Iterator[str]:
    """Yield a warning for each kind of accelerator that no instance can use."""
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    if accelerators is None:
        return
    on_gpu = {group.kind is InstanceKind.KIND_GPU for group in config.instance_group}
    for device, given in (
        ("gpu", accelerators.gpu_execution_accelerator),
        ("cpu", accelerators.cpu_execution_accelerator),
    ):
        if given and (device == "gpu") not in on_gpu:
            names = ", ".join(accelerator.name for accelerator in given)
            yield (
                f"model '{config.name}': {device}_execution_accelerator {names} has no effect: no instance of the "
                f"model runs on a {device.upper()}"
            )


Provider = tuple[str, Mapping[str, str]]
"""Name and options of an execution provider."""

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

ENGINE_CACHE = "~/.cache/charonia/tensorrt"
"""Folder of TensorRT engines where a model keeps them and names no other."""

_ON = ("1", "true")
_OPENVINO_PARAMETERS = {
    "device_type": "TARGET_DEVICE",
    "num_of_threads": "INFERENCE_NUM_THREADS",
    "num_streams": "NUM_STREAMS",
    "cache_dir": "CACHE_DIR",
}
"""Parameters of the openvino backend by the provider's options."""

_PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}


def choose_providers(
    config: ModelConfig, plan: SessionPlan, placement: Placement, installed: Collection[str]
) -> list[Provider]:
    """Return the providers of an instance's session, best first.

    Raises:
        ServingError: UNSUPPORTED for an accelerator or a device that the installed ONNX Runtime does not have,
            INVALID_ARG for an unknown accelerator or parameter.
    """
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    on_gpu = placement.kind is InstanceKind.KIND_GPU
    chosen: list[Provider] = []
    if accelerators is not None and on_gpu:
        chosen = [_on_gpu(config.name, a, plan, placement) for a in accelerators.gpu_execution_accelerator]
    elif accelerators is not None:
        for accelerator in accelerators.cpu_execution_accelerator:
            if accelerator.name != "openvino":
                raise _unknown(config.name, accelerator, "cpu", "openvino")
            chosen.append((OPENVINO, {"device_type": "CPU", **accelerator.parameters}))
    if on_gpu and all(name != CUDA for name, _ in chosen):
        chosen.append(_cuda(plan, placement, {}))
    for name, _ in chosen:
        if name not in installed:
            raise unsupported(
                f"instance '{placement.name}' of model '{config.name}' needs ONNX Runtime's {name}, the installed one "
                f"has {', '.join(sorted(installed))}",
                hint="install onnxruntime-gpu in place of onnxruntime, or use instances of KIND_CPU"
                if on_gpu
                else "install openvino, and the model runs in the openvino backend; or remove the accelerator",
            )
    return [*chosen, (CPU, {})]


def for_openvino(config: ModelConfig, installed: Collection[str]) -> ModelConfig | None:
    """Return the configuration of a model that the openvino backend runs in place of ONNX Runtime, None for others.

    It is one with the accelerator `openvino`, where the installed ONNX Runtime has no such provider.

    Raises:
        ServingError: INVALID_ARG for an unknown parameter of the accelerator.
    """
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    given = accelerators.cpu_execution_accelerator if accelerators is not None else ()
    named = next((accelerator for accelerator in given if accelerator.name == "openvino"), None)
    on_gpu = any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group)
    if named is None or OPENVINO in installed or on_gpu:
        return None
    parameters = {key: text for key, text in config.parameters.items() if key in SERVER_PARAMETERS}
    if config.parameters.get("intra_op_thread_count", "0") != "0":
        parameters["INFERENCE_NUM_THREADS"] = config.parameters["intra_op_thread_count"]
    for key, text in named.parameters.items():
        if key not in _OPENVINO_PARAMETERS and not key.isupper():
            raise invalid(
                f"model '{config.name}': accelerator 'openvino' has no parameter '{key}'",
                hint=f"it has {', '.join(_OPENVINO_PARAMETERS)} and the parameters of the openvino backend",
            )
        parameters[_OPENVINO_PARAMETERS.get(key, key)] = text
    return replace(config, parameters=parameters)


def _on_gpu(model: str, accelerator: Accelerator, plan: SessionPlan, placement: Placement) -> Provider:
    if accelerator.name == "cuda":
        return _cuda(plan, placement, accelerator.parameters)
    if accelerator.name != "tensorrt":
        raise _unknown(model, accelerator, "gpu", "tensorrt and cuda")
    options = {"device_id": str(placement.device_id)}
    if accelerator.parameters.get("trt_engine_cache_enable", "0").lower() in _ON:
        options["trt_engine_cache_path"] = f"{ENGINE_CACHE}/{model}"  # ONNX Runtime's own is the working directory
    for key, text in accelerator.parameters.items():
        if key == "precision_mode":
            if text not in _PRECISIONS:
                raise invalid(
                    f"model '{model}': precision_mode: expected one of {', '.join(_PRECISIONS)}, got '{text}'"
                )
            options |= _PRECISIONS[text]
        elif key == "trt_cuda_graph_enable" and text.lower() in _ON:
            raise unsupported(
                f"model '{model}': trt_cuda_graph_enable needs inputs and outputs at fixed addresses",
                hint="a TensorRT plan (backend tensorrt) can have CUDA graphs",
            )
        elif key in _TENSORRT_OPTIONS or key.startswith("trt_"):
            options[_TENSORRT_OPTIONS.get(key, key)] = text
        else:
            raise invalid(
                f"model '{model}': accelerator 'tensorrt' has no parameter '{key}'",
                hint=f"it has precision_mode, {', '.join(_TENSORRT_OPTIONS)} and ONNX Runtime's own trt_* options",
            )
    return TENSORRT, options


def _cuda(plan: SessionPlan, placement: Placement, parameters: Mapping[str, str]) -> Provider:
    # The provider's default doubles each block that the arena requests, and GPU memory is scarce.
    defaults = {"device_id": str(placement.device_id), "arena_extend_strategy": "kSameAsRequested"}
    return CUDA, {**defaults, **dict(plan.gpu_options), **parameters}


def _unknown(model: str, accelerator: Accelerator, device: str, known: str) -> Exception:
    return invalid(
        f"model '{model}': unknown {device} execution accelerator '{accelerator.name}'",
        hint=f"those for {device.upper()} instances are {known}",
    )
