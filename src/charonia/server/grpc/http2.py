"""The server's side of one HTTP/2 connection: the only module that depends on the HTTP/2 library.

The library is ngh2 (libnghttp2). The rest of the front end uses `ServerConnection` and the events below, which any
sans-IO library could provide; hyper-h2 has the same events under almost the same names.

Streams may close while a list of events is being handled, so sending to a closed one is not an error here: the event
that reports it follows.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import ngh2
from ngh2 import (
    ConnectionClosed,
    DataReceived,
    Event,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)

__all__ = [
    "PREFACE",
    "ConnectionClosed",
    "DataReceived",
    "ErrorCode",
    "Event",
    "Http2Error",
    "Http2Settings",
    "PingAcknowledged",
    "PingReceived",
    "RequestReceived",
    "ServerConnection",
    "SettingsReceived",
    "StreamClosed",
    "StreamReset",
    "TrailersReceived",
    "has_response",
]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client."""

SHUTDOWN_PING: Final = b"shutdown"
"""Content of the ping that follows the notice of a shutdown."""

FATAL_FACTOR: Final = 4
"""Up to this many times a limit, the server answers with an error; above, the library ends the connection."""

_FRAME_HEAD_BYTES: Final = 9
_HEADERS: Final = 1
"""Type of a frame with headers; 0 is one with data."""

ErrorCode = ngh2.ErrorCode
Headers = Sequence[tuple[bytes, bytes]]

_GONE: Final = (ngh2.StreamProtocolError, ngh2.ConnectionStateError)
_GOAWAY_HEAD: Final = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00"


class Http2Error(Exception):
    """The connection cannot continue.

    Attributes:
        last_words: Bytes to send before it is closed.
        is_abuse: Whether the library considers it an attack.
    """

    def __init__(self, message: str, last_words: bytes, *, is_abuse: bool = False) -> None:
        super().__init__(message)
        self.last_words = last_words
        self.is_abuse = is_abuse


@dataclass(frozen=True, slots=True)
class Http2Settings:
    """Settings of a connection.

    Attributes:
        concurrent_streams_max: Limit of concurrent streams.
        stream_window_bytes: Flow-control window of a stream.
        connection_window_bytes: Flow-control window of all streams together.
        frame_bytes_max: Largest frame.
        header_list_bytes_max: Largest list of headers.
        resets_burst: Streams that the client may reset in a burst; the library closes the connection well above that.
        resets_per_s: Rate at which this allowance is refilled.
    """

    concurrent_streams_max: int
    stream_window_bytes: int
    connection_window_bytes: int
    frame_bytes_max: int
    header_list_bytes_max: int
    resets_burst: int
    resets_per_s: int


def has_response(output: bytes) -> bool:
    """Whether output has a part of a response, besides answers to pings and settings, and windows."""
    at = 0
    while at + _FRAME_HEAD_BYTES <= len(output):
        if output[at + 3] <= _HEADERS:
            return True
        at += _FRAME_HEAD_BYTES + int.from_bytes(output[at : at + 3], "big")
    return False


class ServerConnection:
    """Bytes in, events out; replies in, bytes out.

    Attributes:
        last_stream_id: The newest stream with a request.
        waiting_bytes: Returns the bytes of all response bodies that wait for the client's windows.
    """

    def __init__(self, settings: Http2Settings) -> None:
        self.last_stream_id = 0
        self._connection = ngh2.Connection(
            ngh2.Role.SERVER,
            ngh2.Configuration(
                auto_window_update=False,
                max_inbound_header_list_size=settings.header_list_bytes_max * FATAL_FACTOR,
                stream_reset_rate_limit=(settings.resets_burst * FATAL_FACTOR, settings.resets_per_s * FATAL_FACTOR),
            ),
        )
        self.waiting_bytes: Callable[[], int] = self._connection.queued_body_size  # asked with every call
        self._connection.initiate_connection(
            {
                ngh2.Setting.MAX_CONCURRENT_STREAMS: settings.concurrent_streams_max,
                ngh2.Setting.INITIAL_WINDOW_SIZE: settings.stream_window_bytes,
                ngh2.Setting.MAX_FRAME_SIZE: settings.frame_bytes_max,
                ngh2.Setting.MAX_HEADER_LIST_SIZE: settings.header_list_bytes_max,
            }
        )
        self._connection.set_local_window_size(settings.connection_window_bytes)

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes from the client and return their events, in order.

        Raises:
            Http2Error: A protocol error that ends the connection.
        """
        try:
            self._connection.receive_data(data)
        except ngh2.ConnectionStateError as ended:
            raise Http2Error(str(ended), b"") from ended
        except ngh2.NGH2Error as error:
            calm = isinstance(error, ngh2.DenialOfServiceError)
            code = ErrorCode.ENHANCE_YOUR_CALM if calm else ErrorCode.PROTOCOL_ERROR
            # The library produces no more output after such an error, so the frame is made here.
            last_words = _GOAWAY_HEAD + self.last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
            raise Http2Error(str(error), last_words, is_abuse=calm) from error
        return self._connection.events()

    def events(self) -> list[Event]:
        """Return events caused by sending: streams, or the connection, that are closed now."""
        return self._connection.events()

    def output(self) -> bytes:
        return self._connection.data_to_send()

    def has_output(self) -> bool:
        """Return whether there is something to send; faster than `output` where there is nothing."""
        return self._connection.want_write

    def respond(self, stream_id: int, head: Headers, body: Sequence[bytes | memoryview], trailers: Headers) -> None:
        connection = self._connection
        try:
            connection.send_response(stream_id, head)
            for part in body:
                connection.send_data(stream_id, part)
            connection.send_trailers(stream_id, trailers)
        except _GONE:
            return

    def send_head(self, stream_id: int, head: Headers, *, end: bool = False) -> None:
        """Begin a response; `end` makes it the whole response."""
        with suppress(*_GONE):
            self._connection.send_response(stream_id, head, end_stream=end)

    def send_data(self, stream_id: int, body: Sequence[bytes | memoryview]) -> None:
        with suppress(*_GONE):
            for part in body:
                self._connection.send_data(stream_id, part)

    def send_trailers(self, stream_id: int, trailers: Headers) -> None:
        with suppress(*_GONE):
            self._connection.send_trailers(stream_id, trailers)

    def reset(self, stream_id: int, code: int) -> None:
        """Close a stream in both directions."""
        with suppress(*_GONE):
            self._connection.reset_stream(stream_id, code)

    def consume(self, stream_id: int, amount: int) -> None:
        try:  # `suppress` would cost more than the call itself
            self._connection.acknowledge_received_data(amount, stream_id)
        except _GONE:
            return

    def unsent_bytes(self, stream_id: int) -> int:
        """Return the bytes of a response's body that wait for the client's window."""
        return self._connection.queued_body_size(stream_id)

    def ping(self) -> None:
        with suppress(*_GONE):
            self._connection.ping()

    def announce_shutdown(self) -> None:
        """Tell the client to open no more streams; those in transit are still served.

        A ping follows: `PingAcknowledged` with SHUTDOWN_PING confirms that the client has read it.
        """
        with suppress(*_GONE):
            self._connection.send_shutdown_notice()
            self._connection.ping(SHUTDOWN_PING)

    def refuse_streams(self) -> None:
        """Refuse streams after `last_stream_id`; open ones continue."""
        with suppress(*_GONE):
            self._connection.send_goaway(ErrorCode.NO_ERROR, last_stream_id=self.last_stream_id)

    def terminate(self, code: int, reason: bytes = b"") -> None:
        """End the connection, with the reason in the last frame."""
        with suppress(*_GONE):
            if reason:
                self._connection.send_goaway(code, last_stream_id=self.last_stream_id, debug_data=reason)
            else:
                self._connection.terminate_connection(code, last_stream_id=self.last_stream_id)
