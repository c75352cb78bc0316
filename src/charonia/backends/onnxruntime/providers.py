"""Which of ONNX Runtime's execution providers an instance runs on. Pure: it is told what is installed."""

from collections.abc import Collection, Mapping

from charonia.backends.api import Placement
from charonia.backends.onnxruntime.options import SessionPlan
from charonia.config.kinds import InstanceKind
from charonia.config.model import Accelerator, ModelConfig
from charonia.core.errors import invalid, unsupported

Provider = tuple[str, Mapping[str, str]]
"""Name and options of an execution provider."""

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

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
                else "install onnxruntime-openvino in place of onnxruntime, or remove the accelerator",
            )
    return [*chosen, (CPU, {})]


def _on_gpu(model: str, accelerator: Accelerator, plan: SessionPlan, placement: Placement) -> Provider:
    if accelerator.name == "cuda":
        return _cuda(plan, placement, accelerator.parameters)
    if accelerator.name != "tensorrt":
        raise _unknown(model, accelerator, "gpu", "tensorrt and cuda")
    options = {"device_id": str(placement.device_id)}
    for key, text in accelerator.parameters.items():
        if key == "precision_mode":
            if text not in _PRECISIONS:
                raise invalid(
                    f"model '{model}': precision_mode: expected one of {', '.join(_PRECISIONS)}, got '{text}'"
                )
            options |= _PRECISIONS[text]
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
    # Blocks as large as asked for: the provider's own default doubles them, and memory on a GPU is what runs out.
    defaults = {"device_id": str(placement.device_id), "arena_extend_strategy": "kSameAsRequested"}
    return CUDA, {**defaults, **dict(plan.gpu_options), **parameters}


def _unknown(model: str, accelerator: Accelerator, device: str, known: str) -> Exception:
    return invalid(
        f"model '{model}': unknown {device} execution accelerator '{accelerator.name}'",
        hint=f"those for {device.upper()} instances are {known}",
    )
