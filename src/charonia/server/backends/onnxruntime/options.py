"""Options of a model's sessions, from its configuration and the backend's settings, and choice of execution providers.

Pure. Which providers are installed is an argument.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from charonia.config.kinds import InstanceKind
from charonia.config.model import Accelerator, ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.api import Placement
from charonia.server.backends.parameters import unknown_parameters

GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED"}
"""Names of ONNX Runtime's optimisation levels by `optimization.graph.level`."""

GPU_PARAMETERS = {
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "do_copy_in_default_stream": {"0": "0", "1": "1", "false": "0", "true": "1"},
    "gpu_mem_limit": {},
}
"""Parameters of GPU instances, with ONNX Runtime's name of each value; empty for whole numbers."""

_T = TypeVar("_T")

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ENTRY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
_SETTINGS = ("enable-global-threadpool", "intra_op_thread_count", "inter_op_thread_count")
_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    _SHRINKAGE,
    *GPU_PARAMETERS,
)
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Options of a model's sessions.

    Attributes:
        intra_op_threads: Threads within one operator; 0 for the instance's share of the thread budget.
        inter_op_threads: Threads across operators, where `is_parallel`.
        is_parallel: Whether independent operators may run at the same time.
        graph_level: Name of the optimisation level.
        has_arena: Whether the memory arena is on, which keeps memory between runs.
        has_pattern: Whether memory patterns are on, a plan for each shape; None to decide by the model.
        entries: Session configuration entries that the model asks for.
        run_entries: Run configuration entries.
        op_libraries: Libraries of custom operators.
        gpu_options: Options of the CUDA provider.
        uses_global_pool: Whether the sessions share the global thread pool of the process.
    """

    intra_op_threads: int = 0
    inter_op_threads: int = 1
    is_parallel: bool = False
    graph_level: str = GRAPH_LEVELS[0]
    has_arena: bool = True
    has_pattern: bool | None = None
    entries: tuple[tuple[str, str], ...] = ()
    run_entries: tuple[tuple[str, str], ...] = ()
    op_libraries: tuple[str, ...] = ()
    gpu_options: tuple[tuple[str, str], ...] = ()
    uses_global_pool: bool = False


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[SessionPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings.

    Args:
        config: The model's configuration; its parameters override the settings.
        settings: Settings of the backend (`--backend-config`); unknown ones are ignored.
    """
    problems: list[Problem] = []
    values = {key: (f"--backend-config {key}", settings[key]) for key in _SETTINGS if key in settings}
    values |= {key: (f"parameters['{key}']", text) for key, text in config.parameters.items()}

    def number(key: str, default: int) -> int:
        path, text = values.get(key, ("", str(default)))
        if text.isascii() and text.isdigit():
            return int(text)
        problems.append(Problem(path, f"expected a whole number of at least 0, got '{text}'"))
        return default

    def choice(key: str, choices: Mapping[str, _T], default: _T) -> _T:
        if key not in values:
            return default
        path, text = values[key]
        if text.lower() not in choices:
            problems.append(Problem(path, f"expected one of {', '.join(choices)}, got '{text}'"))
        return choices.get(text.lower(), default)

    level = config.optimization.graph.level if config.optimization and config.optimization.graph else 0
    if level not in GRAPH_LEVELS:
        problems.append(
            Problem("optimization.graph.level", f"expected -1 (basic), 0 (all) or 1 (extended), got {level}")
        )
    gpu_options = []
    for key, choices in GPU_PARAMETERS.items():
        if key in values:
            gpu_options.append((key, choice(key, choices, "") if choices else str(number(key, 0))))
    operations = config.model_operations
    plan = SessionPlan(
        intra_op_threads=number("intra_op_thread_count", 0),
        inter_op_threads=number("inter_op_thread_count", 1) or 1,
        is_parallel=choice("execution_mode", {"0": False, "1": True}, False),
        graph_level=GRAPH_LEVELS.get(level, GRAPH_LEVELS[0]),
        has_arena=choice("enable_mem_arena", _FLAGS, True),
        has_pattern=choice("enable_mem_pattern", _FLAGS, None),
        entries=tuple((k, v) for k, v in sorted(config.parameters.items()) if k.startswith(_ENTRY_PREFIXES)),
        run_entries=tuple((k, v) for k, v in config.parameters.items() if k == _SHRINKAGE),
        op_libraries=operations.op_library_filename if operations is not None else (),
        gpu_options=tuple(gpu_options),
        uses_global_pool=choice("enable-global-threadpool", _FLAGS, False),
    )
    return plan, problems


def ineffective_parameters(config: ModelConfig) -> Iterator[str]:
    """Return a warning for each unknown parameter."""
    entries = (key for key in config.parameters if key.startswith(_ENTRY_PREFIXES))
    return unknown_parameters(config, "onnxruntime", (*_PARAMETERS, *entries))


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
        chosen = [_on_cpu(config.name, a) for a in accelerators.cpu_execution_accelerator]
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


def _on_cpu(model: str, accelerator: Accelerator) -> Provider:
    if accelerator.name != "openvino":
        raise _unknown(model, accelerator, "cpu", "openvino")
    return OPENVINO, {"device_type": "CPU", **accelerator.parameters}


def _cuda(plan: SessionPlan, placement: Placement, parameters: Mapping[str, str]) -> Provider:
    # The provider's default doubles each block that the arena requests, and GPU memory is scarce.
    defaults = {"device_id": str(placement.device_id), "arena_extend_strategy": "kSameAsRequested"}
    return CUDA, {**defaults, **dict(plan.gpu_options), **parameters}


def _unknown(model: str, accelerator: Accelerator, device: str, known: str) -> Exception:
    return invalid(
        f"model '{model}': unknown {device} execution accelerator '{accelerator.name}'",
        hint=f"those for {device.upper()} instances are {known}",
    )
