"""Finds a model's file, loads it for a device, and infers its signature, from the file and from trial runs.

Kinds of files: TorchScript (`model.pt`), programs of `torch.export` and AOTInductor packages (`model.pt2`), and eager
modules (`runtime: "model.py"`), a class in the version's folder and a file of its weights.
"""

import importlib.util
import inspect
import io
import itertools
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from charonia.archives import open_zip, read_entry
from charonia.config.complete import Signature, SignatureTensor
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.install_hint import package_hint
from charonia.server.backends.api import ModelFiles
from charonia.server.backends.array_backend import named_path, no_file
from charonia.server.backends.pytorch.archive import (
    FileKind,
    aot_metadata,
    archive_names,
    file_kind,
    has_program,
    pickled_entries,
)
from charonia.server.backends.pytorch.naming import (
    Leaf,
    Leaves,
    Parameter,
    ParameterKind,
    Parameters,
    Slot,
    Template,
    bind_results,
    output_names,
    result_paths,
)
from charonia.server.backends.pytorch.naming import Path as LeafPath
from charonia.server.backends.pytorch.program import (
    EAGER_RUNTIME,
    PROTOCOL,
    TORCH,
    Program,
    RunPlan,
    compiled,
    plain_error,
    plain_text,
    weights_of,
)
from charonia.wire.example_inputs import filled

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


def load_torchscript(path: Path, device: torch.device | None, plan: RunPlan) -> Program:
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


_reading = threading.Lock()
"""`torch.export.load` is not thread-safe."""


def read_exported(path: Path, *, unpickles: bool) -> Any:
    """Read an exported program; its weights are on the CPU.

    Args:
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


def load_exported(path: Path, device: torch.device | None, plan: RunPlan) -> Program:
    """Load an exported program. Raises ServingError."""
    for parameter, is_given in (("PRECISION", plan.precision is not None), ("CHANNELS_LAST", plan.is_channels_last)):
        if is_given:
            raise unsupported(
                f"{parameter}: {path.name} is an exported program, whose datatypes and layouts are fixed",
                hint="export it with the weights and inputs that it is to run with",
            )
    program = read_exported(path, unpickles=plan.unpickles)
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
    inputs = placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]
    leaves, template = leaves_of(program.call_spec.in_spec)
    known = []
    for leaf, node in zip(leaves, inputs, strict=True):
        value = node.meta.get("val")
        is_direct = len(leaf.path) == 2
        known.append(Leaf(leaf.path, node.name if is_direct else "", not isinstance(value, torch.Tensor)))
    constants = [None if leaf.is_constant else Slot(index) for index, leaf in enumerate(known)]
    for index, (leaf, node) in enumerate(zip(known, inputs, strict=True)):
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


CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""Environment variable that makes compiled code check shapes: without it, a wrong shape reads out of bounds."""


def load_package(path: Path, device: torch.device | None, plan: RunPlan, runners: int = 1) -> Program:
    """Load a package.

    Args:
        path: The file.
        device: Device of its instance, None where the model decides.
        runners: Number of calls that may run concurrently.
    """
    for name, is_given in (
        ("PRECISION", plan.precision is not None),
        ("CHANNELS_LAST", plan.is_channels_last),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", plan.compile_options is not None),
    ):
        if is_given:
            raise unsupported(f"{name}: {path.name} is compiled already", hint="compile the package that way")
    _check_machine(path, device)
    os.environ.setdefault(CHECKS, "1")
    index = device.index if device is not None and device.index is not None else -1
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), "model", False, runners, index)
        in_spec, out_spec = (pytree.treespec_loads(text) for text in loader.get_call_spec())
    except Exception as error:  # PyTorch's errors have no common base class
        raise plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG) from error
    leaves, template = leaves_of(in_spec)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = pytree.tree_leaves((args, {key: kwargs[key] for key in template.kwargs}))
        return pytree.tree_unflatten(loader.boxed_run(flat), out_spec)

    # The weights are part of the compiled library.
    return Program(call, Leaves(template, tuple(leaves)), weight_bytes=path.stat().st_size, device=device)


def device_kind(path: Path) -> str:
    """Return the type of device that a package was compiled for, "cpu" or "cuda"; "" for unknown."""
    return aot_metadata(path).get("AOTI_DEVICE_KEY", "")


def _check_machine(path: Path, device: torch.device | None) -> None:
    about = aot_metadata(path)
    kind = about.get("AOTI_DEVICE_KEY", "")
    if device is not None and kind and kind != device.type:
        raise invalid(
            f"{path.name} was compiled for {kind}, its instance runs on {device.type}",
            hint="use instances of KIND_GPU" if kind == "cuda" else "use instances of KIND_CPU",
        )
    machine = about.get("AOTI_MACHINE", "")
    if machine and machine != platform.machine():
        raise invalid(f"{path.name} was compiled for {machine}, this machine is {platform.machine()}")


WEIGHTS = ("model.safetensors", "model.pt", "model.pth")
"""Files of weights, in search order."""

_numbers = itertools.count(1)
_importing = threading.Lock()


def load_eager(folder: Path, weights: Path | None, device: torch.device | None, plan: RunPlan) -> Program:
    """Create the module and load its weights.

    Args:
        weights: File of its weights, None for a module that initializes its own.
        device: Device that it runs on, None where the module decides.
    """
    module_class = _module_class(_import(folder), plan.class_name)
    try:
        module = module_class()
    except Exception as error:  # the model's own code
        raise _failed(f"{EAGER_RUNTIME}: {module_class.__name__}()", error) from error
    if weights is not None:
        state = _read_weights(weights, unpickles=plan.unpickles)
        try:
            module.load_state_dict(state)
        except Exception as error:  # PyTorch's errors have no common base class
            raise plain_error(f"{weights.name} does not fit {EAGER_RUNTIME}", error, Code.INVALID_ARG) from error
    module.eval()
    module.requires_grad_(False)
    if device is not None:
        module.to(device)
    if plan.precision is not None:
        module.to(TORCH[plan.precision])
    if plan.is_channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # PyTorch's types lack it
    parameters, takes_any = _parameters(module)
    call = compiled(module, plan) if plan.compile_options is not None else module
    return Program(call, Parameters(tuple(parameters), takes_any), weights_of(module), device=device)


def _import(folder: Path) -> ModuleType:
    """Run model.py. It may import modules beside it; another model may have different ones of the same names."""
    path = folder / EAGER_RUNTIME
    if not path.is_file():
        raise invalid(f"runtime {EAGER_RUNTIME}: there is no file {EAGER_RUNTIME} in the version's folder")
    name = f"charonia_pytorch_model_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise invalid(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    with _importing:
        before = set(sys.modules)
        sys.path.insert(0, str(folder))
        # Class creation looks up the module by its name.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # the model's own code
            del sys.modules[name]
            raise _failed(EAGER_RUNTIME, error) from error
        finally:
            sys.path.remove(str(folder))
            for other in set(sys.modules) - before - {name}:
                if str(getattr(sys.modules[other], "__file__", None) or "").startswith(f"{folder}/"):
                    del sys.modules[other]
    return module


def _module_class(module: ModuleType, name: str) -> type[torch.nn.Module]:
    """Return the class of the model: the named one, or the only one that the file defines itself."""
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == module.__name__
    }
    if name:
        found = getattr(module, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise invalid(f"MODULE_CLASS: {EAGER_RUNTIME} has no subclass of torch.nn.Module called '{name}'")
        return found
    # Submodules are classes, too, and nothing marks the outermost one: without a name, there may be only one class.
    if len(own) == 1:
        return next(iter(own.values()))
    if not own:
        raise invalid(f"{EAGER_RUNTIME} defines no subclass of torch.nn.Module")
    raise invalid(
        f"{EAGER_RUNTIME} defines several subclasses of torch.nn.Module: {', '.join(own)}",
        hint="say which one is the model: parameters { key: 'MODULE_CLASS' value: { string_value: '...' } }",
    )


def _read_weights(path: Path, *, unpickles: bool) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file  # only models that have such a file need it
        except ImportError:
            raise unsupported(f"{path.name}: safetensors is not installed", hint=package_hint("safetensors")) from None
        try:
            return load_file(path)
        except Exception as error:  # safetensors' errors have no common base class
            raise plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG) from error
    kind = file_kind(path)
    if kind is not FileKind.CHECKPOINT:
        raise invalid(
            f"{path.name} is {kind.value}, not the weights of {EAGER_RUNTIME}",
            hint=f"save module.state_dict() there, or remove runtime '{EAGER_RUNTIME}' to serve it as it is",
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=not unpickles)
    except Exception as error:  # a pickle may raise anything
        if unpickles:
            raise plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG) from error
        raise invalid(
            f"{path.name} holds more than weights, and may run code when it is read",
            hint="save module.state_dict() or a safetensors file; "
            "if you trust its source, set the parameter ALLOW_UNPICKLING to true",
        ) from error
    if isinstance(state, torch.nn.Module):
        return dict(state.state_dict())
    if not isinstance(state, dict):
        raise invalid(f"{path.name}: expected a dictionary of weights, got {type(state).__name__}")
    return state


def _parameters(module: torch.nn.Module) -> tuple[list[Parameter], bool]:
    """Return the arguments of `forward`, and whether it takes any other."""
    signature = inspect.signature(module.forward)
    return list(_named(signature)), any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _named(signature: inspect.Signature) -> Iterator[Parameter]:
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            note = parameter.annotation
            text = note if isinstance(note, str) else getattr(note, "__name__", "") + str(note)
            kind = ParameterKind.TENSOR
            if "dict" in text.lower() or "Mapping" in text:
                kind = ParameterKind.DICTIONARY
            elif "list[str]" in text.lower():
                kind = ParameterKind.STRINGS
            is_required = parameter.default is parameter.empty
            yield Parameter(parameter.name, kind, is_required, parameter.kind is parameter.KEYWORD_ONLY)


def _failed(what: str, error: Exception) -> ServingError:
    place = ""
    if isinstance(error, SyntaxError):
        place = f" (line {error.lineno})"
    return invalid(f"{what} failed: {type(error).__name__}: {plain_text(error)}{place}")


_SIZES = ((8, 12), (64, 96), (224, 256))
"""Sizes of a variable dimension in two trial runs, smallest first: some models need larger ones."""

_BATCHES = (2, 3)

_GUESSES = ((DataType.FP32, (1, 512)), (DataType.FP32, (1, 3, 224, 224)), (DataType.INT64, (1, 8)))
"""What tensors of which nothing is known may be: samples, a picture, tokens."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InferredSignature:
    """A signature, as far as it could be inferred.

    Attributes:
        signature: Inputs and outputs, None where they stay unknown.
        notes: A sentence for each thing that could not be inferred.
        guess: Inputs and outputs with which the model runs, where nothing says that they are meant; None for none.
    """

    signature: Signature | None
    notes: tuple[str, ...] = ()
    guess: Signature | None = None


def of_exported(
    program: Any, interface: Leaves, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
) -> InferredSignature:
    """Return the signature of an exported program, whose dynamic dimensions are variable.

    Args:
        inputs: Names that its inputs are to have, in the order of the configuration; none for its own.
        outputs: Likewise of its outputs; those that are not configured are left out then.

    Raises:
        ServingError: The names do not fit.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = placeholders[len(placeholders) - len(interface.leaves) :]
    chosen = dict(zip(interface.choose(inputs), inputs, strict=True)) if inputs else {}
    notes: list[str] = []
    takes: list[SignatureTensor] = []
    for index, (leaf, node) in enumerate(zip(interface.leaves, given, strict=True)):
        if not leaf.is_constant:
            takes += _tensors("input", chosen.get(index) or leaf.name or leaf.place, node.meta["val"], notes)
    [returned] = [node for node in program.graph.nodes if node.op == "output"]
    kept = returned.args[0][-len(program.graph_signature.user_outputs) :]
    spec = program.call_spec.out_spec
    shaped = torch.utils._pytree.tree_unflatten([_ResultPlaceholder(node) for node in kept], spec)
    paths = result_paths(shaped)
    names = output_names(paths)
    places = bind_results(outputs, paths) if outputs else range(len(names))
    gives: list[SignatureTensor] = []
    for name, place in zip(outputs or names, places, strict=True):
        node = kept[place]
        gives += _tensors("output", name, node.meta["val"] if isinstance(node, torch.fx.Node) else node, notes)
    return InferredSignature(Signature(tuple(takes), tuple(gives)), tuple(notes))


class _ResultPlaceholder:
    """Placeholder of a result while the names of results are inferred."""

    def __init__(self, node: object) -> None:
        self.node = node


def _tensors(kind: str, name: str, value: Any, notes: list[str]) -> Iterator[SignatureTensor]:
    if not isinstance(value, torch.Tensor) or value.dtype not in PROTOCOL:
        what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        notes.append(f"{kind} '{name}': left out, as {what} cannot be sent")
        return
    yield SignatureTensor(name, PROTOCOL[value.dtype], tuple(d if isinstance(d, int) else -1 for d in value.shape))


def of_torchscript(path: Path, program: Program) -> InferredSignature:
    """Return the signature of a TorchScript file.

    Its schema has the names. Shapes and datatypes come from the inputs that it was traced with, where they were saved,
    else from the first operators that use an input. A trial run verifies them, and shows the outputs.
    """
    has_shapes = "traced_inputs.pkl" in (archive_names(path) or ())
    module = load_module(path, torch.device("cpu"), restores_shapes=has_shapes)
    parameters = [p for p in parameters_of(module) if p.is_required]
    strange = [p.name for p in parameters if p.kind is not ParameterKind.TENSOR]
    if strange or not parameters:
        arguments = ", ".join(f"{p.name} ({p.kind.value})" for p in parameters) or "none that is a tensor"
        note = f"inputs: could not be inferred; the arguments are {arguments}"
        return InferredSignature(None, (note,), _guessed(program, parameters, numbers_of(module)))
    shapes = {name.split(".")[0]: shape for name, shape in _traced(module)}
    is_traced = len(shapes) == len(parameters)
    if not is_traced:
        shapes |= _used(module)
    unknown = [p.name for p in parameters if p.name not in shapes]
    if unknown:
        names = ", ".join(f"'{name}'" for name in unknown)
        note = f"inputs: could not be inferred, as nothing tells datatype and dims of {names}"
        return InferredSignature(None, (note,), _guessed(program, parameters, {}))
    inputs = [SignatureTensor(p.name, *shapes[p.name]) for p in parameters]
    if is_traced:
        free = [replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in inputs if tensor.shape]
        batch = {tensor.shape[:1] for tensor in inputs}
        found = try_outputs(program, free) if len(free) == len(inputs) and len(batch) == 1 else InferredSignature(None)
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
        graph = torch.jit.freeze(module, preserved_attrs=changed_attributes(module)).graph
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


def try_outputs(program: Program, inputs: Sequence[SignatureTensor]) -> InferredSignature:
    """Return the signature that two trial runs on zeros show: dimensions that differ are variable.

    Args:
        inputs: Its inputs; a variable first dimension of all is the batch.
    """
    if any(tensor.datatype is DataType.BYTES for tensor in inputs):
        return InferredSignature(
            None, ("outputs: could not be inferred, as there is no telling which strings the model takes",)
        )
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
    return InferredSignature(None, (f"outputs: could not be inferred, as a trial run on zeros failed: {problem}",))


def _guessed(program: Program, parameters: Sequence[Parameter], numbers: Mapping[str, DataType]) -> Signature | None:
    """Return inputs and outputs with which a model runs, None where no guess succeeds."""
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


def _compared(inputs: Sequence[SignatureTensor], runs: Sequence[Any]) -> InferredSignature:
    notes: list[str] = []
    outputs = []
    names = output_names(result_paths(runs[0]))
    one, other = (torch.utils._pytree.tree_leaves(run) for run in runs)
    if len(one) != len(other) or len(one) != len(names):
        return InferredSignature(None, ("outputs: could not be inferred, as their number varies",))
    for name, first, second in zip(names, one, other, strict=True):
        for tensor in _tensors("output", name, first, notes):
            varied = tuple(-1 if a != b else a for a, b in zip(first.shape, second.shape, strict=True))
            outputs.append(replace(tensor, shape=varied))
    return InferredSignature(Signature(tuple(inputs), tuple(outputs)), tuple(notes))


FILES = ("model.pt", "model.pt2")
"""File names tried where the configuration has none."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model.

    Attributes:
        path: The model's file; for an eager module its weights, None if it initializes its own.
        kind: Kind of the file, None for an eager module.
    """

    folder: Path
    path: Path | None
    kind: FileKind | None

    def open(self, device: torch.device | None, plan: RunPlan, runners: int = 1) -> Program:
        """Load the model.

        Args:
            device: Device to run on, None where the model decides.
            runners: Number of calls that may run concurrently.
        """
        if self.kind is None or self.path is None:
            return load_eager(self.folder, self.path, device, plan)
        if self.kind is FileKind.TORCHSCRIPT:
            return load_torchscript(self.path, device, plan)
        if self.kind is FileKind.EXPORTED:
            return load_exported(self.path, device, plan)
        return load_package(self.path, device, plan, runners)

    def inspect(self, config: ModelConfig, plan: RunPlan) -> InferredSignature:
        plan = replace(plan, precision=None, is_channels_last=False, compile_options=None, shares_weights=False)
        signature = self.signature(plan)
        if signature is not None:
            return signature
        configured = _configured_inputs(config)
        if self.kind is None and not configured:
            return InferredSignature(
                None, ("inputs: could not be inferred, as a module in Python does not say what it takes",)
            )
        program = self.open(None if self.kind is FileKind.AOT_INDUCTOR else torch.device("cpu"), plan)
        if isinstance(program.interface, Leaves):
            places = ", ".join(leaf.place for leaf in program.interface.leaves)
            return InferredSignature(
                None, (f"inputs: datatypes and dims could not be inferred; the package takes {places}",)
            )
        if configured or self.path is None:
            return try_outputs(program, configured)
        return of_torchscript(self.path, program)

    def signature(
        self, plan: RunPlan, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> InferredSignature | None:
        """Return the signature that was exported with the model, None where there is none.

        Args:
            inputs: Names of its inputs in the configuration, none for its own.
            outputs: Likewise of its outputs.
        """
        is_exported = self.kind is FileKind.EXPORTED
        if self.path is None or not (is_exported or (self.kind is FileKind.AOT_INDUCTOR and has_program(self.path))):
            return None
        program = read_exported(self.path, unpickles=plan.unpickles)
        return of_exported(program, interface_of(program), inputs, outputs)


def find_source(files: ModelFiles, config: ModelConfig) -> Source:
    """Return the files of a model. Raises ServingError: INVALID_ARG when the file is missing, or is not a model."""
    folder = files.version_dir
    if config.runtime == EAGER_RUNTIME:
        return Source(folder, _weights(files, config), None)
    path = named_path(files, config, next((file for file in FILES if (folder / file).is_file()), FILES[0]))
    if not path.is_file():
        defines = (folder / EAGER_RUNTIME).is_file()
        hint = f"runtime: '{EAGER_RUNTIME}' serves the module that {EAGER_RUNTIME} defines"
        raise no_file(files, config, path, hint=hint if defines else "")
    kind = file_kind(path)
    if kind is FileKind.CHECKPOINT:
        raise invalid(
            f"{path.name} is {kind.value}, which does not hold the model's code",
            hint=f"give its class in {EAGER_RUNTIME}, with runtime: '{EAGER_RUNTIME}', or use torch.export.save",
        )
    return Source(folder, path, kind)


def _weights(files: ModelFiles, config: ModelConfig) -> Path | None:
    # Default names of other kinds of models are ignored.
    if config.default_model_filename not in ("", *FILES, EAGER_RUNTIME):
        path = named_path(files, config, "")
        if not path.is_file():
            raise no_file(files, config, path)
        return path
    return next((p for file in WEIGHTS if (p := files.version_dir / file).is_file()), None)


def _configured_inputs(config: ModelConfig) -> list[SignatureTensor]:
    """Return the configured inputs as the model gets them, [] where one has no datatype."""
    lead = (-1,) if config.max_batch_size > 0 else ()
    tensors = []
    for tensor in config.input:
        if tensor.data_type is None:
            return []
        tensors.append(SignatureTensor(tensor.name, tensor.data_type, (*lead, *tensor.inner_dims), tensor.optional))
    return tensors
