"""Hands finished traces to a thread, so that neither disk nor network ever blocks the event loop."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceTree
from charonia.server.tracing.sampling import Sampling

_log = logging.getLogger(__name__)

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
        ...

    def retire(self, sampling: Sampling) -> None:
        """Finish a setting that is no longer in use; traces that have begun under it may follow."""
        ...

    def flush(self) -> None:
        """Write the collected traces that wait for no more."""
        ...

    def close(self) -> None:
        """Write the remaining traces."""
        ...


class TraceWriter:
    """The queue and the thread.

    Args:
        sink: The destination of traces.

    Attributes:
        dropped: Traces that were dropped because too many waited.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._queue: queue.Queue[tuple[Sampling, TraceTree | None, bool, int] | None] = queue.Queue(QUEUE_MAX)
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def put(self, sampling: Sampling, tree: TraceTree) -> None:
        """Queue a finished trace, or drop it at a limit; never blocks."""
        size = sum(_size(tensor) for trace in tree.traces for _, tensor in trace.tensors)
        with self._lock:
            has_room = self._waiting_bytes + size <= QUEUE_TENSOR_BYTES_MAX
            if has_room:
                self._waiting_bytes += size
        if not has_room:
            self._drop()
            return
        try:
            self._queue.put_nowait((sampling, tree, sampling.is_complete, size))
        except queue.Full:
            self._forget(size)
            self._drop()

    def retire(self, sampling: Sampling) -> None:
        """Queue the end of a setting that is no longer in use."""
        try:
            self._queue.put_nowait((sampling, None, False, 0))
        except queue.Full:
            sampling.is_retired = True
            _log.warning("traces wait to be written: the file of the former settings is complete only at shutdown")

    def close(self) -> None:
        """Write the queued traces and end; gives up after `CLOSE_S_MAX`. It blocks: call it in a thread."""
        try:
            self._queue.put(None, timeout=CLOSE_S_MAX)
        except queue.Full:
            _log.error("%d traces could not be written in time", self._queue.qsize())
            return
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive():
            _log.error("the last traces could not be written within %g s", CLOSE_S_MAX)

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th and so on
            _log.warning("%d traces were dropped: the writer cannot keep up", self.dropped)

    def _forget(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    def _work(self) -> None:
        flush_at_s = time.monotonic() + FLUSH_S
        while True:
            left_s = flush_at_s - time.monotonic()
            if left_s <= 0:  # also while further traces arrive
                self._guarded(self._sink.flush)
                flush_at_s = time.monotonic() + FLUSH_S
                continue
            try:
                item = self._queue.get(timeout=left_s)
            except queue.Empty:
                continue
            if item is None:
                self._guarded(self._sink.close)
                return
            sampling, tree, is_complete, size = item
            if tree is None:
                sampling.is_retired = True  # not earlier: the traces in the queue before this belong to the same file
                self._guarded(self._sink.retire, sampling)
            else:
                self._guarded(self._sink.write, sampling, tree, is_complete)
                self._forget(size)
            del item, tree  # a tensor of the last trace is not kept until the next

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        try:
            step(*args)
        except Exception:  # a trace that cannot be written must not end the thread that writes the others
            _log.exception("a trace could not be written")


def _size(tensor: Tensor) -> int:
    if tensor.datatype is DataType.BYTES:
        return sum(map(len, tensor.array.ravel().tolist()))
    return tensor.array.nbytes
