"""Loads programs of `torch.export`: `model.pt2`."""

import io
import threading
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from charonia.archives import open_zip, read_entry
from charonia.core.errors import Code, invalid, unsupported
from charonia.server.backends.pytorch.archive import pickled_entries
from charonia.server.backends.pytorch.failures import plain_error, plain_text
from charonia.server.backends.pytorch.naming import Leaf, Slot, Template
from charonia.server.backends.pytorch.naming import Path as LeafPath
from charonia.server.backends.pytorch.options import RunPlan
from charonia.server.backends.pytorch.program import Leaves, Program, compiled

_reading = threading.Lock()
"""`torch.export.load` is not thread-safe."""


def read(path: Path, *, unpickles: bool) -> Any:
    """Read an exported program; its weights are on the CPU.

    Args:
        path: The file.
        unpickles: Whether its pickles may run code.

    Raises:
        ServingError: INVALID_ARG with the reason, e.g. an unknown operator.
    """
    if not unpickles:
        _check_pickles(path)
    try:
        with _reading:
            return torch.export.load(path)
    except Exception as error:  # PyTorch's errors have no common base class
        refused = plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG)
        refused.hint = f"was it exported with another version of PyTorch? This is {torch.__version__}"
        raise refused from error


def _check_pickles(path: Path) -> None:
    """Refuse pickles that hold more than tensors: they could run code."""
    with open_zip(path) as archive:
        for name in pickled_entries(path):
            try:
                torch.load(
                    io.BytesIO(read_entry(archive, name, path.stat().st_size)), map_location="meta", weights_only=True
                )
            except Exception as error:  # a pickle may raise anything
                raise invalid(
                    f"{path.name}: {name} in it may run code when it is read: {plain_text(error)}",
                    hint="if you trust its source, set the parameter ALLOW_UNPICKLING to true",
                ) from error


def load(path: Path, device: torch.device | None, plan: RunPlan) -> Program:
    """Load an exported program. Raises ServingError."""
    for parameter, is_given in (("PRECISION", plan.precision is not None), ("CHANNELS_LAST", plan.is_channels_last)):
        if is_given:
            raise unsupported(
                f"{parameter}: {path.name} is an exported program, whose datatypes and layouts are fixed",
                hint="export it with the weights and inputs that it is to run with",
            )
    program = read(path, unpickles=plan.unpickles)
    if device is not None and device.type != "cpu":
        program = move_to_device_pass(program, device)
    interface = interface_of(program)
    weights = (*program.state_dict.values(), *(t for t in program.constants.values() if isinstance(t, torch.Tensor)))
    module = program.module()
    call = compiled(module, plan) if plan.compile_options is not None else module
    return Program(call, interface, weights, device=device)


def interface_of(program: Any) -> Leaves:
    """Return the arguments of an exported program."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]
    leaves, template = leaves_of(program.call_spec.in_spec)
    known = []
    for leaf, node in zip(leaves, given, strict=True):
        value = node.meta.get("val")
        is_direct = len(leaf.path) == 2
        known.append(Leaf(leaf.path, node.name if is_direct else "", not isinstance(value, torch.Tensor)))
    constants = [None if leaf.is_constant else Slot(index) for index, leaf in enumerate(known)]
    for index, (leaf, node) in enumerate(zip(known, given, strict=True)):
        if leaf.is_constant:
            constants[index] = node.meta.get("val")
    args, kwargs = template.fill(constants)
    return Leaves(Template(tuple(args), kwargs), tuple(known))


def leaves_of(spec: Any) -> tuple[list[Leaf], Template]:
    """Return the leaves of the arguments that a tree specification describes, and the arguments with slots."""
    args, kwargs = pytree.tree_unflatten([Slot(index) for index in range(spec.num_leaves)], spec)
    found: dict[int, LeafPath] = {}
    for index, argument in enumerate(args):
        _walk(argument, ("ARGS", index), found)
    for key, argument in kwargs.items():
        _walk(argument, ("KWARGS", key), found)
    return [Leaf(found[index]) for index in sorted(found)], Template(tuple(args), kwargs)


def _walk(part: Any, path: LeafPath, found: dict[int, LeafPath]) -> None:
    if isinstance(part, Slot):
        found[part.index] = path
    elif isinstance(part, dict):
        for key, value in part.items():
            _walk(value, (*path, str(key)), found)
    else:
        for index, value in enumerate(part):
            _walk(value, (*path, index), found)
