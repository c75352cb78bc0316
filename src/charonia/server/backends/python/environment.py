"""The Python environment of a model: the server's own, a prepared one, or one built for what the model requires.

What it requires stands in a requirements.txt, or in the model's file as inline script metadata (PEP 723):

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["torch", "pillow>=10"]
    # ///

uv builds environments, or venv and pip. An archive is unpacked in a process with limited memory: this module, as a
script.

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
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import sysconfig
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath

from charonia.archives import ArchiveLimits, explained, failure, limited, tar_entries, unpacked_bytes_max
from charonia.config.inline_metadata import InlineMetadata, inline_metadata
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.die_with_parent import with_parent_death_signal
from charonia.python_command import python_code, python_module
from charonia.server.backends.api import BackendSettings, ModelFiles
from charonia.server.backends.workers.process import SERVER_ENVIRONMENT, Environment
from charonia.server.channel.cuda_driver import is_usable

BUILD_S_MAX = 1800.0
"""Time limit for one environment, downloads included."""

KEY_LETTERS = 24
"""Length of the digest in the key of an environment."""

OUTPUT_BYTES_MAX = 64 * 1024
"""How much of a program's output is kept, from its end."""

REFERENCED_FILES_MAX = 100_000
"""Most files in the folders that a requirements.txt refers to."""

_RECIPE = "1"
"""Part of every key; raised when the build procedure changes, so that environments are rebuilt."""

_INCLUDE = re.compile(r"\s*(-r|-c|--requirement|--constraint)\b")
_COMMENT = re.compile(r"(^|\s)#.*$")
_MADE_BY_BUILDS = re.compile(r"build|__pycache__|.*\.egg-info|\.git")
# These belong to the server's interpreter and would mislead the new one.
_FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_USER")
_INDEX_VARIABLES = ("UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
_PYTORCH_INDEX = "download.pytorch.org"


class CommandError(Exception):
    """A program failed.

    Attributes:
        output: The end of its output.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def requirements_key(path: Path) -> str:
    """Return the key of the environment for a requirements.txt.

    It depends on the content, including referenced files, and on the interpreter and platform.

    Raises:
        ServingError: It cannot be read, or refers to too much.
    """
    digest = _new_digest()
    try:
        _digest_requirements(digest, path, set())
    except OSError as error:
        raise invalid(f"'{path}' cannot be read: {error}") from error
    return "requirements-" + digest.hexdigest()[:KEY_LETTERS]


def _new_digest(*parts: str) -> "hashlib._Hash":
    """Return a digest of the interpreter, the platform and more."""
    own = (_RECIPE, sys.version, sys.base_prefix, sysconfig.get_platform())
    return hashlib.sha256(b"".join(part.encode() + b"\0" for part in (*own, *parts)))


def _digest_requirements(digest: "hashlib._Hash", path: Path, seen: set[Path]) -> None:
    content = path.read_bytes()
    digest.update(len(content).to_bytes(8, "little") + content)
    seen.add(path.resolve())
    for line in content.decode(errors="replace").splitlines():
        is_include = _INCLUDE.match(line) is not None
        for referenced in _local_paths(_COMMENT.sub("", line), path.parent):
            if referenced.is_dir():
                for entry in _listing(referenced):
                    digest.update(entry.encode(errors="surrogateescape") + b"\0")
            elif is_include:
                if referenced.resolve() not in seen:
                    _digest_requirements(digest, referenced, seen)
            else:
                with referenced.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())


def _local_paths(line: str, folder: Path) -> Iterator[Path]:
    for word in re.split(r"[\s=@;\"']+", line):
        name = re.sub(r"\[[^\]]*\]$", "", word.removeprefix("file://").removeprefix("file:"))
        if name and len(name) < 4096 and (folder / name).exists():
            yield folder / name


def _listing(folder: Path) -> Iterator[str]:
    """Yield name, size and time of every file below a folder, without build artefacts."""
    count = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _MADE_BY_BUILDS.fullmatch(name))
        for name in sorted(names):
            count += 1
            if count > REFERENCED_FILES_MAX:
                raise invalid(
                    f"requirements.txt refers to '{folder}', which has more than {REFERENCED_FILES_MAX} files"
                )
            path = os.path.join(parent, name)
            status = os.lstat(path)
            yield f"{os.path.relpath(path, folder)} {status.st_size} {status.st_mtime_ns}"


NEEDED = ("numpy",)
"""Packages that every worker needs."""

NEEDED_BY_FUNCTIONS = (*NEEDED, "pydantic")
"""Packages that workers of service files need."""


async def build_requirements(
    requirements: Path, folder: Path, builder: str, *, python: str = "", what: str = "", needed: Sequence[str] = NEEDED
) -> None:
    """Build the environment for a requirements.txt, with what workers need.

    Args:
        builder: "uv", "pip", or "auto" for uv if it is found.
        python: Specifier of the version of its interpreter, "" for the server's interpreter; only uv finds others.
        what: What the requirements are of, for messages; "" for the file.
        needed: Packages that workers need, installed unless the requirements have them.
    """
    uv = _find_uv() if builder != "pip" else []
    if builder == "uv" and not uv:
        raise invalid(
            "environments are to be built with uv, which is neither on PATH nor installed in the server's Python"
        )
    if python and not uv:
        version = ".".join(map(str, sys.version_info[:3]))
        raise invalid(
            f"requires-python is '{python}', and the server's Python is {version}",
            hint="install uv, which finds or fetches other versions of Python",
        )
    what = what or requirements.name
    interpreter = str(folder / "bin" / "python")
    if uv:
        make = [*uv, "venv", "--no-project", "--python", python or sys.executable, str(folder)]
        install = [*uv, "pip", "install", "--python", interpreter]
    else:
        make = python_module("venv", str(folder))
        install = python_module("pip", "install", "--disable-pip-version-check", "--no-input", python=interpreter)
    install += ["-r", requirements.name]
    place = requirements.parent
    env = variables()
    await _run(make, place, what, "check that Python's module venv is installed completely, or install uv", env=env)
    try:
        await _run(install, place, what, env=env)
    except ServingError as error:
        if _PYTORCH_INDEX not in error.message or env.get("UV_TORCH_BACKEND") in (None, os.getenv("UV_TORCH_BACKEND")):
            raise
        _log.warning("%s cannot be reached: PyTorch is installed from the usual index, for GPUs too", _PYTORCH_INDEX)
        del env["UV_TORCH_BACKEND"]
        await _run(install, place, what, env=env)
    try:
        imports = f"import {', '.join(needed)}"
        await run_command(python_code(imports, interpreter), limit_s=BUILD_S_MAX, env=env)
    except CommandError:
        names = " and ".join(needed)
        await _run([*install, *needed], place, what, f"workers need {names}: add it to {what}", env=env)


def _find_uv() -> list[str]:
    found = shutil.which("uv")
    if found is not None:
        return [found]
    return python_module("uv") if importlib.util.find_spec("uv") is not None else []


def variables() -> dict[str, str]:
    """Return the environment variables of programs that build, without those of other environments.

    Without a GPU, uv installs PyTorch for CPUs, a tenth of the size, unless package indexes are configured.
    """
    found = {key: value for key, value in os.environ.items() if key not in _FOREIGN_VARIABLES}
    if sys.platform == "linux" and not is_usable() and not any(key in found for key in _INDEX_VARIABLES):
        found["UV_TORCH_BACKEND"] = "cpu"
    return found


async def _run(command: list[str], place: Path, what: str, hint: str = "", *, env: Mapping[str, str]) -> None:
    try:
        await run_command(command, limit_s=BUILD_S_MAX, env=env, cwd=place)
    except CommandError as error:
        raise invalid(f"the environment of '{what}' cannot be built: {error}\n{error.output}", hint=hint) from error


async def run_command(
    command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program and return the end of its output, stdout and stderr together.

    Raises:
        CommandError: It could not be started, failed or took too long. It is no longer running.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"'{command[0]}' cannot be started: {error}", "") from error
    kept = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            status = await _finished(process, kept)
    except TimeoutError:
        raise CommandError(f"'{command[0]}' did not finish within {limit_s:g} s and was ended", _text(kept)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status:
        raise CommandError(f"'{' '.join(command)}' failed with status {status}", _text(kept))
    return _text(kept)


async def _finished(process: asyncio.subprocess.Process, kept: bytearray) -> int:
    if process.stdout is None:
        raise RuntimeError("the program has no output pipe")
    while data := await process.stdout.read(OUTPUT_BYTES_MAX):
        kept += data
        del kept[: -OUTPUT_BYTES_MAX - 1]  # one extra byte, to detect that output was cut
    return await process.wait()


def _text(kept: bytearray) -> str:
    text = kept[-OUTPUT_BYTES_MAX:].decode(errors="replace").strip()
    return f"[...]\n{text}" if len(kept) > OUTPUT_BYTES_MAX else text


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


async def cached(
    key: str, build: Callable[[Path], Awaitable[None]], settings: BackendSettings, what: str
) -> Environment:
    """Return the environment with a key, which is built and tried if the cache does not have it."""
    value = settings.values.get(CACHE)
    place = (Path(value).expanduser() if value else Path.home() / ".cache" / "charonia" / "environments") / key
    folder = _complete(place)
    try:
        if folder is None:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with _locked(place / "lock", what):
                folder = _complete(place) or await _make(place, build, what)
    except OSError as error:
        raise invalid(
            f"the environment of {what} cannot be kept in '{place}': {error}",
            hint="CHARONIA_CACHE, or --backend-config=python,environment-cache=FOLDER, names another folder",
        ) from error
    return _in_folder(folder, what)


async def _make(place: Path, build: Callable[[Path], Awaitable[None]], what: str) -> Path:
    for path in place.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
    folder = place / secrets.token_hex(4)
    _log.info("making the Python environment of %s in %s; this may take a while", what, folder)
    start = time.monotonic()
    try:
        async with asyncio.timeout(BUILD_S_MAX):
            await build(folder)
            await _probe(_in_folder(folder, what))
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
    value = config.parameters.get(ENVIRONMENT, "")
    if (files.model_dir / STUB).exists() and not value:
        raise unsupported(
            f"model '{config.name}': the executable '{STUB}' in the model's folder cannot be used here",
            hint=f"remove it, and name the environment that it was made for in parameter {ENVIRONMENT}, "
            f"or list the model's packages in a {REQUIREMENTS}; its Python may have any version from 3.8",
        )
    try:
        if value:
            return await _prepared(Path(value.replace(MODEL_DIRECTORY, str(files.model_dir))), files, settings)
        if backend_dir is not None and (backend_dir / BACKEND_ARCHIVE).is_file():
            return await _prepared(backend_dir / BACKEND_ARCHIVE, files, settings)
        requirements = requirements_of(files, backend_dir)
        if requirements is not None:
            return await _built(requirements, config.name, settings)
        return await environment_of_file(source, settings) if source is not None else SERVER_ENVIRONMENT
    except ServingError as error:
        raise ServingError(error.code, f"model '{config.name}': {error.message}", hint=error.hint) from error


async def environment_of_file(source: Path, settings: BackendSettings) -> Environment:
    """Return the environment that a Python file asks for in itself, the server's own where it asks for none."""
    wanted = await asyncio.to_thread(read_inline, source)
    if wanted is None or (not wanted.packages and wanted.accepts(sys.version_info[:3])):
        return SERVER_ENVIRONMENT
    builder = _builder(settings)
    if builder == "none":
        _log.info("the dependencies in %s are ignored: %s is none", source.name, BUILDER)
        return SERVER_ENVIRONMENT
    python = "" if wanted.accepts(sys.version_info[:3]) else wanted.requires_python

    async def build(folder: Path) -> None:
        requirements = folder.with_suffix(".txt")
        requirements.write_text("".join(f"{line}\n" for line in wanted.packages))
        try:
            await build_requirements(
                requirements, folder, builder, python=python, what=source.name, needed=NEEDED_BY_FUNCTIONS
            )
        finally:
            requirements.unlink()

    key = "inline-" + _new_digest(wanted.requires_python, *sorted(wanted.packages)).hexdigest()[:KEY_LETTERS]
    return await cached(key, build, settings, f"'{source.name}'")


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
    try:
        key = await asyncio.to_thread(_archive_key, path)
    except OSError as error:
        raise invalid(f"the archive '{path}' cannot be read: {error.strerror}") from error
    return await cached(key, lambda folder: unpack_archive(path, folder), settings, f"the archive '{path}'")


async def _built(requirements: Path, model: str, settings: BackendSettings) -> Environment:
    builder = _builder(settings)
    if builder == "none":
        _log.info("%s of model '%s' is ignored: %s is none", REQUIREMENTS, model, BUILDER)
        return SERVER_ENVIRONMENT
    key = await asyncio.to_thread(requirements_key, requirements)
    build = partial(build_requirements, requirements, builder=builder)
    return await cached(key, build, settings, f"{REQUIREMENTS} of model '{model}'")


def _builder(settings: BackendSettings) -> str:
    builder = settings.values.get(BUILDER, "auto")
    if builder not in BUILDERS:
        raise invalid(f"--backend-config python,{BUILDER}: expected one of {', '.join(BUILDERS)}, got '{builder}'")
    return builder


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


UNPACKED_FILES_MAX = 1_000_000
UNPACKED_BYTES_MAX = 64 * 1024**3
"""Largest content of an archive, unpacked; `unpacked_bytes_max` holds as well."""


async def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive of conda-pack, and run its conda-unpack, which rewrites paths.

    Raises:
        ServingError: It is not a valid archive, or has unsafe content.
    """
    if not hasattr(tarfile, "data_filter"):
        raise unsupported(f"the archive '{path}' cannot be unpacked safely by this Python", hint="use 3.11.4 or newer")
    started = time.monotonic()
    own = [sys.executable, "-P", "-m", __name__, str(path), str(folder)]
    try:
        await run_command(own, limit_s=BUILD_S_MAX)
    except CommandError as error:
        raise failure(f"the archive '{path}'", error.output) from error
    adapt = folder / "bin" / "conda-unpack"
    if adapt.is_file():
        command = [str(folder / "bin" / "python"), str(adapt)]
        try:
            await run_command(command, limit_s=BUILD_S_MAX - (time.monotonic() - started), env=variables())
        except CommandError as error:
            raise invalid(f"the archive '{path}': conda-unpack failed: {error}\n{error.output}") from error


def extract(path: Path, folder: Path) -> None:
    """Extract an archive in this process. Raises as `unpack_archive`."""
    folder.mkdir()
    limits = ArchiveLimits(UNPACKED_FILES_MAX, min(UNPACKED_BYTES_MAX, unpacked_bytes_max(path)))
    hint = "expected a .tar.gz made by conda-pack, or of the content of a folder made by `python -m venv`"
    try:
        with explained(hint):
            for archive, entry in tar_entries(path, limits):
                archive.extract(entry, folder, filter=_checked)
    except tarfile.FilterError as error:
        raise invalid(f"it is refused: {error}", hint="its content must stay in its folder") from error


def _checked(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return a member of an archive if it may be unpacked.

    Devices are refused, and paths and links that lead out of the folder. The interpreter of a virtual environment is
    such a link: it may lead to an interpreter of this machine.
    """
    path = PurePosixPath(member.name)
    if not (member.issym() and path.parent.name == "bin" and path.name.startswith("python")):
        return tarfile.data_filter(member, folder)
    target = PurePosixPath(member.linkname)
    if not target.is_absolute():
        return tarfile.data_filter(member, folder)
    if not (target.name.startswith("python") and os.path.isfile(target) and os.access(target, os.X_OK)):
        raise invalid(
            f"its interpreter {member.name} is a link to '{target}', which is no program of this machine",
            hint="make the virtual environment on this machine, or with the same Python at the same path; an archive "
            "of conda-pack brings its own",
        )
    inside = tarfile.data_filter(member.replace(linkname=path.name, deep=False), folder)
    return inside.replace(linkname=member.linkname, deep=False)


if __name__ == "__main__":
    sys.exit(limited(lambda: extract(Path(sys.argv[1]), Path(sys.argv[2]))))
