"""One end of a channel on an event loop: what is sent, what arrives, and the references to shared memory.

`channel.py` has the format of messages. The other end is a worker process, or another process of the
server. Messages of one iteration of the event loop leave in one call of the system.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final, Protocol

from charonia.core.native import mypyc_attr
from charonia.server.channel.channel import FDS_MAX, Incoming, Outgoing, Receiver, receive, remaining, send_some
from charonia.server.channel.regions import ChannelError, Mappings, RegionPool

_log = logging.getLogger(__name__)

SOCKET_BYTES: Final = 1024 * 1024
"""Socket buffer in each direction: holds a batch of small tensors."""

RELEASES_HELD_MAX: Final = 8
"""Dropped references to the other end's regions that may wait for the next message; with more, one is sent now."""


class ChannelEnd:
    """Sends and receives messages. Not thread-safe: use it on the event loop's thread.

    Args:
        name: Who is at the other end, for logs.
        sending: Non-blocking socket to send on.
        receiving: Non-blocking socket to receive on, perhaps the same one.
        on_message: Called with each message.
        on_broken: Called with the reason when the other end must be given up: it sends what cannot be read, nothing can
            be sent to it, or a message cannot be handled for a fault of this end.
        on_end: Called when the other end sends no more, and after `on_broken` for what it has sent.
        on_read: Called after messages that were received together.
        shares: Whether neither end writes to what it has received: then tensors that lie in a region of either end are
            named wherever they go, and `pool.lend` gives memory whose content is never copied.

    Attributes:
        unsent: What waits for the other end to read.
        unsent_bytes: Its size.
    """

    def __init__(
        self,
        name: str,
        sending: socket.socket,
        receiving: socket.socket,
        *,
        on_message: Callable[[Incoming], None],
        on_broken: Callable[[str], None],
        on_end: Callable[[], None],
        on_read: Callable[[], None] | None = None,
        shares: bool = False,
    ) -> None:
        self._mappings = Mappings(forwards=True)
        self.pool = RegionPool(self._mappings if shares else None, forwards=True, names_own=shares)
        self.unsent: list[bytes | bytearray | memoryview] = []
        self.unsent_bytes = 0
        self._name = name
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_end = on_end
        self._on_read = on_read
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(self._mappings, self.pool)
        self._unsent_fds: list[int] = []
        self._sending, self._receiving = sending, receiving
        self._is_closed = False
        self._loop.add_reader(receiving.fileno(), self._readable)

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message, together with others of the same iteration of the event loop.

        Args:
            at_once: Send it now, with all waiting messages.

        Raises:
            ChannelError: It is too large.
        """
        outgoing = outgoing or Outgoing(self.pool)
        buffers = outgoing.frame(header)
        if not (at_once or self.unsent):
            self._loop.call_soon(self._write)
        self.unsent += buffers
        self.unsent_bytes += sum(map(len, buffers))
        # A descriptor may arrive before its message, never after it.
        self._unsent_fds += outgoing.fds
        if at_once:
            self._write()

    def drop(self, regions: list[int]) -> None:
        self._mappings.drop(regions)

    def read(self) -> bool | None:
        """Handle data that can be read now; return None when there is none, False at the end of the connection."""
        try:
            data, fds = receive(self._receiving)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if not data:
            return False
        try:
            for message in self._receiver.feed(data, fds):
                self._on_message(message)
            if self._on_read is not None:
                self._on_read()
        except ChannelError as error:
            self._on_broken(f"it sent something that cannot be read: {error}")
            return False
        except Exception as fault:  # a bug: requests would wait forever
            _log.exception("a message of '%s' cannot be handled", self._name)
            self._on_broken(
                f"the server met a fault of its own with one of its messages: {type(fault).__name__}: {fault}"
            )
            return False
        return True

    def close(self) -> None:
        """Close the sockets and give all memory back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._discard()
        self._loop.remove_reader(self._receiving.fileno())
        self._loop.remove_writer(self._sending.fileno())
        self._sending.close()
        self._receiving.close()
        self._receiver.close()
        self._mappings.close()
        self.pool.close()

    def _write(self) -> None:
        if self._is_closed:
            return
        try:
            while self.unsent:
                sent = send_some(self._sending, self.unsent, self._unsent_fds)
                self._unsent_fds = self._unsent_fds[FDS_MAX:]
                self.unsent = remaining(self.unsent, sent)
                self.unsent_bytes -= sent
        except BlockingIOError:
            self._loop.add_writer(self._sending.fileno(), self._writable)
        except (BrokenPipeError, ConnectionResetError):  # the other end has gone; reading finds out why
            self._discard()
        except OSError as error:
            self._discard()
            self._on_broken(f"a message cannot be sent to it: {error}")

    def _discard(self) -> None:
        self.unsent.clear()
        self.unsent_bytes = 0

    def _writable(self) -> None:
        self._loop.remove_writer(self._sending.fileno())
        self._write()

    def _readable(self) -> None:
        if self.read() is False and not self._is_closed:
            self._loop.remove_reader(self._receiving.fileno())
            self._on_end()


class Sender(Protocol):
    """What a `TensorLink` sends on: a `ChannelEnd`, or what stands for one."""

    @property
    def pool(self) -> RegionPool:
        """The regions of this end."""

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message. See `ChannelEnd.send`."""

    def drop(self, regions: list[int]) -> None:
        """Unmap regions that the other end has freed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TensorLink:
    """Sends messages that may have tensors, each with the dropped references to shared memory.

    Attributes:
        is_open: Whether the other end is still there.
    """

    __slots__ = ("_freed", "_released", "_sender", "is_open")

    def __init__(self, sender: Sender) -> None:
        self.is_open = True
        self._sender = sender
        self._released: list[int] = []  # regions and handles of the other end without references here
        self._freed: list[int] = []  # our own regions

    def outgoing(self) -> Outgoing:
        return Outgoing(self._sender.pool)

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message that ends with the dropped references.

        Args:
            at_once: Whether to send it now, since others are unlikely to follow in this iteration of the event loop.

        Raises:
            ChannelError: It cannot be encoded.
        """
        released, freed = self._released.copy(), self._freed
        self._sender.send((*header, released, freed), outgoing, at_once=at_once)
        # In place: finalizers of arrays in any thread append to this list.
        del self._released[: len(released)]
        self._freed = []

    def release(self, region: int) -> None:
        """Drop the reference to a region of the other end. Thread-safe."""
        self._released.append(region)

    def handle_lists(self, released: list[int], freed: list[int]) -> None:
        """Handle the lists in a message: dropped references to our regions, and regions that the other end has freed.

        Call this after the message's own tensors have been decoded.
        """
        self._freed += self._sender.pool.release(released)
        self._sender.drop(freed)

    def flush(self) -> None:
        """Send dropped references if there are many; an end that only sends would otherwise never reuse memory."""
        if len(self._released) >= RELEASES_HELD_MAX:
            self.send(("release",))
