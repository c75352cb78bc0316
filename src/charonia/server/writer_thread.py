"""A thread that writes items for the event loop, which never waits: if the bounded queue is full, items are dropped."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class WriterThread(Generic[T]):
    """The queue and the thread.

    Args:
        what: Plural of an item, for messages.
        write: Writes an item, in the thread.
        flush: Called in the thread every `flush_s`.
        close: Called in the thread after the last item.
        items_max: Items that may wait.
        bytes_max: Size of the items that may wait.
        flush_s: Interval between two flushes.
        close_s_max: Time limit to write the last items.

    Attributes:
        dropped: Items that were dropped.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[T], None],
        flush: Callable[[], None],
        close: Callable[[], None],
        *,
        items_max: int,
        bytes_max: int,
        flush_s: float,
        close_s_max: float,
    ) -> None:
        self.dropped = 0
        self._what = what
        self._write, self._flush, self._close = write, flush, close
        self._queue: queue.Queue[tuple[T, int] | None] = queue.Queue(items_max)
        self._bytes_max = bytes_max
        self._flush_s, self._close_s_max = flush_s, close_s_max
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=what, daemon=True)
        self._thread.start()

    def put(self, item: T, size: int) -> None:
        """Queue an item, or drop and count it; never blocks."""
        if not self.offer(item, size):
            self.drop("the writer cannot keep up")

    def offer(self, item: T, size: int = 0) -> bool:
        """Queue an item; return False at a limit."""
        with self._lock:
            if self._waiting_bytes + size > self._bytes_max:
                return False
            self._waiting_bytes += size
        try:
            self._queue.put_nowait((item, size))
        except queue.Full:
            self._subtract(size)
            return False
        return True

    def drop(self, reason: str) -> None:
        """Count an item that is lost; the log shows the 1st, 2nd, 4th, 8th and so on."""
        with self._lock:
            self.dropped += 1
            count = self.dropped
        if count & (count - 1) == 0:
            _log.warning("%d %s were dropped: %s", count, self._what, reason)

    def close(self) -> None:
        """Write the queued items and end, for a limited time. It blocks: call it in a thread."""
        try:
            self._queue.put(None, timeout=self._close_s_max)
        except queue.Full:
            _log.error("%d %s could not be written in time", self._queue.qsize(), self._what)
            return
        self._thread.join(self._close_s_max)
        if self._thread.is_alive():
            _log.error("the last %s could not be written within %g s", self._what, self._close_s_max)

    def _subtract(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    def _work(self) -> None:
        flush_at_s = time.monotonic() + self._flush_s
        while True:
            left_s = flush_at_s - time.monotonic()
            if left_s <= 0:  # also while more items arrive
                self._guarded(self._flush)
                flush_at_s = time.monotonic() + self._flush_s
                continue
            try:
                entry = self._queue.get(timeout=left_s)
            except queue.Empty:
                continue
            if entry is None:
                self._guarded(self._close)
                return
            self._guarded(self._write, entry[0])
            self._subtract(entry[1])
            del entry  # a tensor of the last item is not kept until the next

    def _guarded(self, step: Callable[..., None], *items: T) -> None:
        try:
            step(*items)
        except Exception:  # an item that cannot be written must not end the thread that writes the others
            _log.exception("one of the %s could not be written", self._what)
