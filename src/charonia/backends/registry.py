"""The backends by name. A backend's module, and the library behind it, is imported when the first model needs it."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from charonia.backends.api import Backend
from charonia.core.errors import ServingError, internal

ENTRY_POINT_GROUP = "charonia.backends"
"""Where installed packages offer backends: `name = "module:factory"`, where `factory()` returns a `Backend`."""

_OWN = {
    "identity": "charonia.backends.identity:IdentityBackend",
    "onnxruntime": "charonia.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "charonia.backends.python.backend:PythonBackend",
}


def builtin_backends() -> dict[str, Callable[[], Backend]]:
    """Return what makes each backend that is installed, by name; our own names win over those of other packages."""
    factories = {entry.name: _from_entry_point(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return factories | {name: _from_path(path) for name, path in _OWN.items()}


def _from_path(path: str) -> Callable[[], Backend]:
    def make() -> Backend:
        module, _, attribute = path.partition(":")
        return cast(Backend, getattr(import_module(module), attribute)())

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
