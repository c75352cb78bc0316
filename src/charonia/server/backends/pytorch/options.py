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
from charonia.server.backends.parameters import Param, Params

EAGER_RUNTIME = "model.py"
"""`runtime` of a module whose Python source lies in the version's folder."""

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


# fmt: off
PARAMETERS = Params(
    "pytorch",
    Param("INFERENCE_MODE", "run in `torch.inference_mode`; `false`: only without gradients", bool, True),
    Param("ENABLE_WEIGHT_SHARING", "the instances of one device share one copy of the weights; refused for TorchScript "
          "that sets its attributes", bool, False),
    Param("INTRA_OP_THREAD_COUNT", "threads of one operator", int, 0, "the instance's share of the cores", ge=0,
          also="NUM_THREADS"),
    Param("INTER_OP_THREAD_COUNT", "threads across operators, for the whole server: the first model decides", int, 0,
          "1", ge=0, also="NUM_INTEROP_THREADS"),
    Param("DISABLE_OPTIMIZED_EXECUTION", "do not optimise TorchScript while it runs", bool, False),
    Param("ENABLE_JIT_EXECUTOR", "TorchScript's profiling executor, for the whole server", bool, None, "PyTorch's"),
    Param("ENABLE_JIT_PROFILING", "whether it profiles, for the whole server", bool, None, "PyTorch's"),
    Param(COMPILE, 'compile with `torch.compile`; JSON of its arguments: `{}`, `{"dynamic": true, "mode": '
          '"max-autotune"}`; `{"disable": true}` does not', _compile_options, None, "none"),
    Param("DISABLE_CUDNN", "no cuDNN, for the whole server", bool, False),
    Param("ENABLE_CACHE_CLEANING", "return cached GPU memory after every batch; slow", bool, False),
    Param("PRECISION", "`bf16` or `fp16`: convert weights and floating-point inputs, and convert outputs back "
          "(TorchScript, `model.py`)", PRECISIONS, None, "`fp32`"),
    Param("CHANNELS_LAST", "use the channels-last layout for weights and inputs of four dimensions (TorchScript, "
          "`model.py`)", bool, False),
    Param("ALLOW_UNPICKLING", "files may run code while they are read", bool, False),
    Param("MODULE_CLASS", "the class in `model.py`", str, "", "none"),
    settings=None,
)
# fmt: on
"""Every parameter. Each may also be given for all models: `--backend-config=pytorch,NAME=VALUE`."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The values of `PARAMETERS`; 0 and None leave the choice to the server or to PyTorch.

    Attributes:
        compile_options: Arguments of `torch.compile`, None where the module is not compiled.
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


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[RunPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings."""
    values = PARAMETERS.values(config, settings)
    plan = RunPlan(
        is_optimized=not values["DISABLE_OPTIMIZED_EXECUTION"],
        uses_inference_mode=values["INFERENCE_MODE"],
        uses_cudnn=not values["DISABLE_CUDNN"],
        shares_weights=values["ENABLE_WEIGHT_SHARING"],
        cleans_cache=values["ENABLE_CACHE_CLEANING"],
        jit_executor=values["ENABLE_JIT_EXECUTOR"],
        jit_profiling=values["ENABLE_JIT_PROFILING"],
        intra_op_threads=values["INTRA_OP_THREAD_COUNT"],
        inter_op_threads=values["INTER_OP_THREAD_COUNT"],
        compile_options=values[COMPILE],
        is_channels_last=values["CHANNELS_LAST"],
        precision=values["PRECISION"],
        unpickles=values["ALLOW_UNPICKLING"],
        class_name=values["MODULE_CLASS"],
    )
    return plan, values.problems
