"""The backends by name. The first model that needs a backend imports its module, and the library behind it."""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from charonia.core.errors import ServingError, internal, unsupported
from charonia.install_hint import extra_hint
from charonia.server.backends.api import Backend

_log = logging.getLogger(__name__)

SCRIPT = "model.py"
"""File in a folder of the backend directory that serves every model whose `backend` is the folder's name."""

ENTRY_POINT_GROUP = "charonia.backends"
"""Entry points of packages that bring backends: `name = "module:factory"`; `factory()` returns a `Backend`."""

_OWN = {
    "armnn_tflite": "charonia.server.backends.tflite.backend:TfliteBackend",  # Triton's name
    "fil": "charonia.server.backends.fil.backend:FilBackend",
    "identity": "charonia.server.backends.identity:IdentityBackend",
    "image": "charonia.server.backends.image.backend:ImageBackend",
    "llama_cpp": "charonia.server.backends.llama_cpp.backend:LlamaCppBackend",
    "onnxruntime": "charonia.server.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "openvino": "charonia.server.backends.openvino.backend:OpenVinoBackend",
    "python": "charonia.server.backends.python.backend:PythonBackend",
    "pytorch": "charonia.server.backends.pytorch.backend:PyTorchBackend",
    "sklearn": "charonia.server.backends.sklearn.backend:SklearnBackend",
    "tensorflow": "charonia.server.backends.tensorflow.backend:TensorFlowBackend",
    "tensorrt": "charonia.server.backends.tensorrt.backend:TensorRtBackend",
    "tensorrtllm": "charonia.server.backends.tensorrtllm.backend:TensorRtLlmBackend",
    "tflite": "charonia.server.backends.tflite.backend:TfliteBackend",
    "vllm": "charonia.server.backends.vllm.backend:VllmBackend",
}

_EXTRAS = {
    "PIL": "image",
    "ai_edge_litert": "tflite",
    "openvino": "openvino",
    "sklearn": "sklearn",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "treelite": "fil",
}
"""Extra of this package that installs a library, by the library's name."""


def installed_backends(directory: Path | None = None) -> dict[str, Callable[[], Backend]]:
    """Return a factory for each backend, by name.

    Built-in backends take precedence over the backend directory, and that over other packages.

    Args:
        directory: Has a folder for each backend that is written in Python; folders without a `model.py` are ignored.
    """
    factories = {entry.name: _from_entry_point(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if directory is not None:
        factories |= _scripts(directory)
    return factories | {name: _from_path(path) for name, path in _OWN.items()}


def _scripts(directory: Path) -> dict[str, Callable[[], Backend]]:
    try:
        folders = sorted(path for path in directory.iterdir() if (path / SCRIPT).is_file())
    except OSError as error:  # start scripts name Triton's own directory, which may not exist
        _log.warning("--backend-directory: '%s' cannot be read: %s", directory, error.strerror)
        return {}
    return {folder.name: partial(_from_script, folder.absolute()) for folder in folders}


def _from_script(folder: Path) -> Backend:
    from charonia.server.backends.python.backend import PythonBackend  # other models do not need it

    return PythonBackend(folder)


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
                hint=extra_hint(extra),
            ) from error

    return make


def _from_entry_point(entry: EntryPoint) -> Callable[[], Backend]:
    def make() -> Backend:
        try:
            return cast(Backend, entry.load()())
        except Exception as error:  # third-party code: a broken package must not end the server
            raise _broken(entry, error) from error

    return make


def _broken(entry: EntryPoint, error: Exception) -> ServingError:
    return internal(f"backend '{entry.name}' ({entry.value}) cannot be loaded: {type(error).__name__}: {error}")
