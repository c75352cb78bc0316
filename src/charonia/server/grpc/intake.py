"""What a connection has read and not handled yet: bytes, and the events of those that are parsed.

Bytes are parsed in pieces, which grow while they have few events: a large tensor is parsed almost at once, a flood of
small frames is not. Calls that begin and are cancelled within a piece never begin.
"""

from collections import deque
from collections.abc import Callable, Sequence

from charonia.server.grpc.http2 import DataReceived, Event, RequestReceived, ServerConnection, StreamReset

EVENTS_AT_ONCE = 32
"""So many events of a connection are handled at once; a call is two or more."""

EVENTS_PER_ROUND = 8
"""Of more, so many are handled in each round of the event loop."""

PIECE_BYTES_MIN = 4 * 1024
"""Bytes that are parsed at once at first, and after a piece with many events."""

PIECE_BYTES_MAX = 1024 * 1024
"""Bytes that are parsed at once after several pieces with few events."""


FRAME_HEAD_BYTES = 9

_OF_HEADERS = (b"\x01", b"\x09")
"""Types of frames: HEADERS and CONTINUATION."""


class Intake:
    """Turns the bytes of a connection into events, a few at a time.

    Attributes:
        has_more: Whether bytes or events wait.
        is_cut: Whether the last bytes that were parsed had no event, and end within a frame or within headers.
    """

    __slots__ = ("_events", "_http2", "_piece_bytes", "_unread", "has_more", "is_cut")

    def __init__(self, http2: ServerConnection) -> None:
        self._http2 = http2
        self._events: deque[Event] = deque()
        self._unread = b""
        self._piece_bytes = PIECE_BYTES_MIN
        self.has_more = False
        self.is_cut = False

    def add(self, data: bytes) -> None:
        """Add bytes behind what is there."""
        self._unread = self._unread + data if self._unread else data
        self.has_more = True

    def clear(self) -> None:
        """Drop everything."""
        self._events.clear()
        self._unread = b""
        self.has_more = False

    def next_events(self, room: int, cancelled: Callable[[StreamReset], bool]) -> tuple[Sequence[Event], int]:
        """Return up to `room` events, in order, and the room that is left.

        Args:
            room: Most events.
            cancelled: Counts a call that was cancelled before it began; returns whether the connection goes on.

        Returns:
            The events, and the number of further ones that may be handled at once: none after a piece with more events
            than `room`, even if all of them are of cancelled calls.

        Raises:
            Http2Error: A protocol error that ends the connection.
        """
        waiting = self._events
        if not waiting:
            size = self._piece_bytes
            data, self._unread = self._unread[:size], self._unread[size:]
            events = self._http2.receive(data)
            self.is_cut = not events and _ends_within(data)
            if len(events) <= room:
                if size < PIECE_BYTES_MAX:
                    self._piece_bytes = size * 2
                self.has_more = bool(self._unread)
                return events, room - max(len(events), 1)
            self._piece_bytes = PIECE_BYTES_MIN
            waiting += self._begun(events, cancelled)
            room = EVENTS_PER_ROUND
            left = 0
        else:
            left = max(room - len(waiting), 0)
        taken = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        self.has_more = bool(waiting or self._unread)
        return taken, left

    def newest_stream(self) -> int:
        """Return the newest stream whose request waits, 0 if none does."""
        return max((event.stream_id for event in self._events if type(event) is RequestReceived), default=0)

    def _begun(self, events: Sequence[Event], cancelled: Callable[[StreamReset], bool]) -> list[Event]:
        """Return the events without those of calls that begin and are cancelled within them."""
        begun = {event.stream_id for event in events if type(event) is RequestReceived}
        ended = {event.stream_id for event in events if type(event) is StreamReset} & begun
        found = []
        for event in events:
            if getattr(event, "stream_id", 0) not in ended:
                found.append(event)
            elif isinstance(event, DataReceived):
                self._http2.consume(event.stream_id, len(event.data))
            elif isinstance(event, StreamReset) and not cancelled(event):
                return []
        return found


def _ends_within(data: bytes) -> bool:
    """Return whether frames end within one, or with headers that go on in the next frame."""
    at, kind = 0, b""
    while at < len(data) <= PIECE_BYTES_MIN:
        kind = data[at + 3 : at + 4]
        at += FRAME_HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
    return at > len(data) or kind in _OF_HEADERS
