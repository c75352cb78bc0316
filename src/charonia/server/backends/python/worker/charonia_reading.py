"""Who reads a connection: whichever thread waits for something takes the lead and reads for all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from charonia.server.backends.python.worker.charonia_host import Inbox

POLL_READS_MAX = 16
"""Reads of one look at the connection that does not wait, so that a busy server cannot keep a model from its work."""


class SharedReading:
    """Has at most one thread read at any time, and sees to it that somebody does while anybody waits.

    Args:
        read: Reads once and puts what has come into inboxes. Given whether to wait; raises BlockingIOError when it is
            not to wait and there is nothing.
    """

    def __init__(self, read: Callable[[bool], None]) -> None:
        self._read = read
        self._lead = threading.Lock()
        self._followers: dict[threading.Event, None] = {}
        self._followers_lock = threading.Lock()

    def wait(self, inbox: Inbox[Any]) -> None:
        """Return when the inbox holds something; takes part in reading until then."""
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
        """Take in what has arrived, without waiting; nothing to do while another thread reads."""
        if not self._lead.acquire(False):
            return
        try:
            for _ in range(POLL_READS_MAX):
                self._read(False)
        except BlockingIOError:
            pass  # there is nothing more
        finally:
            self._lead.release()
            self._hand_on()

    def _follow(self, inbox: Inbox[Any]) -> None:
        """Wait until the inbox holds something, or the lead may be free."""
        event = threading.Event()
        with self._followers_lock:
            self._followers[event] = None
        inbox.listen(event.set)
        # Whoever has let go of the lead before it was looked at here may not have seen this follower.
        if self._lead.locked() and not inbox.items:
            event.wait()
        with self._followers_lock:
            self._followers.pop(event, None)
        # It may have been woken to take the lead and have no need for it any more.
        if inbox.items:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake a thread that waits, unless somebody leads."""
        if self._followers and not self._lead.locked():
            with self._followers_lock:
                for event in self._followers:
                    if not event.is_set():
                        event.set()
                        return
