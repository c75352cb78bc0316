"""The backends by name. The first model that needs a backend imports its module and its library.

The facts that need no import are in `charonia.config.backends`.
"""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

from charonia.config.backends import BackendRecord, Package, records
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, unsupported
from charonia.install_hint import extra_hint, package_hint
from charonia.server.backends.api import Backend

_log = logging.getLogger(__name__)

SCRIPT = "model.py"
"""File in a folder of the backend directory that serves every model whose `backend` is the folder's name."""


def installed_backends(directory: Path | None = None) -> dict[str, Callable[[], Backend]]:
    """Return a factory for each backend, by name.

    Backends of packages take precedence over the backend directory.

    Args:
        directory: Has a folder for each backend that is written in Python; folders without a `model.py` are ignored.
    """
    scripts = _scripts(directory) if directory is not None else {}
    return scripts | {name: partial(_make, record) for record in records() for name in record.names}


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


def _make(record: BackendRecord) -> Backend:
    if record.problem:
        raise internal(f"backend '{record.name}': {record.problem}")
    module, _, attribute = record.factory.partition(":")
    try:
        return cast(Backend, getattr(import_module(module), attribute)())
    except ModuleNotFoundError as error:
        package = next((each for each in record.packages if each.module == error.name), None)
        if package is None:
            raise _broken(record, error) from error
        raise unsupported(
            f"the backend of this model needs the package '{error.name}', which is not installed",
            hint=install_hint(package),
        ) from error
    except ServingError:
        raise
    except Exception as error:  # another package's code: a broken one must not end the server
        raise _broken(record, error) from error


def _broken(record: BackendRecord, error: Exception) -> ServingError:
    return internal(f"backend '{record.name}' ({record.factory}) cannot be loaded: {type(error).__name__}: {error}")


def install_hint(package: Package) -> str:
    return extra_hint(package.extra) if package.extra else package.hint or package_hint(package.name)


def check_of(record: BackendRecord) -> Callable[[ModelConfig], tuple[str, str]]:
    """Return the check of a backend that has one."""
    module, _, attribute = record.check.partition(":")
    return cast(Callable[[ModelConfig], tuple[str, str]], getattr(import_module(module), attribute))
