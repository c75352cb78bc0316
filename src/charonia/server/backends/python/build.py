"""Builds environments from a requirements.txt, with uv or with venv and pip.

The external programs have a time limit, and errors include the end of their output.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from charonia.core.errors import ServingError, invalid
from charonia.die_with_parent import with_parent_death_signal
from charonia.python_command import python_code, python_module
from charonia.server.backends.python.inline_metadata import InlineMetadata
from charonia.server.channel.cuda_driver import is_usable

_log = logging.getLogger(__name__)

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
    digest = hashlib.sha256()
    for part in (_RECIPE, sys.version, sys.base_prefix, sysconfig.get_platform()):
        digest.update(part.encode() + b"\0")
    try:
        _digest_requirements(digest, path, set())
    except OSError as error:
        raise invalid(f"'{path}' cannot be read: {error}") from error
    return "requirements-" + digest.hexdigest()[:KEY_LETTERS]


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


def inline_key(wanted: InlineMetadata) -> str:
    """Return the key of the environment for inline metadata: it depends on that, and on interpreter and platform."""
    digest = hashlib.sha256()
    own = (_RECIPE, sys.version, sys.base_prefix, sysconfig.get_platform())
    for part in (*own, wanted.requires_python, *sorted(wanted.dependencies)):
        digest.update(part.encode() + b"\0")
    return "inline-" + digest.hexdigest()[:KEY_LETTERS]


async def build_requirements(
    requirements: Path, folder: Path, builder: str, *, python: str = "", what: str = "", needed: Sequence[str] = NEEDED
) -> None:
    """Build the environment for a requirements.txt, with what workers need.

    Args:
        requirements: The file.
        folder: Folder of the new environment.
        builder: "uv", "pip", or "auto" for uv if it is found.
        python: Specifier of the version of its interpreter, "" for the server's interpreter; only uv finds others.
        what: What the requirements are of, for messages; "" for the file.
        needed: Packages that workers need, installed unless the requirements have them.

    Raises:
        ServingError: With the builder's output.
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
