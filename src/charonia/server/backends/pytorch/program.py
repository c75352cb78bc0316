"""A model in memory, independent of its file's kind: a callable, its arguments and its weights; and how it is to run.

Also the datatypes of PyTorch and of the protocol, `torch.compile` as a configuration requests it, and readable errors.
Source of the parameters: the documentation of Triton's PyTorch backend. It does not have CHANNELS_LAST, PRECISION,
ALLOW_UNPICKLING or MODULE_CLASS.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.core.dtypes import BY_NAME, DataType
from charonia.core.errors import Code, ServingError, unavailable, unsupported
from charonia.server.backends.parameters import INVERTED, Params, declared_by, parameter
from charonia.server.backends.pytorch.naming import Leaves, Parameters

_MESSAGE_CHARS_MAX = 1000
_FRAMES = re.compile(r"(?:Exception raised from .*|C\+\+ CapturedTraceback:.*|frame #\d+: .*)", re.DOTALL)
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
_INTERPRETER = "The following operation failed in the TorchScript interpreter."
_INTERNAL = re.compile(r"This is an internal miniz error\..*", re.DOTALL)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
_DEVICE_LOST = ("CUDA error:", "CUDA driver error", "device-side assert")


class DeviceLostError(ServingError):
    """The GPU is lost for this process: nothing can run on it until the server is restarted."""


def plain_error(what: str, error: BaseException, code: Code = Code.INTERNAL) -> ServingError:
    """Return an error of PyTorch without its stack of C++ frames and advice to programmers.

    Args:
        code: Code of the result, unless memory or a device is the cause.
    """
    text = plain_text(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _NO_MEMORY):
        return unavailable(
            f"{what}: out of memory: {text}",
            hint="smaller batches (max_batch_size), fewer instances, or ENABLE_WEIGHT_SHARING need less",
        )
    if isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _DEVICE_LOST):
        return DeviceLostError(
            Code.INTERNAL,
            f"{what}: the GPU failed: {text}",
            hint="a process cannot use a GPU again after such an error: restart the server",
        )
    return ServingError(code, f"{what}: {text}")


def plain_text(error: BaseException) -> str:
    """Return the message of an error as one line."""
    text = _TERMINAL.sub("", str(error))
    if text.startswith(_INTERPRETER):
        # The last line is the error, the lines before are source code.
        text = text.strip().splitlines()[-1].removeprefix("RuntimeError: ")
    text = _INTERNAL.sub("", _FRAMES.sub("", text))
    text = " ".join(text.split())[:_MESSAGE_CHARS_MAX]
    name = type(error).__name__
    return text if isinstance(error, RuntimeError) and text else f"{name}: {text}" if text else name


EAGER_RUNTIME = "model.py"
"""`runtime` of a module whose Python source is in the version's folder."""

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"

PRECISIONS = {"fp32": None, "bf16": DataType.BF16, "fp16": DataType.FP16}
"""Datatype that weights and floating-point inputs are converted to, by value of PRECISION; None for no conversion."""

COMPILE_OPTIONS: Mapping[str, type] = {
    "fullgraph": bool,
    "dynamic": bool,
    "backend": str,
    "mode": str,
    "options": dict,
    "disable": bool,
}
"""What TORCH_COMPILE_OPTIONAL_PARAMETERS may hold: the arguments of `torch.compile`, with the type of each."""


def _compile_options(text: str) -> dict[str, object] | None:
    """Return the arguments of `torch.compile`, None where the module is not compiled."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a JSON object ({error})") from None
    if not isinstance(options, dict):
        raise ValueError("a JSON object")
    for name, value in options.items():
        if name not in COMPILE_OPTIONS:
            raise ValueError(f"a JSON object of {', '.join(COMPILE_OPTIONS)}, without the unknown argument '{name}'")
        if not isinstance(value, COMPILE_OPTIONS[name]):
            raise ValueError(f"a JSON object with '{name}' of type {COMPILE_OPTIONS[name].__name__}")
    return None if options.pop("disable", False) else options


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The parameters of a model; 0 and None leave the choice to the server or to PyTorch."""

    # fmt: off
    uses_inference_mode: bool = parameter("INFERENCE_MODE", "run in `torch.inference_mode`; `false`: only without "
                                          "gradients", bool, True)
    shares_weights: bool = parameter("ENABLE_WEIGHT_SHARING", "the instances of one device share one copy of the "
                                     "weights; refused for TorchScript that sets its attributes", bool, False)
    intra_op_threads: int = parameter("INTRA_OP_THREAD_COUNT", "threads of one operator", int, 0,
                                      "the instance's share of the cores", ge=0, also="NUM_THREADS")
    inter_op_threads: int = parameter("INTER_OP_THREAD_COUNT", "threads across operators, for the whole server: the "
                                      "first model decides", int, 0, "1", ge=0, also="NUM_INTEROP_THREADS")
    is_optimized: bool = parameter("DISABLE_OPTIMIZED_EXECUTION", "do not optimise TorchScript while it runs", INVERTED,
                                   True, "`false`")
    jit_executor: bool | None = parameter("ENABLE_JIT_EXECUTOR", "TorchScript's profiling executor, for the whole "
                                          "server", bool, None, "PyTorch's")
    jit_profiling: bool | None = parameter("ENABLE_JIT_PROFILING", "whether it profiles, for the whole server", bool,
                                           None, "PyTorch's")
    compile_options: Mapping[str, object] | None = parameter(
        COMPILE, 'compile with `torch.compile`; JSON of its arguments: `{}`, `{"dynamic": true, "mode": '
        '"max-autotune"}`; `{"disable": true}` does not', _compile_options, None, "none")
    uses_cudnn: bool = parameter("DISABLE_CUDNN", "no cuDNN, for the whole server", INVERTED, True, "`false`")
    cleans_cache: bool = parameter("ENABLE_CACHE_CLEANING", "return cached GPU memory after every batch; slow", bool,
                                   False)
    precision: DataType | None = parameter(  # noqa: RUF009 # it returns a field
        "PRECISION", "`bf16` or `fp16`: convert weights and floating-point inputs, and convert outputs back "
        "(TorchScript, `model.py`)", PRECISIONS, None, "`fp32`")
    is_channels_last: bool = parameter("CHANNELS_LAST", "use the channels-last layout for weights and inputs of four "
                                       "dimensions (TorchScript, `model.py`)", bool, False)
    unpickles: bool = parameter("ALLOW_UNPICKLING", "files may run code while they are read", bool, False)
    class_name: str = parameter("MODULE_CLASS", "the class in `model.py`", str, "", "none")
    # fmt: on


PARAMETERS = Params("pytorch", *declared_by(RunPlan), settings=None)
"""Every parameter. Each may also be given for all models: `--backend-config=pytorch,NAME=VALUE`."""


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[RunPlan, list[Problem]]:
    values = PARAMETERS.values(config, settings)
    return values.into(RunPlan), values.problems


TORCH: dict[DataType, torch.dtype] = {
    datatype: getattr(torch, name) for name, datatype in BY_NAME.items() if datatype is not DataType.BYTES
}
"""PyTorch's datatype by the protocol's; strings are lists, not tensors."""

PROTOCOL: dict[torch.dtype, DataType] = {own: datatype for datatype, own in TORCH.items()}
"""The protocol's datatype by PyTorch's; complex, quantised and 8-bit floating-point types have none."""


_COMPILERS = ("g++", "clang++", "c++", "cl")


def compiled(module: torch.nn.Module, plan: RunPlan) -> Any:
    """Return the module wrapped in `torch.compile`, which compiles it at the first call.

    Raises:
        ServingError: UNSUPPORTED where there is no compiler, INVALID_ARG for arguments that torch.compile refuses.
    """
    options = dict(plan.compile_options or {})
    if options.get("backend", "inductor") == "inductor" and not any(shutil.which(name) for name in _COMPILERS):
        raise unsupported(
            f"{COMPILE}: torch.compile needs a C++ compiler and found none",
            hint='install g++, or use a backend that needs none: {"backend": "aot_eager"}',
        )
    try:
        return torch.compile(module, **options)  # type: ignore[call-overload] # checked by name and type when read
    except Exception as error:  # PyTorch's errors have no common base class
        raise plain_error(f"{COMPILE}: torch.compile", error, Code.INVALID_ARG) from error


@dataclass(frozen=True, slots=True)
class Program:
    """A model in memory.

    Attributes:
        weight_bytes: Size of weights that are not accessible as tensors.
        device: The device that it runs on, None for that of its weights.
    """

    call: Callable[..., Any]
    interface: Parameters | Leaves
    weights: tuple[torch.Tensor, ...] = ()
    weight_bytes: int = 0
    device: torch.device | None = None
    storages: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        # Outputs that share storage with weights must be copied: a later call may change them.
        addresses = (tensor.untyped_storage().data_ptr() for tensor in self.weights)
        object.__setattr__(self, "storages", frozenset(address for address in addresses if address))

    def memory_bytes(self) -> int:
        """Return the size of the weights; shared storage counts once."""
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.weights}
        return sum(sizes.values()) + self.weight_bytes


def weights_of(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    return (*module.parameters(), *module.buffers())
