"""The reading side of a worker's connection.

The worker has no reader thread (leader/followers pattern): one of the waiting threads is the leader and reads for all.
Messages are decoded at once, because descriptors belong to messages in order of arrival.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from typing import TYPE_CHECKING

from ....channel import channel
from ....channel.datatypes import TritonModelException
from .host import Inbox

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Any

POLL_READS_MAX = 16
"""Reads of one look at the connection that does not wait, so that a busy server cannot keep a model from its work."""

THREADS_ALONE = 2
"""Threads of a worker whose model has started none: the main thread, and the one that watches for the server's end."""

SERVER_GONE = "the server has gone"


class Disconnected(TritonModelException):
    """The server has gone."""


class ChannelReader:
    """Reads messages: one thread at a time, and always one while any thread waits.

    Args:
        sock: The socket that the server writes to, blocking.
        receiver: Assembles messages from bytes.
        on_message: Handles a message. An exception of it ends the connection.
        on_end: Called once when nothing more can be read, with the reason.

    Attributes:
        awake_ns: How long `stay_awake` polls.
        is_over: Whether nothing more can be read.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: channel.Receiver,
        on_message: Callable[[channel.Incoming], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.awake_ns = 0
        self.is_over = False
        self._sock = sock
        self._buffer = memoryview(bytearray(channel.RECEIVE_BYTES))  # other connections have threads of their own
        self._receiver = receiver
        self._on_message = on_message
        self._on_end = on_end
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._lead = threading.Lock()
        self._followers: dict[threading.Event, None] = {}
        self._followers_lock = threading.Lock()

    def wait(self, inbox: Inbox[Any]) -> None:
        """Return when the inbox holds something; takes part in reading until then.

        Raises:
            Disconnected: The server has gone. Exceptions of `on_message` propagate, too.
        """
        while not inbox.items:
            if self._lead.acquire(False):
                try:
                    while not inbox.items:
                        self._read(True)
                finally:
                    self._lead.release()
                    self._hand_on()
            else:
                self._follow(inbox)

    def poll(self) -> None:
        """Handle messages that have arrived, without waiting, unless another thread reads."""
        if self.is_over or not self._lead.acquire(False):
            return
        try:
            for _ in range(POLL_READS_MAX):
                self._read(False)
        except BlockingIOError:
            pass  # there is nothing more
        finally:
            self._lead.release()
            self._hand_on()

    def stay_awake(self) -> None:
        """Wait without sleeping, for as long as the server has asked for, until there is something to read."""
        # A polling thread hardly releases the interpreter's lock, which would starve other threads of the model.
        if self.awake_ns and threading.active_count() <= THREADS_ALONE:
            channel.poll_for(self._readable, self.awake_ns)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self._sock.fileno(), self.poll)

    def close(self) -> None:
        """In a process that the model has forked: leave the connection alone."""
        self._sock.close()

    def _read(self, waits: bool) -> None:
        """Read once. Raises BlockingIOError when it is not to wait and there is nothing."""
        if self.is_over:
            raise Disconnected(SERVER_GONE)
        try:
            data, fds = channel.receive(self._sock, 0 if waits else socket.MSG_DONTWAIT, self._buffer)
            if not data:
                self._end(SERVER_GONE)
                if not waits:
                    raise BlockingIOError
            for message in self._receiver.feed(data, fds):
                self._on_message(message)
        except BlockingIOError:
            raise
        except Disconnected:
            self._end(SERVER_GONE)
            raise
        except BaseException as error:  # what follows cannot be understood any more
            self._end(f"a message of the server cannot be read: {type(error).__name__}: {error}")
            raise

    def _end(self, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        for loop in list(self._loops):
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.remove_reader, self._sock.fileno())
        self._on_end(reason)

    def _follow(self, inbox: Inbox[Any]) -> None:
        """Wait until the inbox holds something, or the lead may be free."""
        event = threading.Event()
        with self._followers_lock:
            self._followers[event] = None
        inbox.listen(event.set)
        # A leader that stopped before this look at the lead may not have seen this follower.
        if self._lead.locked() and not inbox.items:
            event.wait()
        with self._followers_lock:
            self._followers.pop(event, None)
        # It may have been woken to take the lead and have no need for it any more.
        if inbox.items:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake a thread that waits, unless one leads."""
        if self._followers and not self._lead.locked():
            with self._followers_lock:
                for event in self._followers:
                    if not event.is_set():
                        event.set()
                        return
