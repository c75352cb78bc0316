"""Options of a PyTorch model, from its parameters and the backend's settings. Pure.

Source of the parameters: the documentation of Triton's PyTorch backend. It does not have CHANNELS_LAST, PRECISION,
ALLOW_UNPICKLING or MODULE_CLASS.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType

EAGER_RUNTIME = "model.py"
"""`runtime` of a module whose Python source lies in the version's folder."""

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"

PRECISIONS = {"fp32": None, "bf16": DataType.BF16, "fp16": DataType.FP16}
"""Datatype that weights and floating-point inputs are converted to, by value of PRECISION; None for no conversion."""

_FLAGS = {"0": False, "false": False, "1": True, "true": True}
_SWITCHES = (
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_CACHE_CLEANING",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "CHANNELS_LAST",
    "ALLOW_UNPICKLING",
)
_INTRA = ("INTRA_OP_THREAD_COUNT", "NUM_THREADS")
_INTER = ("INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS")
PARAMETERS = (*_SWITCHES, *_INTRA, *_INTER, "PRECISION", "MODULE_CLASS", COMPILE)
"""Every parameter. Each may also be given for all models: `--backend-config=pytorch,NAME=VALUE`."""

COMPILE_OPTIONS: Mapping[str, type] = {
    "fullgraph": bool,
    "dynamic": bool,
    "backend": str,
    "mode": str,
    "options": dict,
    "disable": bool,
}
"""What TORCH_COMPILE_OPTIONAL_PARAMETERS may hold: the arguments of `torch.compile`, with the type of each."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Options of a model's run.

    Attributes:
        is_optimized: Whether TorchScript is optimised while it runs.
        uses_inference_mode: Whether `torch.inference_mode` is on; else only gradients are off.
        uses_cudnn: Whether cuDNN may be used.
        shares_weights: Whether the instances of one device share one copy of the weights.
        cleans_cache: Whether cached memory of the GPU is released after each batch.
        jit_executor: Whether TorchScript's profiling executor is on, None for PyTorch's default.
        jit_profiling: Whether it profiles, None for PyTorch's default.
        intra_op_threads: Threads within one operator; 0 for the instance's share of the thread budget.
        inter_op_threads: Threads across operators, for the whole process; 0 for 1 unless another model has set it.
        compile_options: Arguments of `torch.compile`, None where the module is not compiled.
        is_channels_last: Whether weights and inputs of four dimensions are laid out with the channels last.
        precision: Datatype of weights and floating-point inputs, None for the model's own.
        unpickles: Whether files may run code when they are read.
        class_name: Class of an eager module, "" for the only one.
    """

    is_optimized: bool = True
    uses_inference_mode: bool = True
    uses_cudnn: bool = True
    shares_weights: bool = False
    cleans_cache: bool = False
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    compile_options: Mapping[str, object] | None = None
    is_channels_last: bool = False
    precision: DataType | None = None
    unpickles: bool = False
    class_name: str = ""


class _Reader:
    """Reads parameters and collects problems."""

    def __init__(self, config: ModelConfig, settings: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._values = {
            key: (f"--backend-config pytorch,{key}", settings[key]) for key in PARAMETERS if key in settings
        }
        self._values |= {key: (f"parameters['{key}']", text) for key, text in config.parameters.items()}

    def text(self, key: str) -> str:
        return self._values.get(key, ("", ""))[1]

    def problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(self._values[key][0], message))

    def flag(self, key: str) -> bool | None:
        if key not in self._values:
            return None
        text = self.text(key).lower()
        if text not in _FLAGS:
            self.problem(key, f"expected true or false, got '{self.text(key)}'")
        return _FLAGS.get(text)

    def threads(self, keys: tuple[str, ...]) -> int:
        for key in keys:
            if key in self._values:
                text = self.text(key)
                if text.isascii() and text.isdigit():
                    return int(text)
                self.problem(key, f"expected a whole number of at least 0, got '{text}'")
        return 0

    def precision(self) -> DataType | None:
        text = self.text("PRECISION").lower() or "fp32"
        if text not in PRECISIONS:
            self.problem("PRECISION", f"expected one of {', '.join(PRECISIONS)}, got '{self.text('PRECISION')}'")
        return PRECISIONS.get(text)

    def compile_options(self) -> dict[str, object] | None:
        text = self.text(COMPILE)
        if not text:
            return None
        try:
            options = json.loads(text)
        except ValueError as error:
            self.problem(COMPILE, f"expected a JSON object, got '{text}': {error}")
            return None
        if not isinstance(options, dict):
            self.problem(COMPILE, f"expected a JSON object, got '{text}'")
            return None
        for name, value in options.items():
            if name not in COMPILE_OPTIONS:
                self.problem(COMPILE, f"unknown argument '{name}', expected one of {', '.join(COMPILE_OPTIONS)}")
            elif not isinstance(value, COMPILE_OPTIONS[name]):
                self.problem(COMPILE, f"'{name}': expected {COMPILE_OPTIONS[name].__name__}, got {value!r}")
        return None if options.pop("disable", False) else options


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[RunPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings.

    Args:
        config: The model's configuration; its parameters override the settings.
        settings: Settings of the backend (`--backend-config`); unknown ones are ignored.
    """
    reader = _Reader(config, settings)
    flags = {key: reader.flag(key) for key in _SWITCHES}
    plan = RunPlan(
        is_optimized=not flags["DISABLE_OPTIMIZED_EXECUTION"],
        uses_inference_mode=flags["INFERENCE_MODE"] is not False,
        uses_cudnn=not flags["DISABLE_CUDNN"],
        shares_weights=bool(flags["ENABLE_WEIGHT_SHARING"]),
        cleans_cache=bool(flags["ENABLE_CACHE_CLEANING"]),
        jit_executor=flags["ENABLE_JIT_EXECUTOR"],
        jit_profiling=flags["ENABLE_JIT_PROFILING"],
        intra_op_threads=reader.threads(_INTRA),
        inter_op_threads=reader.threads(_INTER),
        compile_options=reader.compile_options(),
        is_channels_last=bool(flags["CHANNELS_LAST"]),
        precision=reader.precision(),
        unpickles=bool(flags["ALLOW_UNPICKLING"]),
        class_name=reader.text("MODULE_CLASS"),
    )
    return plan, reader.problems
