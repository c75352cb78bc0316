"""Models that `charonia convert` reads and checks, as their backends open them, and what converters have in common.

A backend that reads a form has an `Original`. The command names it by its path, and imports nothing else of a backend.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from charonia.config.complete import Signature, SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.tensor import Array
from charonia.install_hint import extra_hint
from charonia.wire.example_inputs import example_dims

ERROR_CHARS_MAX = 600
"""Longest text of a library's error that is repeated."""

INTEGER_MAX = 1
"""Greatest integer of random samples: one is a valid id, mask and count."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a model is read.

    Attributes:
        trust: Whether the file may run code while it is read.
        trusted_types: Types that a file of skops may make.
        inputs: Inputs, for files that do not say them.
        signature: Signature of a SavedModel, "" for the default one.
    """

    trust: bool = False
    trusted_types: tuple[str, ...] = ()
    inputs: tuple[SignatureTensor, ...] = ()
    signature: str = ""


class Original(Protocol):
    """A model to convert.

    Attributes:
        title: What it is: "RandomForestClassifier of scikit-learn 1.9.1".
        converter: What converts it: "skl2onnx 1.20.0".
        texts: Texts that it knows, by input.
        scale: Standard deviation of numbers to try it with; a network expects about 1, a forest anything.
        warnings: A sentence for each thing to warn of.
    """

    title: str
    converter: str
    texts: Mapping[str, Sequence[str]]
    scale: float
    warnings: Sequence[str]

    def to_onnx(self, path: Path, opset: int) -> None:
        """Write the model as ONNX.

        Args:
            opset: Version of the operators, 0 for the converter's choice.

        Raises:
            ServingError: UNSUPPORTED for an operator that cannot be converted, with its name.
        """

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the original's answers, by the names that the outputs have in the ONNX model; BYTES as in requests."""

    def close(self) -> None:
        """Release what it holds."""


class Converted(Protocol):
    """The ONNX model that was made of it."""

    signature: Signature

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return its answers, by output. Raises ServingError."""


def random_samples(
    inputs: Sequence[SignatureTensor], rows: int, texts: Mapping[str, Sequence[str]], scale: float, seed: int = 0
) -> dict[str, Array]:
    """Return an array for each input.

    Args:
        rows: Size of the first dimension, where it is variable.
        texts: Texts to choose from, by input.
        scale: Standard deviation of numbers with a fraction in the last row; in the first one it is 1.
        seed: Of the generator.

    Raises:
        ServingError: INVALID_ARG when nothing is known of the texts of an input.
    """
    generator = np.random.default_rng(seed)
    feed: dict[str, Array] = {}
    for tensor in inputs:
        dims = example_dims(tensor.shape, tensor.datatype, batched=False)
        shape = (rows, *dims[1:]) if tensor.shape[:1] == (-1,) else dims
        kind = tensor.datatype.numpy.kind
        if tensor.datatype is DataType.BYTES:
            if not texts.get(tensor.name):
                raise invalid(
                    f"input '{tensor.name}' takes texts, and nothing says which ones",
                    hint="give samples: --samples FILE.npz, with an array for each input",
                )
            array: Array = np.array([t.encode() for t in generator.choice(texts[tensor.name], shape).ravel()], object)
            array = array.reshape(shape)
        elif kind == "f":
            array = generator.normal(size=shape)
            if shape and shape[0] > 1:
                array *= np.geomspace(1, scale, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        else:
            array = generator.integers(0, INTEGER_MAX, shape, endpoint=True)
        feed[tensor.name] = array.astype(tensor.datatype.numpy, copy=False)
    return feed


def require(extra: str, *modules: str) -> None:
    """Check that libraries are installed. Raises ServingError: UNSUPPORTED with the command that installs the extra."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        named = ", ".join(f"'{name}'" for name in missing)
        plural = "s" if len(missing) > 1 else ""
        raise unsupported(
            f"this conversion needs the package{plural} {named}, which {'are' if plural else 'is'} not installed",
            hint=extra_hint(extra),
        )


def versioned(distribution: str) -> str:
    """Return a distribution, or its build for CPUs, with its version; without one where neither is installed."""
    for name in (distribution, f"{distribution}-cpu"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return distribution


def failed(converter: str, error: BaseException | str, *, hint: str = "") -> ServingError:
    """Return the error of a converter as one line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return invalid(f"{converter} failed: {' '.join(text.split())[:ERROR_CHARS_MAX]}", hint=hint)


def rename(model: Any, names: Mapping[str, str]) -> None:
    """Give tensors of an ONNX model other names; a tensor within it that has one of them already gives way."""
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)} - names.keys()
    away = {name: f"{name}_within" for name in taken.intersection(names.values())}
    _rename_graph(model.graph, {**away, **names})


def _rename_graph(graph: Any, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename_graph(inner, names)


def unknown_operators(model: Any) -> list[str]:
    """Return the operators of an ONNX model that ONNX does not have."""
    import onnx

    return sorted({node.op_type for node in model.graph.node if not node.domain and not onnx.defs.has(node.op_type)})
