"""Builds environments from a requirements.txt, with uv or with venv and pip, and unpacks archives of conda-pack.

The external programs have a time limit, and errors include the end of their output.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import sysconfig
import tarfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from charonia.core.errors import invalid, unsupported
from charonia.die_with_parent import with_parent_death_signal
from charonia.server.backends.python.inline_metadata import InlineMetadata

BUILD_S_MAX = 1800.0
"""Time limit for one environment, downloads included."""

KEY_LETTERS = 24
"""Length of the digest in the key of an environment."""

OUTPUT_BYTES_MAX = 64 * 1024
"""How much of a program's output is kept, from its end."""

REFERENCED_FILES_MAX = 100_000
"""Most files in the folders that a requirements.txt refers to."""

UNPACKED_FILES_MAX = 1_000_000
UNPACKED_BYTES_MAX = 64 * 1024**3
"""Largest content of an archive, unpacked."""

_RECIPE = "1"
"""Part of every key; raised when the build procedure changes, so that environments are rebuilt."""

_INCLUDE = re.compile(r"\s*(-r|-c|--requirement|--constraint)\b")
_COMMENT = re.compile(r"(^|\s)#.*$")
_MADE_BY_BUILDS = re.compile(r"build|__pycache__|.*\.egg-info|\.git")
# These belong to the server's interpreter and would mislead the new one.
_FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_USER")


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


def inline_key(wanted: InlineMetadata) -> str:
    """Return the key of the environment for inline metadata: it depends on that, and on interpreter and platform."""
    digest = hashlib.sha256()
    own = (_RECIPE, sys.version, sys.base_prefix, sysconfig.get_platform())
    for part in (*own, wanted.requires_python, *sorted(wanted.dependencies)):
        digest.update(part.encode() + b"\0")
    return "inline-" + digest.hexdigest()[:KEY_LETTERS]


async def build_requirements(
    requirements: Path, folder: Path, builder: str, *, python: str = "", what: str = ""
) -> None:
    """Build the environment for a requirements.txt, with numpy, which workers need.

    Args:
        requirements: The file.
        folder: Folder of the new environment.
        builder: "uv", "pip", or "auto" for uv if it is found.
        python: Specifier of the version of its interpreter, "" for the server's interpreter; only uv finds others.
        what: What the requirements are of, for messages; "" for the file.

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
        make = [sys.executable, "-m", "venv", str(folder)]
        install = [interpreter, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    install += ["-r", requirements.name]
    place = requirements.parent
    await _run(make, place, what, "check that Python's module venv is installed completely, or install uv")
    await _run(install, place, what)
    try:
        await run_command([interpreter, "-c", "import numpy"], limit_s=BUILD_S_MAX, env=_variables())
    except CommandError:
        await _run([*install, "numpy"], place, what, f"workers need numpy: add it to {what}")


def _find_uv() -> list[str]:
    found = shutil.which("uv")
    if found is not None:
        return [found]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") is not None else []


def _variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _FOREIGN_VARIABLES}


async def _run(command: list[str], place: Path, what: str, hint: str = "") -> None:
    try:
        await run_command(command, limit_s=BUILD_S_MAX, env=_variables(), cwd=place)
    except CommandError as error:
        raise invalid(f"the environment of '{what}' cannot be built: {error}\n{error.output}", hint=hint) from error


async def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive of conda-pack, and run its conda-unpack, which rewrites paths.

    Raises:
        ServingError: It is not a valid archive, or has unsafe content.
    """
    end = threading.Event()
    started = time.monotonic()
    try:
        await asyncio.to_thread(_extract, path, folder, end)
    finally:
        end.set()
    adapt = folder / "bin" / "conda-unpack"
    if adapt.is_file():
        command = [str(folder / "bin" / "python"), str(adapt)]
        try:
            await run_command(command, limit_s=BUILD_S_MAX - (time.monotonic() - started), env=_variables())
        except CommandError as error:
            raise invalid(f"the archive '{path}': conda-unpack failed: {error}\n{error.output}") from error


def _extract(path: Path, folder: Path, end: threading.Event) -> None:
    """Extract an archive; stops when `end` is set."""
    if not hasattr(tarfile, "data_filter"):
        raise unsupported(f"the archive '{path}' cannot be unpacked safely by this Python", hint="use 3.11.4 or newer")
    files = size = 0
    folder.mkdir()
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                files += 1
                size += member.size
                if files > UNPACKED_FILES_MAX or size > UNPACKED_BYTES_MAX:
                    raise invalid(
                        f"the archive '{path}' holds more than {UNPACKED_FILES_MAX} files or {UNPACKED_BYTES_MAX} bytes"
                    )
                if end.is_set():
                    return
                archive.extract(member, folder, filter=_checked)
    except tarfile.FilterError as error:
        raise invalid(
            f"the archive '{path}' is refused: {error}", hint="its content must stay in its folder"
        ) from error
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise invalid(
            f"the archive '{path}' cannot be unpacked: {error}",
            hint="expected a .tar.gz made by conda-pack, or of the content of a folder made by `python -m venv`",
        ) from error


def _checked(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return a member of an archive if it may be unpacked.

    Devices are refused, and paths and links that lead out of the folder. The interpreter of a virtual environment is
    such a link: it may lead to an interpreter of this machine.

    Raises:
        FilterError: It may not be unpacked.
        ServingError: INVALID_ARG for an interpreter that this machine does not have.
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


async def run_command(
    command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program and return the end of its output, stdout and stderr together.

    Raises:
        CommandError: It could not be started, failed or took too long. It is no longer running.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(command, signal.SIGKILL),
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
