"""Small models of PyTorch in each of its formats, for tests. Their weights are the same every time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

INPUTS = 16
OUTPUTS = 4


class Perceptron(nn.Module):
    """FP32 [batch, 16] to FP32 [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.hidden = nn.Linear(INPUTS, 32)
        self.out = nn.Linear(32, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two layers with a ramp between."""
        result: torch.Tensor = self.out(torch.relu(self.hidden(x)))
        return result


class Nested(nn.Module):
    """Arguments and results in containers: x [batch, 4], options {"bias": [batch, 1]}, keyword scale [batch, 1]."""

    def forward(
        self, x: torch.Tensor, options: dict[str, torch.Tensor], *, scale: torch.Tensor
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """Return {"sum": [batch, 4], "parts": ([batch], [batch, 1])}."""
        return {"sum": x * scale + options["bias"], "parts": (x.sum(-1), options["bias"] + 0)}


PERCEPTRON_SOURCE = """
import torch
from torch import nn


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))
"""
"""`model.py` of the perceptron."""


def folder_of(model_dir: Path) -> Path:
    """Make the folder of version 1 of a model and return it."""
    folder = model_dir / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_traced(module: nn.Module, arguments: tuple[torch.Tensor, ...], model_dir: Path) -> Path:
    return _save(lambda: torch.jit.trace(module.eval(), arguments), model_dir)  # type: ignore[no-untyped-call]


def save_scripted(module: nn.Module, model_dir: Path) -> Path:
    """Save a module as TorchScript, compiled from its source."""
    return _save(lambda: torch.jit.script(module.eval()), model_dir)


def _save(make: Callable[[], torch.nn.Module], model_dir: Path) -> Path:
    path = folder_of(model_dir) / "model.pt"
    torch.jit.save(make(), path)
    return path


def save_exported(module: nn.Module, arguments: tuple[object, ...], dynamic: tuple[Any, ...], model_dir: Path) -> Path:
    """Save a module as a program of `torch.export`.

    Args:
        dynamic: Its dimensions that vary, as `torch.export.export` takes them.
    """
    path = folder_of(model_dir) / "model.pt2"
    program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return path


def exported_perceptron(model_dir: Path) -> Path:
    """Save the perceptron as an exported program that takes any batch."""
    return save_exported(Perceptron(), (torch.zeros(2, INPUTS),), ({0: torch.export.Dim("batch")},), model_dir)


def eager_perceptron(model_dir: Path) -> Path:
    """Write the perceptron as a module in Python with its weights; returns the file of the weights."""
    folder = folder_of(model_dir)
    (folder / "model.py").write_text(PERCEPTRON_SOURCE, encoding="utf-8")
    torch.save(Perceptron().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def compile_package(model_dir: Path) -> Path:
    """Compile the perceptron with AOTInductor, for the CPU; needs a C++ compiler and some 10 seconds."""
    program = torch.export.load(exported_perceptron(model_dir))
    path = model_dir / "1" / "model.pt2"
    # Without programs that try instructions of the processor, and without optimising what runs a few times.
    quick: dict[str, object] = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    quick |= {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=quick)
    return path
