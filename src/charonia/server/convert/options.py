"""What to convert, and how. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from charonia.config.complete import SignatureTensor

TOLERANCE = 1e-4
ROWS = 16
ROWS_MAX = 100_000

PRECISIONS = ("fp32", "fp16")
"""Precisions of plans."""

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, best and largest shape."""

TARGET_NAMES = ("onnx", "tensorrt")
"""Names of the forms to convert to; `TARGETS` of `convert` has what each one is."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """A conversion.

    Attributes:
        model: Path of the file or folder.
        target: Name of the form to write.
        output: Path of the file to write, "" for the model's name in the current folder.
        repository: Folder of a repository to write the model to, "" for none.
        name: Name of the model, "" for that of the file.
        force: Whether a file that is there already is replaced.
        trust: Whether the file may run code while it is read.
        trusted_types: Types that a file of skops may make.
        inputs: Inputs, for files that do not say them.
        signature: Signature of a SavedModel, "" for the default one.
        opset: Version of ONNX's operators, 0 for what the converter has.
        samples: Path of an .npz file with an array for each input, "" for random ones.
        rows: Rows of the random samples.
        tolerance: Greatest difference, absolute and relative, that is accepted.
        precision: Precision of a plan.
        shapes: Smallest, best and largest shape of inputs of a plan.
    """

    model: str = ""
    target: str = "onnx"
    output: str = ""
    repository: str = ""
    name: str = ""
    force: bool = False
    trust: bool = False
    trusted_types: tuple[str, ...] = ()
    inputs: tuple[SignatureTensor, ...] = ()
    signature: str = ""
    opset: int = 0
    samples: str = ""
    rows: int = ROWS
    tolerance: float = TOLERANCE
    precision: str = PRECISIONS[0]
    shapes: tuple[tuple[str, Range], ...] = ()

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        if self.output and self.repository:
            yield "--output, --repository: expected one of them"
        if self.name and not self.repository:
            yield "--name: is the name of a model in a --repository, and none is given"
