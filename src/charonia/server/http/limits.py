"""The limits of HTTP requests, connections and parsing. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np

from charonia.core.errors import ServingError, too_large
from charonia.wire.compression import RAISE_THE_LIMIT
from charonia.wire.tensors import Lend

WHOLE_BYTES: Final = 2048
"""Reads up to this number of bytes are parsed whole."""

HEADER_PIECE_BYTES: Final = 4096
"""Longer ones are parsed up to the end of a header, which is searched in this number of bytes."""

CHUNKED_PIECE_BYTES: Final = 4 * 1024
"""Part of a chunked body that is parsed in one step; its end is not known before. More, if the chunks are large."""

CHUNKS_AT_ONCE: Final = 256
"""Chunks after which parsing stops until `resume`."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of an endpoint. A client that exceeds one gets an error.

    Attributes:
        body_bytes_max: Largest request body, as received and after decompression (`--http-max-input-size`).
        discard_bytes_max: A refused body up to this size is read and dropped so that the connection can stay open.
        url_bytes_max: Longest URL.
        header_count_max: Most header fields of a request.
        header_bytes_max: Most bytes of all header fields of a request.
        chunk_count_max: Most chunks of a chunked body.
        pipeline_max: Most requests of a connection in flight; others wait.
        stream_unsent_bytes_max: Bytes of a streamed response that may wait for its client; with more, the request is
            aborted, since a model cannot be paused.
        stream_keep_alive_s: Longest time without an event in a stream of events, after which a comment is sent; 0 for
            none.
        responses_stored_max: Most responses of OpenAI's API that later ones may continue, 0 to store none.
        connections_max: Most connections; another one gets an error and is closed.
        header_timeout_s: Longest time from a request's first byte to the end of its header.
        body_timeout_s: Longest time for a body, plus its size over `body_bytes_per_s_min`.
        body_bytes_per_s_min: Slowest rate at which a body may arrive.
        write_timeout_s: Longest time in which a client reads nothing of a waiting response.
        idle_timeout_s: Longest time between two requests of a connection.
    """

    body_bytes_max: int = 64 * 1024 * 1024
    discard_bytes_max: int = 256 * 1024 * 1024
    url_bytes_max: int = 8 * 1024
    header_count_max: int = 100
    header_bytes_max: int = 64 * 1024
    chunk_count_max: int = 65_536
    pipeline_max: int = 32
    stream_unsent_bytes_max: int = 64 * 1024 * 1024
    stream_keep_alive_s: float = 0.0
    responses_stored_max: int = 0
    connections_max: int = 16_384
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    body_bytes_per_s_min: int = 4096
    write_timeout_s: float = 60.0
    idle_timeout_s: float = 600.0

    def __reduce__(self) -> tuple[type["HttpLimits"], tuple[object, ...]]:
        """Be pickled as arguments: fields of a compiled record cannot be set one by one if it is frozen."""
        return HttpLimits, astuple(self)


DIRECT_BODY_BYTES: Final = 64 * 1024
"""A body of which at least this many bytes are outstanding is received directly into its own buffer."""

ALIGNMENT_BYTES: Final = 64
"""Alignment of the first tensor in such a buffer."""

JSON_SIZE: Final = b"inference-header-content-length"
"""Header field with the length of the JSON part of a body."""


def oversized(size: int, bytes_max: int, is_binary: bool) -> ServingError:
    """Return the error for a body that is too large.

    Args:
        size: Its size in bytes, or what has arrived of it.
        bytes_max: Largest size.
        is_binary: Whether it may hold binary tensors.
    """
    if is_binary:
        message = (
            f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {bytes_max} bytes"
        )
    else:
        message = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {bytes_max} bytes"
    return too_large(message, hint=RAISE_THE_LIMIT)


DIGITS_MAX: Final = 18
"""Longest number in a header field."""


def body_buffer(
    headers: Mapping[bytes, bytes], length: int, parts: Sequence[bytes], lend: Lend | None = None
) -> memoryview:
    """Return the buffer of a body in progress, with the part that has been received.

    Args:
        headers: Header fields by lower-case name.
        length: Size of the whole body in bytes.
        parts: The received parts.
        lend: Lends the memory of bodies with raw tensors: behind JSON, and not compressed.
    """
    json_size = headers.get(JSON_SIZE, b"")
    size = length + ALIGNMENT_BYTES
    has_tensors = bool(json_size) and b"content-encoding" not in headers
    lent = lend(size) if lend is not None and has_tensors else None
    # A bytearray would be zeroed first.
    memory = np.empty(size, np.uint8) if lent is None else np.frombuffer(lent, np.uint8)
    first_tensor = memory.ctypes.data + (int(json_size) if json_size.isdigit() and len(json_size) < DIGITS_MAX else 0)
    start = -first_tensor % ALIGNMENT_BYTES
    body = memory.data[start : start + length]
    received = b"".join(parts)
    body[: len(received)] = received
    return body
