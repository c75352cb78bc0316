"""Loads AOTInductor packages: `model.pt2` with compiled code. This needs no compiler."""

import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from charonia.core.errors import Code, invalid, unsupported
from charonia.server.backends.pytorch.archive import aot_metadata
from charonia.server.backends.pytorch.exported import leaves_of
from charonia.server.backends.pytorch.failures import plain_error
from charonia.server.backends.pytorch.options import RunPlan
from charonia.server.backends.pytorch.program import Leaves, Program

CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""Environment variable that makes compiled code check shapes: without it, a wrong shape reads out of bounds."""


def load(path: Path, device: torch.device | None, plan: RunPlan, runners: int = 1) -> Program:
    """Load a package.

    Args:
        path: The file.
        device: Device of its instance, None where the model decides.
        plan: Options of its run.
        runners: Number of calls that may run concurrently.

    Raises:
        ServingError: With the reason, e.g. code for another processor or device.
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
