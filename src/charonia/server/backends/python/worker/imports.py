"""Imports a model's file."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import threading
import types
from typing import TYPE_CHECKING

from . import service
from .errors import record_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .service import Definition

PB_UTILS = ("triton_python_backend_utils", "c_python_backend_utils")
"""Names of the module that models import; some import its classes from the module of Triton's stub."""

SERVICE = "charonia.service"
"""The module that service files import."""

PYTHON_MIN = (3, 10)
"""Oldest Python that service files run on: typing.Annotated, and records in annotations."""

_PACKAGE = "charonia_model_"

_numbers = itertools.count(1)
_import_lock = threading.Lock()
_imported: dict[str, list[Definition]] = {}
"""The service file that the models of a worker process share, by its path: it is imported one time."""
_shared_lock = threading.RLock()
"""Held while a model of a process with several models imports: `sys.path` and `sys.modules` are then its own."""


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles a file each time: Python's cache misses a change within a second that leaves the size as it was."""

    def path_stats(self, path: str) -> Any:
        raise OSError("this file has no cache")


class ModelImports:
    """What one model may import: its own folders, and its own copy of `triton_python_backend_utils`.

    In a process of its own, a model finds both at any time. Where several models share a process, it does so within
    `visible()` only: while its file is imported and in `initialize`. Modules in its folders are then its own, even
    where another model has some of the same names.

    Args:
        version_dir: Folder of the version.
        model_dir: Folder of the model.
        pb_utils: The model's copy.
        shares_process: Whether there are other models in the process.
    """

    def __init__(self, version_dir: str, model_dir: str, pb_utils: types.ModuleType, shares_process: bool) -> None:
        self._folders = [version_dir, model_dir]
        self._pb_utils = pb_utils
        self._shares_process = shares_process
        self._package = f"{_PACKAGE}{next(_numbers)}"
        self._own: dict[str, types.ModuleType] = {}
        if not shares_process:
            sys.path[:0] = self._folders
            sys.modules.update(dict.fromkeys(PB_UTILS, pb_utils))
            _offer_service()

    def load(self, path: str, app: str = "") -> Any:
        """Import the file of a model and return its class, or the models that a service file defines.

        With the name of an application, return this and those models.

        Raises:
            ImportError: It is no Python file.
            AttributeError: It has neither.
        """
        if path in _imported and not (self._shares_process or app):
            return _imported[path]
        with _import_lock:
            return self._load(path, app)

    def _load(self, path: str, app: str) -> Any:
        if path in _imported and not (self._shares_process or app):
            return _imported[path]
        folder = os.path.dirname(path)
        if folder not in self._folders:  # that of a backend which all its models share
            self._folders.append(folder)
            if not self._shares_process:
                sys.path.insert(2, folder)
        # The package that the folder is for imports like `from .helpers import f` in model.py.
        package = types.ModuleType(self._package)
        package.__path__ = [folder]
        sys.modules[self._package] = package
        spec = importlib.util.spec_from_file_location(self._package + ".model", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _SourceLoader(spec.name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        definitions: list[Definition]
        with self.visible(), service.collecting() as definitions:
            try:
                spec.loader.exec_module(module)
            except BaseException as error:
                record_step(error, f"'{os.path.basename(path)}' cannot be imported")
                raise
        if app:
            if not callable(getattr(module, app, None)):
                raise AttributeError(f"{path} has no application '{app}'")
            return getattr(module, app), definitions
        if hasattr(module, "TritonPythonModel"):
            return module.TritonPythonModel
        if not definitions:
            raise AttributeError(
                f"{path} has no class TritonPythonModel, and no function or class with @charonia.model"
            )
        if sys.version_info < PYTHON_MIN:
            raise ImportError("service files need Python {}.{} or newer".format(*PYTHON_MIN))
        if not self._shares_process:
            _imported[path] = definitions
        return definitions

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Let the model import what is its own."""
        if not self._shares_process:
            yield
            return
        with _shared_lock:
            path, before = list(sys.path), dict(sys.modules)
            sys.path[:0] = self._folders
            sys.modules.update(self._own)
            sys.modules.update(dict.fromkeys(PB_UTILS, self._pb_utils))
            try:
                yield
            finally:
                sys.path[:] = path
                self._hide(before)

    def close(self) -> None:
        """Remove the modules of a model that has ended."""
        if self._shares_process:
            self._own.clear()
            # A copy, here and below: other threads of the process import at any time.
            for name in sys.modules.copy():
                if name == self._package or name.startswith(self._package + "."):
                    sys.modules.pop(name, None)

    def _hide(self, before: dict[str, types.ModuleType]) -> None:
        """Take the model's own modules out of `sys.modules` again."""
        folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in self._folders[1:])
        for name, module in sys.modules.copy().items():
            if name in before or name.startswith(_PACKAGE):
                continue
            file = getattr(module, "__file__", None)
            if file and os.path.realpath(file).startswith(folders):
                self._own[name] = module
                sys.modules.pop(name, None)
        for name in PB_UTILS:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


def _offer_service() -> None:
    """Let files import `charonia` as in the server's environment, also where that package is not there."""
    if sys.modules.get(SERVICE) is service:  # another model of the process has done so
        return
    sys.modules[SERVICE] = service
    found = importlib.util.find_spec("charonia")
    if found is None or found.origin is None:  # nothing, or a mere folder of this name, such as a checkout
        package = types.ModuleType("charonia")
        package.__path__ = []
        package.__dict__.update({name: getattr(service, name) for name in service.__all__}, service=service)
        sys.modules["charonia"] = package
