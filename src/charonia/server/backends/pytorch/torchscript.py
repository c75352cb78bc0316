"""Loads models in TorchScript format (`model.pt`) and reads the parameters of their `forward`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, invalid
from charonia.server.backends.pytorch.failures import plain_error
from charonia.server.backends.pytorch.naming import Parameter, ParameterKind
from charonia.server.backends.pytorch.options import RunPlan
from charonia.server.backends.pytorch.program import TORCH, Parameters, Program, weights_of

_KINDS = {
    "Tensor": ParameterKind.TENSOR,
    "Optional[Tensor]": ParameterKind.TENSOR,
    "List[str]": ParameterKind.STRINGS,
    "Dict[str, Tensor]": ParameterKind.DICTIONARY,
    "int": ParameterKind.NUMBER,
    "float": ParameterKind.NUMBER,
    "bool": ParameterKind.NUMBER,
}

_NUMBERS = {"int": DataType.INT64, "float": DataType.FP64, "bool": DataType.BOOL}
"""Datatype of inputs for arguments that are numbers."""


def load_module(path: Path, device: torch.device | None, *, restores_shapes: bool = False) -> Any:
    """Read a TorchScript file.

    Args:
        path: The file.
        device: Device of its weights, None for the one they were saved from.
        restores_shapes: Whether its graph gets the shapes that it was traced with.

    Raises:
        ServingError: INVALID_ARG with the reason, e.g. an unknown operator.
    """
    try:
        module = torch.jit.load(  # type: ignore[no-untyped-call]
            path, map_location=device, _restore_shapes=restores_shapes
        )
    except Exception as error:  # PyTorch's errors have no common base class
        refused = plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG)
        if "Unknown builtin op" in str(error) or "Unknown type name" in str(error):
            refused.hint = "the model needs operators of another package, or a newer PyTorch"
        raise refused from error
    module.eval()
    return module


def load(path: Path, device: torch.device | None, plan: RunPlan) -> Program:
    """Load a TorchScript file. Raises ServingError."""
    module = load_module(path, device)
    if plan.compile_options is not None:
        raise invalid(f"{path.name} is TorchScript, which torch.compile does not take", hint="export the model instead")
    if plan.shares_weights and (names := changed_attributes(module)):
        raise invalid(
            f"ENABLE_WEIGHT_SHARING: the model changes its attribute '{names[0]}' while it runs",
            hint="only models without state can share their weights between instances",
        )
    if plan.precision is not None:
        module.to(TORCH[plan.precision])
    if plan.is_channels_last:
        module.to(memory_format=torch.channels_last)
    if plan.jit_executor is not None:
        torch._C._jit_set_profiling_executor(plan.jit_executor)
    if plan.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(plan.jit_profiling)
    return Program(
        _call(module, plan.is_optimized), Parameters(tuple(parameters_of(module))), weights_of(module), device=device
    )


def parameters_of(module: Any) -> Iterator[Parameter]:
    for argument in module.forward.schema.arguments[1:]:
        kind = _KINDS.get(str(argument.type), ParameterKind.OTHER)
        yield Parameter(argument.name, kind, not argument.has_default_value(), argument.kwarg_only)


def numbers_of(module: Any) -> dict[str, DataType]:
    """Return the datatype of each argument of `forward` that is a number."""
    arguments = module.forward.schema.arguments[1:]
    return {a.name: _NUMBERS[str(a.type)] for a in arguments if str(a.type) in _NUMBERS}


def changed_attributes(module: Any) -> list[str]:
    """Return the names of the attributes that the model sets while it runs."""
    graph = module.inlined_graph  # keeps its nodes alive
    return sorted({str(node.s("name")) for node in graph.findAllNodes("prim::SetAttr")})


def _call(module: Any, is_optimized: bool) -> Any:
    if is_optimized:
        return module

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.jit._fuser.optimized_execution(False):
            return module(*args, **kwargs)

    return call
