"""The forms that models are converted to. Each is made from a checked ONNX model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """One form.

    Attributes:
        name: Its name on the command line.
        filename: Its name in a version's folder.
        write: Writes it: takes the path of the ONNX model and that of the file to write; raises ServingError.
    """

    name: str
    filename: str
    write: Callable[[Path, Path], None]

    @property
    def suffix(self) -> str:
        """The suffix of its file."""
        return Path(self.filename).suffix


def _copy(model: Path, output: Path) -> None:
    """Copy an ONNX model, with the file of its weights where that is apart."""
    for beside in model.parent.glob(f"{model.name}.*"):
        shutil.copyfile(beside, output.parent / beside.name)
    shutil.copyfile(model, output)


TARGETS = (Target("onnx", "model.onnx", _copy),)
"""The forms; `TARGET_NAMES` of the options has the same names."""


def target_called(name: str) -> Target:
    """Return the form of a name."""
    return next(target for target in TARGETS if target.name == name)
