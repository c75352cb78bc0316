"""A model in memory, whatever file it came from: something to call and what is known about calling it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from charonia.backends.pytorch.naming import Leaf, Parameter, Template, bind_leaves, bind_parameters


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments that are known by name only.

    Attributes:
        parameters: Each of them.
        takes_any: Whether the model also takes arguments of any name.
    """

    parameters: tuple[Parameter, ...]
    takes_any: bool = False

    def bind(self, names: Sequence[str]) -> Template:
        """Return how to call the model with inputs of these names. Raises ServingError."""
        return bind_parameters(names, self.parameters, takes_any=self.takes_any)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Arguments whose shape was fixed when the model was exported.

    Attributes:
        template: The arguments, with slots that count the leaves.
        leaves: What is known of each leaf.
    """

    template: Template
    leaves: tuple[Leaf, ...]

    def bind(self, names: Sequence[str]) -> Template:
        """Return how to call the model with inputs of these names. Raises ServingError."""
        return bind_leaves(names, self.template, self.leaves)


@dataclass(frozen=True, slots=True)
class Program:
    """A model in memory.

    Attributes:
        call: Runs it.
        interface: Its arguments.
        weights: Its parameters and buffers.
        weight_bytes: Memory that they take, where `weights` are out of reach.
        device: Where it runs, None for where its own weights are.
    """

    call: Callable[..., Any]
    interface: Parameters | Leaves
    weights: tuple[torch.Tensor, ...] = ()
    weight_bytes: int = 0
    device: torch.device | None = None
    storages: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        # What the model returns of its own weights must be copied: a later call may change it.
        addresses = (tensor.untyped_storage().data_ptr() for tensor in self.weights)
        object.__setattr__(self, "storages", frozenset(address for address in addresses if address))

    def memory_bytes(self) -> int:
        """Return the memory of the weights; what they share counts once."""
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.weights}
        return sum(sizes.values()) + self.weight_bytes


def weights_of(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the parameters and buffers of a module."""
    return (*module.parameters(), *module.buffers())
