"""`torch.compile`, as a configuration asks for it."""

import shutil
from typing import Any

import torch

from charonia.backends.pytorch.failures import plain_error
from charonia.backends.pytorch.options import COMPILE, RunPlan
from charonia.core.errors import Code, unsupported

_COMPILERS = ("g++", "clang++", "c++", "cl")


def compiled(module: torch.nn.Module, plan: RunPlan) -> Any:
    """Return what compiles the module when it is first called.

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
    except Exception as error:  # PyTorch's errors have no common base class of their own
        raise plain_error(f"{COMPILE}: torch.compile", error, Code.INVALID_ARG) from error
