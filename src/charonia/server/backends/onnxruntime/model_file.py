"""Reads from an ONNX file what ONNX Runtime does not report: files of external weights, and tensors without a shape.

ONNX Runtime maps external weights into memory for as long as the model is loaded. If the file is overwritten meanwhile
(`cp new.data model.data`), the served model changes its answers; if it is truncated, SIGBUS ends the whole process. A
copy in memory has neither problem, and its file may be a symbolic link that leads out of the folder.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from charonia.config.onnx_file import OnnxFile

COPIED_BYTES_MAX = 2 * 1024**3
"""Larger weights stay mapped: while a session is created, there are two copies."""


def read_external(path: Path) -> Mapping[str, bytes]:
    """Return the content of a model's files of external weights, by the names that the model has for them.

    Empty where the model has none, they are larger than `COPIED_BYTES_MAX`, or one cannot be read or lies outside the
    folder: ONNX Runtime then reports what is wrong. Blocks on disk I/O.
    """
    try:
        names = external_names(path)
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
            return {}
        if sum((path.parent / name).stat().st_size for name in names) > COPIED_BYTES_MAX:
            return {}
        return {name: (path.parent / name).read_bytes() for name in names}
    except (OSError, ValueError):
        return {}


def external_names(path: Path) -> tuple[str, ...]:
    """Return the names of the files of external weights, each once, in the order of the model.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not an ONNX model.
    """
    with path.open("rb") as file:
        return OnnxFile(file).weight_files()


def without_shape(path: Path) -> frozenset[str]:
    """Return the names of the inputs and outputs without a shape: not even their rank is known.

    Empty where the file cannot be read. Blocks on disk I/O.
    """
    try:
        with path.open("rb") as file:
            return OnnxFile(file).without_shape()
    except (OSError, ValueError):
        return frozenset()
