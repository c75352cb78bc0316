"""Infers the signature of a model, from its file and from trial runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from charonia.config.complete import Signature, SignatureTensor
from charonia.core.dtypes import DataType
from charonia.server.backends.pytorch import torchscript
from charonia.server.backends.pytorch.archive import archive_names
from charonia.server.backends.pytorch.failures import plain_text
from charonia.server.backends.pytorch.naming import (
    Parameter,
    ParameterKind,
    bind_results,
    choose_leaves,
    output_names,
    result_paths,
)
from charonia.server.backends.pytorch.program import PROTOCOL, TORCH, Leaves, Program
from charonia.wire.example_inputs import filled

_SIZES = ((8, 12), (64, 96), (224, 256))
"""Sizes of a variable dimension in two trial runs, smallest first: some models need larger ones."""

_BATCHES = (2, 3)

_GUESSES = ((DataType.FP32, (1, 512)), (DataType.FP32, (1, 3, 224, 224)), (DataType.INT64, (1, 8)))
"""What tensors of which nothing is known may be: samples, a picture, tokens."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A signature, as far as it could be inferred.

    Attributes:
        signature: Inputs and outputs, None where they stay unknown.
        notes: A sentence for each thing that could not be inferred.
        guess: Inputs and outputs with which the model runs, where nothing says that they are meant; None for none.
    """

    signature: Signature | None
    notes: tuple[str, ...] = ()
    guess: Signature | None = None


def of_exported(program: Any, interface: Leaves, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Found:
    """Return the signature of an exported program, whose dynamic dimensions are variable.

    Args:
        program: The program.
        interface: Its arguments.
        inputs: Names that its inputs are to have, in the order of the configuration; none for its own.
        outputs: Likewise of its outputs; those that are not configured are left out then.

    Raises:
        ServingError: The names do not fit.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = placeholders[len(placeholders) - len(interface.leaves) :]
    chosen = dict(zip(choose_leaves(inputs, interface.leaves), inputs, strict=True)) if inputs else {}
    notes: list[str] = []
    takes: list[SignatureTensor] = []
    for index, (leaf, node) in enumerate(zip(interface.leaves, given, strict=True)):
        if not leaf.is_constant:
            takes += _tensors("input", chosen.get(index) or leaf.name or leaf.place, node.meta["val"], notes)
    [returned] = [node for node in program.graph.nodes if node.op == "output"]
    kept = returned.args[0][-len(program.graph_signature.user_outputs) :]
    spec = program.call_spec.out_spec
    shaped = torch.utils._pytree.tree_unflatten([_Named(node) for node in kept], spec)
    paths = result_paths(shaped)
    names = output_names(paths)
    places = bind_results(outputs, paths) if outputs else range(len(names))
    gives: list[SignatureTensor] = []
    for name, place in zip(outputs or names, places, strict=True):
        node = kept[place]
        gives += _tensors("output", name, node.meta["val"] if isinstance(node, torch.fx.Node) else node, notes)
    return Found(Signature(tuple(takes), tuple(gives)), tuple(notes))


class _Named:
    """Placeholder of a result while the names of results are inferred."""

    def __init__(self, node: object) -> None:
        self.node = node


def _tensors(kind: str, name: str, value: Any, notes: list[str]) -> Iterator[SignatureTensor]:
    if not isinstance(value, torch.Tensor) or value.dtype not in PROTOCOL:
        what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        notes.append(f"{kind} '{name}': left out, as {what} cannot be sent")
        return
    yield SignatureTensor(name, PROTOCOL[value.dtype], tuple(d if isinstance(d, int) else -1 for d in value.shape))


def of_torchscript(path: Path, program: Program) -> Found:
    """Return the signature of a TorchScript file.

    Its schema has the names. Shapes and datatypes come from the inputs that it was traced with, where they were saved,
    else from the first operators that use an input. A trial run verifies them, and shows the outputs.
    """
    has_shapes = "traced_inputs.pkl" in (archive_names(path) or ())
    module = torchscript.load_module(path, torch.device("cpu"), restores_shapes=has_shapes)
    parameters = [p for p in torchscript.parameters_of(module) if p.is_required]
    strange = [p.name for p in parameters if p.kind is not ParameterKind.TENSOR]
    if strange or not parameters:
        arguments = ", ".join(f"{p.name} ({p.kind.value})" for p in parameters) or "none that is a tensor"
        note = f"inputs: could not be inferred; the arguments are {arguments}"
        return Found(None, (note,), _guessed(program, parameters, torchscript.numbers_of(module)))
    shapes = {name.split(".")[0]: shape for name, shape in _traced(module)}
    is_traced = len(shapes) == len(parameters)
    if not is_traced:
        shapes |= _used(module)
    unknown = [p.name for p in parameters if p.name not in shapes]
    if unknown:
        names = ", ".join(f"'{name}'" for name in unknown)
        note = f"inputs: could not be inferred, as nothing tells datatype and dims of {names}"
        return Found(None, (note,), _guessed(program, parameters, {}))
    inputs = [SignatureTensor(p.name, *shapes[p.name]) for p in parameters]
    if is_traced:
        free = [replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in inputs if tensor.shape]
        batch = {tensor.shape[:1] for tensor in inputs}
        found = try_outputs(program, free) if len(free) == len(inputs) and len(batch) == 1 else Found(None)
        if found.signature is not None and not found.signature.fixed:
            return found
        return try_outputs(program, inputs)
    return try_outputs(program, inputs)


def _traced(module: Any) -> Iterator[tuple[str, tuple[DataType, Shape]]]:
    for value in list(module.graph.inputs())[1:]:
        kind = value.type()
        if kind.kind() == "TensorType" and kind.sizes() is not None and kind.dtype() in PROTOCOL:
            yield value.debugName(), (PROTOCOL[kind.dtype()], tuple(kind.sizes()))


def _used(module: Any) -> dict[str, tuple[DataType, Shape]]:
    """Return datatypes and shapes that the first operator of an input implies: weights have the number of channels."""
    try:
        graph = torch.jit.freeze(module, preserved_attrs=torchscript.changed_attributes(module)).graph
    except RuntimeError:  # models that cannot be frozen, such as those with several methods of one name
        return {}
    names = {value.debugName().split(".")[0]: value for value in list(graph.inputs())[1:]}
    found: dict[str, tuple[DataType, Shape]] = {}
    for name, value in names.items():
        for use in value.uses():
            shape = _operand(use.user, value)
            if shape is not None:
                found[name] = shape
                break
    return found


def _operand(node: Any, value: Any) -> tuple[DataType, Shape] | None:
    """Return datatype and shape of the input `value` of an operator, None where it does not imply them."""
    inputs = list(node.inputs())
    kind = node.kind()
    if kind == "aten::embedding" and inputs[1].debugName() == value.debugName():
        return DataType.INT64, (-1, -1)
    if len(inputs) < 2 or inputs[0].debugName() != value.debugName():
        return None
    weight = inputs[1].toIValue() if inputs[1].node().kind() == "prim::Constant" else None
    if not isinstance(weight, torch.Tensor) or weight.dtype not in PROTOCOL:
        return None
    if kind == "aten::linear":
        return PROTOCOL[weight.dtype], (-1, weight.shape[1])
    if kind in ("aten::conv1d", "aten::conv2d", "aten::conv3d"):
        groups = inputs[6].toIValue()
        free = (-1,) * (weight.dim() - 2)
        return PROTOCOL[weight.dtype], (-1, weight.shape[1] * (groups if isinstance(groups, int) else 1), *free)
    return None


def try_outputs(program: Program, inputs: Sequence[SignatureTensor]) -> Found:
    """Return the signature that two trial runs on zeros show: dimensions that differ are variable.

    Args:
        program: The model.
        inputs: Its inputs; a variable first dimension of all is the batch.
    """
    if any(tensor.datatype is DataType.BYTES for tensor in inputs):
        return Found(None, ("outputs: could not be inferred, as there is no telling which strings the model takes",))
    names = [tensor.name for tensor in inputs]
    problem = ""
    has_free = any(-1 in tensor.shape[1:] for tensor in inputs)
    for sizes in _SIZES if has_free else _SIZES[:1]:
        try:
            template = program.interface.bind(names)
            runs = []
            for batch, size in zip(_BATCHES, sizes, strict=True):
                args, kwargs = template.fill([_zeros(tensor, batch, size) for tensor in inputs])
                with torch.inference_mode():
                    runs.append(program.call(*args, **kwargs))
            return _compared(inputs, runs)
        except Exception as error:  # zeros are not valid inputs of every model
            problem = problem or plain_text(error)
    return Found(None, (f"outputs: could not be inferred, as a trial run on zeros failed: {problem}",))


def _guessed(program: Program, parameters: Sequence[Parameter], numbers: Mapping[str, DataType]) -> Signature | None:
    """Return inputs and outputs with which a model runs, None where no guess succeeds.

    Args:
        program: The model.
        parameters: Its arguments.
        numbers: Datatypes of those that are numbers.
    """
    names = [parameter.name for parameter in parameters]
    for datatype, shape in _GUESSES:
        inputs = [
            SignatureTensor(name, numbers.get(name, datatype), (1,) if name in numbers else shape) for name in names
        ]
        arrays = [filled(tensor.shape, tensor.datatype, tensor.name) for tensor in inputs]
        values = [a.item() if n in numbers else torch.from_numpy(a) for n, a in zip(names, arrays, strict=True)]
        try:
            args, kwargs = program.interface.bind(names).fill(values)
            with torch.inference_mode():
                run = program.call(*args, **kwargs)
            return _compared(inputs, [run, run]).signature
        except Exception:  # a guess that is wrong
            continue
    return None


def _zeros(tensor: SignatureTensor, batch: int, size: int) -> torch.Tensor:
    shape = [batch if i == 0 and d == -1 else size if d == -1 else d for i, d in enumerate(tensor.shape)]
    return torch.zeros(shape, dtype=TORCH[tensor.datatype])


def _compared(inputs: Sequence[SignatureTensor], runs: Sequence[Any]) -> Found:
    notes: list[str] = []
    outputs = []
    names = output_names(result_paths(runs[0]))
    one, other = (torch.utils._pytree.tree_leaves(run) for run in runs)
    if len(one) != len(other) or len(one) != len(names):
        return Found(None, ("outputs: could not be inferred, as their number varies",))
    for name, first, second in zip(names, one, other, strict=True):
        for tensor in _tensors("output", name, first, notes):
            varied = tuple(-1 if a != b else a for a, b in zip(first.shape, second.shape, strict=True))
            outputs.append(replace(tensor, shape=varied))
    return Found(Signature(tuple(inputs), tuple(outputs)), tuple(notes))
