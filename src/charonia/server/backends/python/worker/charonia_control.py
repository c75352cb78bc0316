"""Loading, unloading and readiness of other models, as a model asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker.charonia_errors import TritonModelException, checked_text
else:  # a sibling of the worker's script; the package is not there
    from charonia_errors import TritonModelException, checked_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from charonia.server.backends.python.worker.charonia_host import Binding

_FILE = "file:"


class ModelControl:
    """The functions of the module that are about other models."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def load_model(self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it again; return when it is ready.

        Args:
            model_name: Model.
            config: Model configuration as JSON text, "" for the one in the repository.
            files: Contents by "file:<path within the model's folder>", instead of that folder.
        """
        contents: dict[str, bytes] = {}
        for path, content in (files or {}).items():
            name = checked_text("load_model", "the path of a file", path)
            if not name.startswith(_FILE):
                raise TritonModelException(f"load_model: expected 'file:<path>' as key of a file, got '{name}'")
            if not isinstance(content, (bytes, bytearray, memoryview)):
                raise TritonModelException(
                    f"load_model: expected bytes as content of '{name}', got {type(content).__name__}"
                )
            contents[name[len(_FILE) :]] = bytes(content)
        text = checked_text("load_model", "config", config)
        self._ask("load", model_name, {"config": text or None, "files": contents})

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Begin to unload a model, with `unload_dependents` also those that it is made of."""
        self._ask("unload", model_name, {"unload_dependents": bool(unload_dependents)})

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Return whether a model is ready, in a version or any."""
        version = checked_text("is_model_ready", "model_version", model_version)
        return bool(self._ask("ready", model_name, {"version": version}))

    def _ask(self, action: str, model_name: object, options: dict[str, object]) -> object:
        name = checked_text(f"model control ({action})", "model_name", model_name)
        everything: dict[str, object] = {"config": None, "files": {}, "unload_dependents": False, "version": ""}
        everything.update(options)
        return self._binding.calling().control(action, name, everything)
