"""What the procedure needs of a model that is converted, and what converters have in common."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.tensor import Array
from charonia.install_hint import extra_hint

ERROR_CHARS_MAX = 600
"""Longest text of a library's error that is repeated."""


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
            path: The file to write.
            opset: Version of the operators, 0 for the converter's choice.

        Raises:
            ServingError: UNSUPPORTED for an operator that cannot be converted, with its name.
        """
        ...

    def run(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the original's answers, by the names that the outputs have in the ONNX model; BYTES as in requests."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


def require(extra: str, *modules: str) -> None:
    """Check that libraries are installed.

    Raises:
        ServingError: UNSUPPORTED with the command that installs the extra.
    """
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
