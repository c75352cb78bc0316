"""The forms of models that are converted."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from charonia.core.errors import invalid, not_found
from charonia.server.convert.options import ConvertOptions
from charonia.server.convert.original import Original, require


@dataclass(frozen=True, slots=True)
class SourceForm:
    """One form.

    Attributes:
        title: What it is.
        suffixes: Suffixes of its files.
        member: A file in its folder, for forms that are folders.
        extra: Extra of this package that reads it.
        modules: The libraries that it needs.
        original: Where its `Original` is: "module:class".
    """

    title: str
    suffixes: tuple[str, ...]
    member: str
    extra: str
    modules: tuple[str, ...]
    original: str


SOURCES = (
    SourceForm(
        *("an estimator of scikit-learn", (".skops", ".joblib", ".pkl", ".pickle"), ""),
        *("convert,sklearn", ("sklearn", "skops", "skl2onnx", "onnx")),
        "charonia.server.convert.estimators:EstimatorOriginal",
    ),
    SourceForm(
        *("a PyTorch model", (".pt", ".pth", ".jit", ".torchscript", ".pt2"), ""),
        *("convert,torch", ("torch", "onnx", "onnxscript")),
        "charonia.server.convert.pytorch:PyTorchOriginal",
    ),
    SourceForm(
        *("a TensorFlow model", (".keras", ".h5", ".tflite"), "saved_model.pb"),
        *("convert,tensorflow", ("tensorflow", "tf2onnx", "onnx")),
        "charonia.server.convert.tensorflow:TensorFlowOriginal",
    ),
)
"""The forms, each with what reads it."""


def form_of(path: Path) -> SourceForm:
    """Return the form of a file or folder.

    Raises:
        ServingError: It is missing, or of a form that cannot be converted.
    """
    if not path.exists():
        raise not_found(f"there is no file or folder '{path}'")
    for form in SOURCES:
        if path.is_dir() and form.member and (path / form.member).is_file():
            return form
        if path.is_file() and path.suffix.lower() in form.suffixes:
            return form
    suffixes = ", ".join(suffix for form in SOURCES for suffix in form.suffixes)
    if path.suffix.lower() == ".onnx":
        raise invalid(f"'{path}' is an ONNX model already", hint=f"charonia serve {shlex.quote(str(path))}")
    raise invalid(
        f"'{path}' is of no form that can be converted",
        hint=f"expected a file that ends with one of {suffixes}, or the folder of a SavedModel",
    )


def open_original(form: SourceForm, path: Path, options: ConvertOptions) -> Original:
    """Read a model.

    Raises:
        ServingError: A library is missing, or the file cannot be read.
    """
    require(form.extra, *form.modules)
    module, _, name = form.original.partition(":")
    make = cast(Callable[[Path, ConvertOptions], Original], getattr(import_module(module), name))
    return make(path, options)
