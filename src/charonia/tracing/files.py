"""Writes traces into files, as JSON.

Every file is a JSON array whenever somebody looks at it, also when the server dies or the disk is full. The traces of a
setting with a log frequency, and those of one with a count that was reached, are in `FILE.0`, `FILE.1` and so on; all
others in `FILE`.
"""

import contextlib
import logging
from io import FileIO
from pathlib import Path

from charonia.core.trace import TraceTree
from charonia.core.trace_settings import UNLIMITED
from charonia.tracing.entries import entries
from charonia.tracing.sampling import Sampling

_log = logging.getLogger(__name__)

BUFFER_BYTES_MAX = 8 * 1024 * 1024
"""Traces of one setting that are held in memory; with more they are written early."""

FILE_BYTES_MAX = 1024 * 1024 * 1024
"""Size of `FILE` from which on no more is added to it."""


class _Buffer:
    """Traces of one setting that are not written."""

    __slots__ = ("count", "parts", "size")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.count = 0

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        self.size += len(part)
        self.count += 1

    def take(self) -> bytes:
        parts, self.parts = self.parts, []
        self.size = self.count = 0
        return b",".join(parts)


class TraceFiles:
    """A `Sink` of files.

    Args:
        path: `FILE`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._next = 0
        self._buffers: dict[Sampling, _Buffer] = {}
        self._file: FileIO | None = None
        self._end = 0  # where in it the closing bracket is
        self._is_full = False

    def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
        """Take a trace. See `charonia.tracing.writer.Sink`."""
        buffer = self._buffers.setdefault(sampling, _Buffer())
        text = entries(tree)
        if text:
            buffer.add(text)
        frequency = sampling.settings.log_frequency
        is_due = is_complete or (frequency and buffer.count >= frequency)
        if is_due or buffer.size >= BUFFER_BYTES_MAX or sampling.is_retired:
            self._save(sampling, buffer, is_due=bool(is_due))
        if sampling.is_retired:
            del self._buffers[sampling]

    def retire(self, sampling: Sampling) -> None:
        """Write what there is of a setting."""
        buffer = self._buffers.pop(sampling, None)
        if buffer is not None:
            self._save(sampling, buffer)

    def flush(self) -> None:
        """Write what has no number of traces to wait for."""
        for sampling, buffer in self._buffers.items():
            if not sampling.settings.log_frequency and sampling.settings.count == UNLIMITED:
                self._save(sampling, buffer)

    def close(self) -> None:
        """Write what is left."""
        for sampling in list(self._buffers):
            self.retire(sampling)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _save(self, sampling: Sampling, buffer: _Buffer, *, is_due: bool = False) -> None:
        if not buffer.count:
            return
        text = buffer.take()
        try:
            if is_due or sampling.settings.log_frequency:
                path = Path(f"{self._path}.{self._next}")
                self._next += 1
                _write_whole(path, b"[%b]" % text)
            else:
                self._append(text)
        except OSError as error:
            _log.error("traces are lost: '%s' cannot be written: %s", self._path, error.strerror or error)

    def _append(self, text: bytes) -> None:
        if self._is_full:
            return
        if self._file is None:
            self._file = FileIO(self._path, "wb")
        try:
            if self._end:
                self._file.seek(self._end)
            added = (b",%b]" if self._end else b"[%b]") % text
            _write_all(self._file, added)
        except OSError:
            self._undo(self._file)
            raise
        self._end += len(added) - 1
        if self._end >= FILE_BYTES_MAX:
            self._is_full = True
            self._file.close()
            self._file = None
            _log.error("'%s' has reached %d bytes: no more traces are added to it", self._path, FILE_BYTES_MAX)

    def _undo(self, file: FileIO) -> None:
        """Take back what was written in part."""
        with contextlib.suppress(OSError):
            file.seek(self._end)
            if self._end:
                file.write(b"]")
            file.truncate()


def _write_whole(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer, which would keep what the disk has no room for."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
