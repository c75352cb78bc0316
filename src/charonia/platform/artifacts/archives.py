"""Unpacks zip and tar archives from users, in an isolated process with limited memory.

Only files below the target folder are extracted: an archive with links, devices, or names that
lead out of the folder is refused as a whole.
"""

import contextlib
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from charonia.archives import (
    ArchiveLimits,
    explained,
    failure,
    larger_than,
    limited,
    open_zip,
    tar_entries,
    unpacked_bytes_max,
)
from charonia.core.errors import TooLargeError, invalid, too_large
from charonia.platform.artifacts.blobs import PIECE_BYTES, StorageFullError, demand_room, disk_faults
from charonia.platform.artifacts.manifest import FILES_MAX, check_together, is_content, safe_path
from charonia.platform.isolation.isolation import Isolation, SandboxAccess
from charonia.python_command import python_module

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Suffixes of archives. Files that are archives inside, such as .keras and .pt, are not unpacked."""

ENTRIES_MAX = 2 * FILES_MAX
"""Entries of an archive, including folders and unwanted files."""

UNPACK_S_MAX = 3600.0
"""Time limit for the process that unpacks."""

CHECK_S = 0.2
"""Interval between checks for a cancellation."""


def is_archive(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, name: str, folder: Path, isolation: Isolation, check: Callable[[], None]) -> None:
    """Unpack an archive in a process with limited memory, which reads only the archive and writes only the folder.

    Args:
        name: Its name, for messages and to tell its format.
        check: Called repeatedly; an exception cancels the work.

    Raises:
        TooLargeError: It has too many files or bytes, or needs too much memory.
        StorageFullError: The disk is full.
    """
    archive, folder = archive.absolute(), folder.absolute()
    access = SandboxAccess(read=[archive], write=[folder], project=None, network=False)
    end_s = time.monotonic() + UNPACK_S_MAX
    with isolation.room(None) as room:
        own = isolation.command(python_module(__name__, str(archive), name, str(folder)), room, access)
        with subprocess.Popen(
            own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=isolation.environment(room, installs=False),
            cwd=room.home,
            text=True,
        ) as process:
            try:
                while True:
                    check()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        output, _ = process.communicate(timeout=CHECK_S)
                        break
                    if time.monotonic() > end_s:
                        raise too_large(f"archive '{name}': it was not unpacked within {UNPACK_S_MAX:g} s")
            finally:
                process.kill()
    if process.returncode:
        raise failure(f"archive '{name}'", output, (TooLargeError, StorageFullError))


def extract(archive: Path, name: str, folder: Path) -> None:
    """Unpack an archive in this process. Raises as `unpack`."""
    allowed = unpacked_bytes_max(archive)
    total = 0
    seen: list[str] = []
    files = _zip_files if name.lower().endswith(".zip") else _tar_files
    with explained():
        for path, size, content in files(archive, allowed):
            place = safe_path(path)
            if not is_content(place):
                continue
            seen.append(place)
            if total + size > allowed:
                raise larger_than(allowed)
            demand_room(folder, size, what="its files")
            total = _write(content, folder / place, total, allowed)
    check_together(seen)


def _write(content: IO[bytes], target: Path, total: int, allowed: int) -> int:
    """Write a file and return the bytes so far; the sizes that an archive declares may be wrong."""
    with disk_faults("its files", target.parent):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise invalid(f"two of its entries are '{target.name}'") from None
        with file:
            while piece := content.read(PIECE_BYTES):
                total += len(piece)
                if total > allowed:
                    raise larger_than(allowed)
                file.write(piece)
    return total


def _zip_files(path: Path, allowed: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    with open_zip(path) as archive:
        entries = archive.infolist()
        if len(entries) > ENTRIES_MAX:
            raise too_large(f"expected at most {ENTRIES_MAX} entries, found more")
        for entry in entries:
            mode = entry.external_attr >> 16
            if entry.flag_bits & 1:
                raise invalid(f"'{entry.filename}' is encrypted")
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise invalid(f"'{entry.filename}' is a link or a device, expected files and folders")
            if not entry.filename.endswith("/"):  # `is_dir` cannot read an empty name
                safe_path(entry.filename)
                with archive.open(entry) as content:
                    yield entry.filename, entry.file_size, content


def _tar_files(path: Path, allowed: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    for archive, entry in tar_entries(path, ArchiveLimits(ENTRIES_MAX, allowed)):
        if not (entry.isreg() or entry.isdir()):
            raise invalid(f"'{entry.name}' is a link or a device, expected files and folders")
        if content := archive.extractfile(entry):
            yield entry.name, entry.size, content


if __name__ == "__main__":
    sys.exit(limited(lambda: extract(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))))
