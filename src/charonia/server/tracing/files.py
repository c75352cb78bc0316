"""Writes traces into JSON files, in the format of Triton's trace files.

Every file is a valid JSON array at any time, even after a crash of the server or with a full disk. The traces of a
setting with a log frequency, and of a setting whose count is reached, are in `FILE.0`, `FILE.1` and so on; all others
in `FILE`.
"""

import contextlib
import logging
import os
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor, array_bytes
from charonia.core.trace import Trace, TraceLevel, TraceTree, ordered
from charonia.server.tracing.sampling import Sampling
from charonia.server.writer_thread import WriterThread
from charonia.wire.trace_settings import UNLIMITED

QUEUE_MAX = 4096
"""Finished traces that wait to be written; more are dropped."""

QUEUE_TENSOR_BYTES_MAX = 256 * 1024 * 1024
"""Size of the tensors of traces that wait to be written; traces that would exceed it are dropped."""

FLUSH_S = 1.0
"""Interval between two flushes."""

CLOSE_S_MAX = 10.0
"""Time limit to write the last traces at shutdown."""


class Sink(Protocol):
    """The destination of traces. All methods are called in one thread."""

    def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
        """Take a trace.

        Args:
            sampling: The setting that it was picked under.
            tree: The trace.
            is_complete: Whether it is the last one of the setting's count.
        """

    def retire(self, sampling: Sampling) -> None:
        """Finish an unused setting; traces that have begun under it may follow."""

    def flush(self) -> None:
        """Write the complete collected traces."""

    def close(self) -> None:
        """Write the remaining traces."""


class TraceWriter(WriterThread[tuple[Sampling, TraceTree | None, bool]]):
    """Writes traces in a thread.

    Args:
        sink: The destination of traces.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        super().__init__(
            "traces",
            self._take,
            sink.flush,
            sink.close,
            items_max=QUEUE_MAX,
            bytes_max=QUEUE_TENSOR_BYTES_MAX,
            flush_s=FLUSH_S,
            close_s_max=CLOSE_S_MAX,
        )

    def add(self, sampling: Sampling, tree: TraceTree) -> None:
        """Queue a finished trace, or drop it at a limit; never blocks."""
        size = sum(array_bytes(tensor.array) for trace in tree.traces for _, tensor in trace.tensors)
        self.put((sampling, tree, sampling.is_complete), size)

    def retire(self, sampling: Sampling) -> None:
        """Queue the end of an unused setting."""
        if not self.offer((sampling, None, False)):
            sampling.is_retired = True
            _log.warning("traces wait to be written: the file of the former settings is complete only at shutdown")

    def _take(self, item: tuple[Sampling, TraceTree | None, bool]) -> None:
        sampling, tree, is_complete = item
        if tree is None:
            sampling.is_retired = True  # not earlier: the traces in the queue before this belong to the same file
            self._sink.retire(sampling)
        else:
            self._sink.write(sampling, tree, is_complete)


_log = logging.getLogger(__name__)

ELEMENTS_MAX = 1_000_000
"""Limit of written elements of a tensor; a larger one is truncated and ends with "..."."""

BUFFER_BYTES_MAX = 8 * 1024 * 1024
"""Traces of one setting that are held in memory; beyond this, they are written early."""

FILE_BYTES_MAX = 1024 * 1024 * 1024
"""Limit of the size of `FILE`."""


def entries(tree: TraceTree) -> bytes:
    """Return the JSON objects of all traces of a tree, with commas between them."""
    lines: list[bytes] = []
    for trace in tree.traces:
        events = trace.events + tree.front if trace is tree.root else trace.events
        if trace.model_name:
            lines.append(orjson.dumps(_head(trace)))
        if tree.level & TraceLevel.TIMESTAMPS:
            lines += [
                b'{"id":%d,"timestamps":[{"name":"%b","ns":%d}]}' % (trace.id, name.encode(), ns)
                for name, ns in ordered(events)
            ]
        lines += [_tensor(trace.id, activity, tensor) for activity, tensor in trace.tensors]
    return b",".join(lines)


def _head(trace: Trace) -> dict[str, object]:
    head: dict[str, object] = {
        "id": trace.id,
        "model_name": trace.model_name,
        "model_version": int(trace.model_version),
    }
    if trace.request_id:
        head["request_id"] = trace.request_id
    if trace.parent_id:
        head["parent_id"] = trace.parent_id
    return head


def _tensor(number: int, activity: str, tensor: Tensor) -> bytes:
    return orjson.dumps(
        {
            "id": number,
            "activity": activity,
            "tensor": {
                "name": tensor.name,
                "data": _data(tensor),
                "shape": ",".join(map(str, tensor.shape)),
                "dtype": tensor.datatype.wire,
            },
        }
    )


def _data(tensor: Tensor) -> str:
    elements = tensor.array.ravel()
    is_cut = elements.size > ELEMENTS_MAX
    elements = elements[:ELEMENTS_MAX]
    if tensor.datatype is DataType.BYTES:
        texts = [f'"{element.decode("utf-8", "backslashreplace")}"' for element in elements.tolist()]
    elif tensor.datatype is DataType.BOOL:
        texts = [str(int(element)) for element in elements.tolist()]
    elif tensor.datatype is DataType.BF16:
        texts = [_number(element) for element in (elements.astype(np.uint32) << 16).view(np.float32)]
    else:
        texts = [_number(element) for element in elements]
    return ",".join(texts) + (",..." if is_cut else "")


def _number(element: np.generic) -> str:
    return str(element).removesuffix(".0")


class _Buffer:
    """The traces of one setting that are not written yet."""

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
        self._path = os.path.abspath(os.path.expanduser(path))
        self._next = 0
        self._buffers: dict[Sampling, _Buffer] = {}
        self._file: FileIO | None = None
        self._end = 0  # where in it the closing bracket is
        self._is_full = False

    def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
        """Take a trace. See `charonia.server.tracing.files.Sink`."""
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
        """Write the remaining traces of a setting."""
        buffer = self._buffers.pop(sampling, None)
        if buffer is not None:
            self._save(sampling, buffer)

    def flush(self) -> None:
        """Write the traces of settings that wait for no number of traces."""
        for sampling, buffer in self._buffers.items():
            if not sampling.settings.log_frequency and sampling.settings.count == UNLIMITED:
                self._save(sampling, buffer)

    def close(self) -> None:
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
        """Remove an incomplete write."""
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
    """Write without a buffer, which would keep data that a full disk refused."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
