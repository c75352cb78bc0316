"""The Python environment of a model: the server's own, a prepared one, or one built for what the model requires.

What it requires stands in a requirements.txt, or in the model's file as inline script metadata.

A prepared environment is a folder (`venv`, unpacked conda-pack) or an archive that is unpacked into the cache. Its
interpreter may have another version than the server's. Before a worker starts in it, its version and numpy are checked,
so that loading the model reports any problem.

Built and unpacked environments are cached in a folder that any number of servers share; each is made once:

    <folder>/<key>/lock           held while the environment is made
    <folder>/<key>/<random>/      the environment; it cannot be moved later
    <folder>/<key>/environment    link to it, made when it is complete

An interrupted build leaves a folder without a link, which the next build removes.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.python_command import python_code
from charonia.server.backends.api import BackendSettings, ModelFiles
from charonia.server.backends.python.build import (
    BUILD_S_MAX,
    KEY_LETTERS,
    NEEDED_BY_FUNCTIONS,
    CommandError,
    build_requirements,
    inline_key,
    requirements_key,
    run_command,
)
from charonia.server.backends.python.inline_metadata import InlineMetadata, inline_metadata
from charonia.server.backends.python.template import WorkerTemplate
from charonia.server.backends.python.unpack import unpack_archive

_log = logging.getLogger(__name__)

ENVIRONMENT = "EXECUTION_ENV_PATH"
"""Model parameter: folder or archive of the environment that the model runs in."""

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
"""Placeholder of the model's folder in that parameter."""

REQUIREMENTS = "requirements.txt"
"""File in the version's folder or in the model's."""

BACKEND_ARCHIVE = "pb_exec_env_model.py.tar.gz"
"""File in the folder of a backend written in Python: the environment of its models."""

STUB = "triton_python_backend_stub"
"""An executable of this name in the model's folder replaces Triton's own worker."""

CACHE = "environment-cache"
"""Backend setting: folder of built and unpacked environments."""

BUILDER = "environment-builder"
"""Backend setting: what builds environments."""

BUILDERS = ("auto", "uv", "pip", "none")
"""auto: uv if it is found, else pip; none: requirements.txt is ignored."""

PYTHON_MIN = (3, 8)
"""Oldest Python that workers run on."""

PROBE_S_MAX = 60.0
"""Time limit for an interpreter to print its version and import numpy."""

LOCK_POLL_S = 0.1
"""Interval between attempts to take a lock that another process or model holds."""

_LINK = "environment"

# Runs on every version of Python, even Python 2.
_PROBE = "import sys; sys.stdout.write('Python %d.%d\\n' % sys.version_info[:2]); sys.stdout.flush(); import numpy"
_VERSION = re.compile(r"^Python (\d+)\.(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter.

    Attributes:
        python: Its path.
        folder: The environment that it belongs to, None for the server's own interpreter.
        template: The process that workers in it are forked from, None where each one starts the interpreter.
    """

    python: str = sys.executable
    folder: Path | None = None
    template: WorkerTemplate | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the interpreter.

        A worker imports nothing from the current folder. With `-P`, which Python has since 3.11, nor do the processes
        that its models spawn.
        """
        return ("-P",) if self.folder is None else ()

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a process in it, without those of other environments."""
        if self.folder is None:
            return dict(inherited)
        variables = {k: v for k, v in inherited.items() if k not in ("PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX")}
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = os.pathsep.join([str(self.folder / "bin"), inherited.get("PATH", os.defpath)])
        return variables


SERVER_ENVIRONMENT = Environment()
"""The server's own interpreter."""


class EnvironmentCache:
    """The environments in a folder.

    Args:
        folder: The folder; made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()

    async def archive_key(self, path: Path) -> str:
        """Return the key of an archive, by its content.

        Raises:
            ServingError: It cannot be read.
        """
        try:
            return await asyncio.to_thread(_archive_key, path)
        except OSError as error:
            raise invalid(f"the archive '{path}' cannot be read: {error.strerror}") from error

    async def get(self, key: str, build: Callable[[Path], Awaitable[None]], *, what: str) -> Path:
        """Return the environment of a key; make it if it does not exist.

        Args:
            key: Identifies its content.
            build: Makes an environment in the given folder, which does not exist yet.
            what: Its source, for messages.

        Raises:
            ServingError: It cannot be made.
        """
        place = self._folder / key
        found = _complete(place)
        if found is not None:
            return found
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with _locked(place / "lock", what):
                return _complete(place) or await self._make(place, build, what)
        except OSError as error:
            raise invalid(
                f"the environment of {what} cannot be kept in '{place}': {error}",
                hint="CHARONIA_CACHE, or --backend-config=python,environment-cache=FOLDER, names another folder",
            ) from error

    async def _make(self, place: Path, build: Callable[[Path], Awaitable[None]], what: str) -> Path:
        await asyncio.to_thread(_remove_leftovers, place)
        folder = place / secrets.token_hex(4)
        _log.info("making the Python environment of %s in %s; this may take a while", what, folder)
        start = time.monotonic()
        try:
            async with asyncio.timeout(BUILD_S_MAX):
                await build(folder)
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, TimeoutError):
                raise invalid(f"the environment of {what} was not made within {BUILD_S_MAX:g} s") from None
            raise
        link = place / f"{folder.name}.link"
        link.symlink_to(folder.name)
        link.replace(place / _LINK)
        _log.info("made the Python environment of %s in %.1f s", what, time.monotonic() - start)
        return folder


async def environment_of(
    files: ModelFiles,
    config: ModelConfig,
    settings: BackendSettings,
    backend_dir: Path | None = None,
    source: Path | None = None,
) -> Environment:
    """Return the environment of a model version; unpack or build it if needed.

    The model's own parameter and files take precedence over `backend_dir`, the folder of a backend written in Python,
    and a requirements.txt over what `source`, the file of the model, says in itself.

    Raises:
        ServingError: It cannot be found, unpacked or built, or workers cannot run in it, with the reason.
    """
    given = config.parameters.get(ENVIRONMENT, "")
    if (files.model_dir / STUB).exists() and not given:
        raise unsupported(
            f"model '{config.name}': the executable '{STUB}' in the model's folder cannot be used here",
            hint=f"remove it, and name the environment that it was made for in parameter {ENVIRONMENT}, "
            f"or list the model's packages in a {REQUIREMENTS}; its Python may have any version from 3.8",
        )
    try:
        if given:
            return await _prepared(Path(given.replace(MODEL_DIRECTORY, str(files.model_dir))), files, settings)
        if backend_dir is not None and (backend_dir / BACKEND_ARCHIVE).is_file():
            return await _prepared(backend_dir / BACKEND_ARCHIVE, files, settings)
        requirements = requirements_of(files, backend_dir)
        if requirements is not None:
            return await _built(requirements, config.name, settings)
        return await environment_of_file(source, settings) if source is not None else SERVER_ENVIRONMENT
    except ServingError as error:
        raise ServingError(error.code, f"model '{config.name}': {error.message}", hint=error.hint) from error


async def environment_of_file(source: Path, settings: BackendSettings) -> Environment:
    """Return the environment that a Python file asks for in itself, the server's own where it asks for none.

    Raises:
        ServingError: It cannot be built, with the reason.
    """
    wanted = await asyncio.to_thread(read_inline, source)
    if wanted is None or (not wanted.dependencies and wanted.accepts(sys.version_info[:3])):
        return SERVER_ENVIRONMENT
    builder = _builder(settings)
    if builder == "none":
        _log.info("the dependencies in %s are ignored: %s is none", source.name, BUILDER)
        return SERVER_ENVIRONMENT
    python = "" if wanted.accepts(sys.version_info[:3]) else wanted.requires_python

    async def build(folder: Path) -> None:
        requirements = folder.with_suffix(".txt")
        requirements.write_text("".join(f"{line}\n" for line in wanted.dependencies))
        try:
            await build_requirements(
                requirements, folder, builder, python=python, what=source.name, needed=NEEDED_BY_FUNCTIONS
            )
        finally:
            requirements.unlink()
        await _probe(_in_folder(folder, source.name))

    folder = await _cache(settings).get(inline_key(wanted), build, what=f"'{source.name}'")
    return _in_folder(folder, source.name)


def read_inline(source: Path) -> InlineMetadata | None:
    """Return the inline metadata of a Python file, None where it has none. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG for metadata that is none.
    """
    try:
        return inline_metadata(source.read_text(encoding="utf-8", errors="replace"), f"'{source.name}'")
    except OSError as error:
        raise invalid(f"'{source}' cannot be read: {error.strerror}") from error


def requirements_of(files: ModelFiles, backend_dir: Path | None = None) -> Path | None:
    """Return the requirements.txt of a model version or else of its backend, None where there is none."""
    folders = (files.version_dir, files.model_dir, *([backend_dir] if backend_dir is not None else []))
    found = (folder / REQUIREMENTS for folder in folders)
    return next((path for path in found if path.is_file()), None)


async def _prepared(path: Path, files: ModelFiles, settings: BackendSettings) -> Environment:
    path = files.model_dir / path
    if path.is_dir():
        environment = _in_folder(path, f"parameter {ENVIRONMENT}: the folder '{path}'")
        await _probe(environment)
        return environment
    if not path.is_file():
        raise invalid(
            f"parameter {ENVIRONMENT}: there is no folder or archive '{path}'",
            hint=f"relative paths begin at the model's folder, for which {MODEL_DIRECTORY} stands too",
        )

    async def build(folder: Path) -> None:
        await unpack_archive(path, folder)
        await _probe(_in_folder(folder, f"parameter {ENVIRONMENT}: the archive '{path}'"))

    cache = _cache(settings)
    key = await cache.archive_key(path)
    return _in_folder(await cache.get(key, build, what=f"the archive '{path}'"), str(path))


async def _built(requirements: Path, model: str, settings: BackendSettings) -> Environment:
    builder = _builder(settings)
    if builder == "none":
        _log.info("%s of model '%s' is ignored: %s is none", REQUIREMENTS, model, BUILDER)
        return SERVER_ENVIRONMENT

    async def build(folder: Path) -> None:
        await build_requirements(requirements, folder, builder)
        await _probe(_in_folder(folder, REQUIREMENTS))

    key = await asyncio.to_thread(requirements_key, requirements)
    folder = await _cache(settings).get(key, build, what=f"{REQUIREMENTS} of model '{model}'")
    return _in_folder(folder, REQUIREMENTS)


def _builder(settings: BackendSettings) -> str:
    builder = settings.values.get(BUILDER, "auto")
    if builder not in BUILDERS:
        raise invalid(f"--backend-config python,{BUILDER}: expected one of {', '.join(BUILDERS)}, got '{builder}'")
    return builder


def _cache(settings: BackendSettings) -> EnvironmentCache:
    given = settings.values.get(CACHE)
    return EnvironmentCache(Path(given) if given else Path.home() / ".cache" / "charonia" / "environments")


def _in_folder(folder: Path, what: str) -> Environment:
    for name in ("python", "python3"):
        # Symbolic links stay: an interpreter finds its environment by the path that it is called by.
        python = folder / "bin" / name
        if python.is_file() and os.access(python, os.X_OK):
            return Environment(str(python.absolute()), folder.absolute())
    raise invalid(
        f"{what} has no interpreter bin/python that can be run",
        hint="expected a folder made by `python -m venv` or `uv venv`, or a conda environment packed by conda-pack; an "
        "archive of a folder ENV has its content at the top: tar -czf env.tar.gz -C ENV .",
    )


async def _probe(environment: Environment) -> None:
    python = environment.python
    try:
        output = await run_command(
            python_code(_PROBE, python), env=environment.variables(os.environ), limit_s=PROBE_S_MAX
        )
        failure = ""
    except CommandError as error:
        output = failure = error.output or str(error)
    version = _VERSION.search(output)
    if version is None:
        raise invalid(f"the interpreter '{python}' cannot be run: {output}")
    if (int(version[1]), int(version[2])) < PYTHON_MIN:
        raise invalid(
            f"the interpreter '{python}' is Python {version[1]}.{version[2]}, which is too old for workers",
            hint="use Python {}.{} or newer".format(*PYTHON_MIN),
        )
    if failure:
        raise invalid(
            f"the interpreter '{python}' cannot import numpy:\n{failure}",
            hint="workers need numpy: install it in the environment",
        )


def _complete(place: Path) -> Path | None:
    """Return the environment, None if it does not exist or its interpreter is missing."""
    link = place / _LINK
    if not any((link / "bin" / name).exists() for name in ("python", "python3")):
        return None
    return place / os.readlink(link)


def _remove_leftovers(place: Path) -> None:
    for path in place.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _locked(path: Path, what: str) -> AsyncIterator[None]:
    """Hold the lock at a path. The system releases it when the process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_waiting = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    _log.info("waiting for the Python environment of %s, which is being made already", what)
                is_waiting = True
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _archive_key(path: Path) -> str:
    status = path.stat()
    return _content_key(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _content_key(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Return the key of a file's content, cached until the file changes."""
    with path.open("rb") as file:
        return "archive-" + hashlib.file_digest(file, "sha256").hexdigest()[:KEY_LETTERS]
