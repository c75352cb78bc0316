"""The forms that models are converted to. Each is made from a checked ONNX model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from charonia.server.backends.tensorrt.build import build, check_machine
from charonia.server.convert.options import ConvertOptions


@dataclass(frozen=True, slots=True)
class Target:
    """One form.

    Attributes:
        name: Its name on the command line.
        filename: Its name in a version's folder.
        write: Writes it: takes the path of the ONNX model, that of the file to write and the options; raises
            ServingError.
        check: Checks that this machine can write it; raises ServingError.
    """

    name: str
    filename: str
    write: Callable[[Path, Path, ConvertOptions], None]
    check: Callable[[], None] = lambda: None


def _copy(model: Path, output: Path, options: ConvertOptions) -> None:
    """Copy an ONNX model, with the file of its weights where that is apart."""
    for beside in model.parent.glob(f"{model.name}.*"):
        shutil.copyfile(beside, output.parent / beside.name)
    shutil.copyfile(model, output)


def _plan(model: Path, output: Path, options: ConvertOptions) -> None:
    build(model, output, precision=options.precision, shapes=dict(options.shapes))


TARGETS = (Target("onnx", "model.onnx", _copy), Target("tensorrt", "model.plan", _plan, check_machine))
"""The forms; `TARGET_NAMES` of the options has the same names."""


def target_called(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)
