"""Unpacks archives that somebody has sent: zip and tar.

Only files come out of them, below the folder that they are unpacked into, and not more than `UNPACKED_RATIO_MAX` times
the size of the archive: an archive with links, devices, or names that lead out of the folder is refused as a whole.
"""

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from charonia.core.errors import ServingError, invalid
from charonia.platform.artifacts.blobs import PIECE_BYTES, demand_room
from charonia.platform.artifacts.faults import disk_faults, too_large
from charonia.platform.artifacts.paths import FILES_MAX, check_together, is_content, safe_path

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""What an archive's name ends with. Files that are archives inside, such as .keras and .pt, stay as they are."""

UNPACKED_RATIO_MAX = 100
"""How much larger than the archive its files may be; see `UNPACKED_BYTES_FREE`."""

UNPACKED_BYTES_FREE = 1024 * 1024 * 1024
"""Bytes that any archive may have, whatever its own size."""

ENTRIES_MAX = 2 * FILES_MAX
"""Entries of an archive, folders and unwanted files among them."""

PADDING_BYTES_MAX = 1024 * 1024
"""What follows the last entry of a tar: zeros."""


def is_archive(name: str) -> bool:
    """Return whether a file is an archive, by its name."""
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, name: str, folder: Path, check: Callable[[], None]) -> None:
    """Unpack an archive.

    Args:
        archive: The file.
        name: Its name, for messages and as what it is read.
        folder: An empty folder.
        check: Called again and again; what it raises ends the work.

    Raises:
        TooLargeError: It holds too many files or bytes.
        StorageFullError: There is no room for it.
        ServingError: INVALID_ARG for one that is damaged, or holds what it must not.
    """
    allowed = max(UNPACKED_BYTES_FREE, UNPACKED_RATIO_MAX * archive.stat().st_size)
    read = _zip_entries if name.lower().endswith(".zip") else _tar_entries
    total = 0
    seen: list[str] = []
    with _explained(name):
        for count, (path, size, content) in enumerate(read(archive)):
            check()
            if count >= ENTRIES_MAX:
                raise too_large(f"archive '{name}': expected at most {ENTRIES_MAX} entries, found more")
            if content is None or not is_content(safe_path(path)):
                continue
            seen.append(safe_path(path))
            if total + size > allowed:
                raise _bomb(name, allowed)
            demand_room(folder, size, what=f"archive '{name}'")
            total = _write(content, folder / seen[-1], total, allowed, name)
        check_together(seen)


def _write(content: IO[bytes], target: Path, total: int, allowed: int, name: str) -> int:
    """Write a file and return the bytes so far; what an archive says of its sizes need not be so."""
    with disk_faults(f"archive '{name}'", target.parent):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise invalid(f"archive '{name}': two of its entries are '{target.name}'") from None
        with file:
            while piece := content.read(PIECE_BYTES):
                total += len(piece)
                if total > allowed:
                    raise _bomb(name, allowed)
                file.write(piece)
    return total


def _zip_entries(path: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            mode = entry.external_attr >> 16
            if entry.flag_bits & 1:
                raise invalid(f"'{entry.filename}' is encrypted")
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise invalid(f"'{entry.filename}' is a link or a device, expected files and folders")
            if entry.is_dir():
                yield entry.filename, 0, None
            else:
                with archive.open(entry) as content:
                    yield entry.filename, entry.file_size, content


def _tar_entries(path: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    with tarfile.open(path, "r:*") as archive:
        for entry in archive:
            if not (entry.isreg() or entry.isdir()):
                raise invalid(f"'{entry.name}' is a link or a device, expected files and folders")
            yield entry.name, entry.size, archive.extractfile(entry) if entry.isreg() else None
        assert archive.fileobj is not None
        archive.fileobj.read(PADDING_BYTES_MAX)  # to the end, where the checksum of what is compressed stands


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise invalid(f"archive '{name}' cannot be read: {error}") from None
    except OSError as error:
        raise invalid(f"archive '{name}' cannot be read: {error.strerror or error}") from None
    except ServingError as error:
        if error.message.startswith("archive"):
            raise
        raise invalid(f"archive '{name}': {error.message}", hint=error.hint) from None


def _bomb(name: str, allowed: int) -> ServingError:
    return too_large(
        f"archive '{name}': its files have more than {allowed} bytes, {UNPACKED_RATIO_MAX} times its own size",
        hint="send the files themselves",
    )
