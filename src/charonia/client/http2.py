"""The client's side of one HTTP/2 connection: the only module of the client that uses the HTTP/2 library.

The library is ngh2 (libnghttp2). Streams may close while a batch of events is being handled, so sending on a closed
stream is not an error here: its closing event is already in the queue.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import ngh2
from ngh2 import (
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    ResponseReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)

__all__ = [
    "ClientConnection",
    "ConnectionClosed",
    "DataReceived",
    "ErrorCode",
    "Event",
    "GoAwayReceived",
    "Http2Error",
    "ResponseReceived",
    "StreamClosed",
    "StreamReset",
    "TrailersReceived",
    "is_greeting",
]

STREAM_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Flow-control window of a stream."""

CONNECTION_WINDOW_BYTES: Final = 64 * 1024 * 1024
"""Flow-control window of a connection."""

FRAME_BYTES_MAX: Final = 1024 * 1024
"""Largest frame that the server may send."""

HEADER_LIST_BYTES_MAX: Final = 64 * 1024
"""Largest list of headers or trailers that the server may send."""

ErrorCode = ngh2.ErrorCode
Headers = Sequence[tuple[bytes, bytes]]

_TYPE_OFFSET: Final = 3
_SETTINGS_TYPE: Final = b"\x04"
_GONE: Final = (ngh2.StreamProtocolError, ngh2.ConnectionStateError)


def is_greeting(data: bytes) -> bool:
    """Return whether a server's first bytes can be HTTP/2, which starts with a settings frame."""
    return data[_TYPE_OFFSET : _TYPE_OFFSET + 1] in (b"", _SETTINGS_TYPE)


class Http2Error(Exception):
    """The connection cannot continue."""


class ClientConnection:
    """Bytes in, events out; requests in, bytes out."""

    def __init__(self) -> None:
        self._connection = ngh2.Connection(
            ngh2.Role.CLIENT, ngh2.Configuration(max_inbound_header_list_size=HEADER_LIST_BYTES_MAX)
        )
        self._connection.initiate_connection(
            {
                ngh2.Setting.ENABLE_PUSH: 0,
                ngh2.Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                ngh2.Setting.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
                ngh2.Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
            }
        )
        self._connection.set_local_window_size(CONNECTION_WINDOW_BYTES)

    def receive(self, data: bytes) -> list[Event]:
        """Process bytes from the server and return their events, in order.

        Raises:
            Http2Error: They violate the protocol in a way that ends the connection.
        """
        try:
            self._connection.receive_data(data)
        except ngh2.NGH2Error as error:
            raise Http2Error(str(error)) from error
        return self._connection.events()

    def events(self) -> list[Event]:
        """Return events caused by sending: streams that could no longer be opened."""
        return self._connection.events()

    def output(self) -> bytes:
        return self._connection.data_to_send()

    def request(self, headers: Headers, body: Sequence[bytes | memoryview]) -> int:
        """Send a whole request and return its stream; it waits while the server allows no more streams.

        Raises:
            Http2Error: The connection accepts no more requests.
        """
        connection = self._connection
        try:
            stream_id = connection.send_request(headers)
            last = len(body) - 1
            for index, part in enumerate(body):
                connection.send_data(stream_id, part, end_stream=index == last)
        except ngh2.NGH2Error as error:
            raise Http2Error(str(error)) from error
        return stream_id

    def unsent_bytes(self, stream_id: int) -> int:
        """Return how much of a request's body waits for the server's flow-control window."""
        try:
            return self._connection.queued_body_size(stream_id)
        except _GONE:
            return 0

    def reset(self, stream_id: int) -> None:
        with suppress(*_GONE):
            self._connection.reset_stream(stream_id, ErrorCode.CANCEL)

    def terminate(self) -> None:
        with suppress(*_GONE):
            self._connection.terminate_connection(ErrorCode.NO_ERROR)
