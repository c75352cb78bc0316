"""Reads archives of strangers: tar and zip, with bounds for everything that a compressed byte can stand for.

Headers are compressed as contents are: a tar of 1.6 kB may hold a name of 2 GiB. So a tar is read forward only, through
a counter that knows whether a header or a content is read, and a zip through a file that refuses large reads.

Other memory of a library, such as the dictionary of an LZMA stream, is bounded by the memory limit of the
process that unpacks: `limited` is its body, `failure` what its parent makes of its output.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import math
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from charonia.core.errors import Code, ServingError, TooLargeError, invalid, too_large

MEMORY_BYTES_MAX = 512 * 1024 * 1024
"""Address space of a process that unpacks, whatever the size of the archive."""

HEADER_BYTES_MAX = 256 * 1024
"""Headers of one entry of a tar: long names, PAX records, maps of sparse files."""

DIRECTORY_BYTES_MAX = 16 * 1024 * 1024
"""Central directory of a zip. An entry takes 46 bytes there, and about 15 times that in memory."""

UNPACKED_RATIO_MAX = 100
"""Contents of an archive, as a multiple of its size; see `UNPACKED_BYTES_FREE`."""

UNPACKED_BYTES_FREE = 1024 * 1024 * 1024
"""Contents that any archive may have, regardless of its size."""

GLOBAL_RECORDS_MAX = 1000
"""Global PAX records of a tar, which a reader copies for every entry."""

PADDING_BYTES_MAX = 1024 * 1024
"""What follows the last entry of a tar: zeros."""

READ_BYTES = 64 * 1024
"""Size of one read of a tar."""

ERROR_CHARS_MAX = 2000
"""Longest message of a process that unpacks."""

_STREAMS: Sequence[tuple[bytes, Callable[[Path], Any]]] = (
    (b"\x1f\x8b", gzip.GzipFile),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
    (b"\x5d\0\0", lzma.LZMAFile),
)


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """What an archive may contain.

    Attributes:
        entries: Files, folders and links.
        size_bytes: Their contents, skipped members included.
    """

    entries: int
    size_bytes: int


def unpacked_bytes_max(path: Path) -> int:
    """Return how many bytes the contents of an archive may have."""
    return max(UNPACKED_BYTES_FREE, UNPACKED_RATIO_MAX * path.stat().st_size)


def tar_entries(path: Path, limits: ArchiveLimits) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield each entry of a tar, which may be compressed. Read its content before the next entry, or not at all.

    Raises:
        TooLargeError: More entries, larger contents or larger headers than allowed.
        ServingError: INVALID_ARG for a sparse file, whose map has no bound.
        Exception: The libraries raise whatever a damaged archive makes them raise.
    """
    with _decompressed(path) as file:
        counted = _Counted(file, limits.size_bytes + limits.entries * 1024)
        with tarfile.open(fileobj=counted, mode="r|", bufsize=READ_BYTES) as archive:
            assert archive.fileobj is not None
            count = 0
            while (entry := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined] # which would keep all headers
                counted.header_end = math.inf
                count += 1
                if count > limits.entries:
                    raise too_large(f"expected at most {limits.entries} entries, found more")
                if len(archive.pax_headers) > GLOBAL_RECORDS_MAX:
                    raise too_large(f"expected at most {GLOBAL_RECORDS_MAX} global records, found more")
                if entry.issparse():
                    raise invalid(f"'{entry.name}' is a sparse file, expected plain files", hint="pack it without -S")
                yield archive, entry
                # One byte before the next header, whose read then finds an archive that was cut.
                archive.fileobj.seek(max(archive.fileobj.tell(), archive.offset - 1))
                counted.header_end = counted.position + HEADER_BYTES_MAX
        counted.header_end = counted.position + PADDING_BYTES_MAX
        while counted.read(READ_BYTES):
            pass  # to the end, where the checksum of the compressed data is
        if counted.position % tarfile.BLOCKSIZE:  # tarfile takes half a header for the end
            raise invalid("it ends in the middle of a block", hint="was it copied as a whole?")


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive to read from it.

    Raises:
        TooLargeError: Its directory, or the sizes in it, are larger than allowed.
        BadZipFile: Not a zip archive, or one with a damaged directory.
        OSError: The file cannot be read.
    """
    with _ZipSource(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except (OSError, ServingError, zipfile.BadZipFile):
            raise
        except Exception as error:  # bytes of the directory decide the exception
            raise zipfile.BadZipFile(f"its directory is damaged: {error}") from error
        with archive:
            allowed = unpacked_bytes_max(path)
            if sum(entry.file_size for entry in archive.infolist()) > allowed:
                raise larger_than(allowed)
            yield archive


def read_entry(archive: zipfile.ZipFile, name: str, limit_bytes: int) -> bytes:
    """Return the content of an entry of a zip archive.

    Raises:
        TooLargeError: It is longer.
        BadZipFile: It is damaged, or compressed with a method that cannot be read in pieces.
    """
    entry = archive.getinfo(name)
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"'{name}' is compressed with method {entry.compress_type}, expected deflate")
    if entry.file_size > limit_bytes:
        raise too_large(f"'{name}': expected at most {limit_bytes} bytes, got {entry.file_size}")
    return archive.read(entry)


def larger_than(allowed_bytes: int) -> TooLargeError:
    return too_large(
        f"its files have more than {allowed_bytes} bytes",
        hint=f"an archive may have {UNPACKED_RATIO_MAX} times its own size, at least 1 GiB; send the files themselves",
    )


@contextmanager
def explained(hint: str = "") -> Iterator[None]:
    """Turn whatever a reader of archives raises into an error for users.

    Args:
        hint: Expected contents, for damaged archives.

    Raises:
        TooLargeError: It needs too much memory.
        ServingError: INVALID_ARG for a damaged archive.
    """
    try:
        yield
    except (ServingError, tarfile.FilterError):
        raise
    except MemoryError:
        raise too_large(f"it needs more than {MEMORY_BYTES_MAX >> 20} MiB of memory to be unpacked") from None
    except Exception as error:  # what an archive holds decides what its reader raises
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise invalid(f"it cannot be read: {reason or type(error).__name__}", hint=hint) from error


def limited(work: Callable[[], None]) -> int:
    """Do the work of a process that unpacks, with limited memory. Return the exit status and print why it failed."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system lacks the limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    try:
        work()
    except ServingError as error:
        failed = error
    else:
        return 0
    kind, code, message = type(failed).__name__, failed.code.value, failed.message[:ERROR_CHARS_MAX]
    sys.stdout.write(json.dumps({"kind": kind, "code": code, "message": message, "hint": failed.hint}) + "\n")
    return 1


def failure(what: str, output: str, kinds: Sequence[type[ServingError]] = (TooLargeError,)) -> ServingError:
    """Return why a process that unpacks has failed.

    Args:
        what: The archive, for the message.
        output: Output of the process.
        kinds: Errors that keep their class; others become `ServingError`.
    """
    try:
        said = json.loads(output)
        kind = next((each for each in kinds if each.__name__ == said["kind"]), ServingError)
        return kind(Code(said["code"]), f"{what}: {said['message']}", hint=said["hint"])
    except (ValueError, KeyError, TypeError):
        return invalid(f"{what}: the process that unpacked it was killed", hint="the archive is damaged")


@contextmanager
def _decompressed(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        start = file.read(8)
    opened = next((opened for magic, opened in _STREAMS if start.startswith(magic)), None)
    with path.open("rb") if opened is None else opened(path) as stream:
        yield stream


class _Counted(io.RawIOBase):
    """The bytes of a tar, counted.

    Attributes:
        position: Bytes that were read.
        header_end: Where the headers of the next entry must have ended.
    """

    def __init__(self, file: IO[bytes], size_bytes_max: int) -> None:
        self.position = 0
        self.header_end = float(HEADER_BYTES_MAX)
        self._file = file
        self._size_bytes_max = size_bytes_max

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(min(size, READ_BYTES) if size >= 0 else READ_BYTES)
        self.position += len(piece)
        if self.position > self.header_end:
            raise too_large(f"one entry has headers of more than {HEADER_BYTES_MAX} bytes")
        if self.position > self._size_bytes_max:
            raise larger_than(self._size_bytes_max)
        return piece


class _ZipSource(io.FileIO):
    """The file of a zip archive. Contents are read in small pieces, the directory as a whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > DIRECTORY_BYTES_MAX:
            raise too_large(f"its directory has more than {DIRECTORY_BYTES_MAX} bytes")
        return super().read(size)
