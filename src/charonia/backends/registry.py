"""The backends by name. A backend's module, and the library behind it, is imported when the first model needs it."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from charonia.backends.api import Backend
from charonia.core.errors import ServingError, internal, unsupported

ENTRY_POINT_GROUP = "charonia.backends"
"""Where installed packages offer backends: `name = "module:factory"`, where `factory()` returns a `Backend`."""

_OWN = {
    "identity": "charonia.backends.identity:IdentityBackend",
    "onnxruntime": "charonia.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "charonia.backends.python.backend:PythonBackend",
    "pytorch": "charonia.backends.pytorch.backend:PyTorchBackend",
}

_EXTRAS = {"torch": "torch"}
"""Extra of this package that brings a library, by the library's name."""


def builtin_backends() -> dict[str, Callable[[], Backend]]:
    """Return what makes each backend that is installed, by name; our own names win over those of other packages."""
    factories = {entry.name: _from_entry_point(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return factories | {name: _from_path(path) for name, path in _OWN.items()}


def _from_path(path: str) -> Callable[[], Backend]:
    def make() -> Backend:
        module, _, attribute = path.partition(":")
        try:
            return cast(Backend, getattr(import_module(module), attribute)())
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(error.name or "")
            if extra is None:
                raise
            raise unsupported(
                f"the backend of this model needs the package '{error.name}', which is not installed",
                hint=f"pip install 'charonia[{extra}]'",
            ) from error

    return make


def _from_entry_point(entry: EntryPoint) -> Callable[[], Backend]:
    def make() -> Backend:
        try:
            return cast(Backend, entry.load()())
        except Exception as error:  # foreign code: a broken package must not take the server down
            raise _broken(entry, error) from error

    return make


def _broken(entry: EntryPoint, error: Exception) -> ServingError:
    return internal(f"backend '{entry.name}' ({entry.value}) cannot be loaded: {type(error).__name__}: {error}")
