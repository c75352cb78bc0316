"""Loads eager modules: `runtime: "model.py"`, a class in the version's folder and a file of its weights."""

import importlib.util
import inspect
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.install_hint import package_hint
from charonia.server.backends.pytorch.archive import FileKind, file_kind
from charonia.server.backends.pytorch.failures import plain_error, plain_text
from charonia.server.backends.pytorch.naming import Parameter, ParameterKind
from charonia.server.backends.pytorch.options import EAGER_RUNTIME, RunPlan
from charonia.server.backends.pytorch.program import TORCH, Parameters, Program, compiled, weights_of

WEIGHTS = ("model.safetensors", "model.pt", "model.pth")
"""Files of weights, in search order."""

_numbers = itertools.count(1)
_importing = threading.Lock()


def load(folder: Path, weights: Path | None, device: torch.device | None, plan: RunPlan) -> Program:
    """Create the module and load its weights.

    Args:
        folder: The version's folder.
        weights: File of its weights, None for a module that initializes its own.
        device: Device that it runs on, None where the module decides.
        plan: Options of its run.

    Raises:
        ServingError: INVALID_ARG with the reason.
    """
    module_class = _module_class(_import(folder), plan.class_name)
    try:
        module = module_class()
    except Exception as error:  # the model's own code
        raise _failed(f"{EAGER_RUNTIME}: {module_class.__name__}()", error) from error
    if weights is not None:
        _take_weights(module, weights, unpickles=plan.unpickles)
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


def _take_weights(module: torch.nn.Module, path: Path, *, unpickles: bool) -> None:
    state = _read_weights(path, unpickles=unpickles)
    try:
        module.load_state_dict(state)
    except Exception as error:  # PyTorch's errors have no common base class
        raise plain_error(f"{path.name} does not fit {EAGER_RUNTIME}", error, Code.INVALID_ARG) from error


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
