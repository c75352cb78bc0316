"""A model in memory, independent of its file's kind: a callable, its arguments and its weights.

Also the datatypes of PyTorch and of the protocol, and `torch.compile` as a configuration requests it.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, unsupported
from charonia.server.backends.pytorch.failures import plain_error
from charonia.server.backends.pytorch.naming import Leaf, Parameter, Template, bind_leaves, bind_parameters
from charonia.server.backends.pytorch.options import COMPILE, RunPlan

TORCH: dict[DataType, torch.dtype] = {
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32,
    DataType.UINT64: torch.uint64,
    DataType.INT8: torch.int8,
    DataType.INT16: torch.int16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.FP16: torch.float16,
    DataType.FP32: torch.float32,
    DataType.FP64: torch.float64,
    DataType.BF16: torch.bfloat16,
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
class Parameters:
    """Arguments of which only the names are known.

    Attributes:
        parameters: Each of them.
        takes_any: Whether the model also takes `**kwargs`.
    """

    parameters: tuple[Parameter, ...]
    takes_any: bool = False

    def bind(self, names: Sequence[str]) -> Template:
        """Return how to call the model with inputs of these names. Raises ServingError."""
        return bind_parameters(names, self.parameters, takes_any=self.takes_any)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Arguments whose structure was fixed when the model was exported.

    Attributes:
        template: The arguments, with slots that count the leaves.
        leaves: What is known of each leaf.
    """

    template: Template
    leaves: tuple[Leaf, ...]

    def bind(self, names: Sequence[str]) -> Template:
        return bind_leaves(names, self.template, self.leaves)


@dataclass(frozen=True, slots=True)
class Program:
    """A model in memory.

    Attributes:
        call: Runs it.
        interface: Its arguments.
        weights: Its parameters and buffers.
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
